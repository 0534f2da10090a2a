"""Sequences of a search in a paged cache.

A node stores the `seq_id` of its sequence. The cache is one value in the search loop's
carry. (mctx stores node data, the embedding, in arrays with a row per node, so each
node would have its own pool.)

Symbols: `B` sequences of a call, `V` tokens in the vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jkv


class PagedSequences(NamedTuple):
    """Cached sequences that implement `search.Sequences`; ids of -1 are padding."""

    cache: jkv.Cache
    peak_blocks: jax.Array  # i32[], peak number of blocks in use
    unshared_peak_blocks: jax.Array  # i32[], the same without sharing

    @classmethod
    def open(
        cls, model: Any, params: Any, cache: jkv.Cache, prompt: jax.Array, count: int
    ) -> tuple["PagedSequences", jax.Array, jax.Array]:
        """Compute a prompt once, and open `count` sequences that continue it.

        Args:
          model: a `jkv.decoding.Model`.
          params: its parameters.
          cache: an empty cache.
          prompt: i32[P].
          count: B.

        Returns:
          The sequences, their ids, i32[B], and their next logits, f32[B, V].
        """
        cache, opened = jkv.allocate(cache, [0])
        length = prompt.shape[0]
        cache, batch = jkv.append(cache, opened.seq_ids, [length], capacity=length)
        logits, cache = model(params, prompt, cache, batch)
        sequences = cls(jkv.commit(cache, batch), jnp.int32(0), jnp.int32(0))
        sequences, seq_ids = sequences.branch(jnp.repeat(opened.seq_ids, count))
        return (
            sequences.drop(opened.seq_ids),
            seq_ids,
            jnp.repeat(logits, count, axis=0),
        )

    def branch(self, seq_ids: jax.Array) -> tuple["PagedSequences", jax.Array]:
        """Fork sequences, i32[B]; return the new ids, i32[B]."""
        cache, forked = jkv.fork(self.cache, seq_ids)
        return self._replace(cache=cache), forked.seq_ids

    def extend(
        self, model: Any, params: Any, seq_ids: jax.Array, tokens: jax.Array
    ) -> tuple["PagedSequences", jax.Array]:
        """Append a token, i32[B], to each sequence; return next logits, f32[B, V]."""
        cache, batch = jkv.append(self.cache, seq_ids)
        logits, cache = model(params, tokens, cache, batch)
        return self.count_blocks(jkv.commit(cache, batch)), logits

    def cut(self, seq_ids: jax.Array, counts: jax.Array) -> "PagedSequences":
        """Truncate the last `counts` tokens, i32[B], of each sequence."""
        lengths = self.cache.metadata.context_lengths[seq_ids]
        cache, _ = jkv.truncate(self.cache, seq_ids, lengths - counts)
        return self._replace(cache=cache)

    def drop(self, seq_ids: jax.Array) -> "PagedSequences":
        """Free sequences."""
        cache, _ = jkv.free(self.cache, seq_ids)
        return self._replace(cache=cache)

    def count_blocks(self, cache: jkv.Cache) -> "PagedSequences":
        """Store the cache of a step, and update the peak block counts."""
        used = cache.num_blocks - jkv.num_free_blocks(cache)
        alone = -(-cache.metadata.context_lengths // cache.block_size)
        return PagedSequences(
            cache,
            jnp.maximum(self.peak_blocks, used),
            jnp.maximum(self.unshared_peak_blocks, alone.sum()),
        )
