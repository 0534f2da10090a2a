"""Where the texts of a search are: in a paged cache, a sequence for each.

A node refers to its text by an integer, the number of a sequence. The cache is one
value, carried by the loop of the search. (mctx keeps a node's data, its embedding, in
arrays with a row for each node. There every node would have a pool.)

Symbols: `B` texts of a call, `V` tokens in the vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jkv


class PagedTexts(NamedTuple):
    """Texts in a cache, the `Texts` of `search.py`; -1 is padding for every verb."""

    cache: jkv.Cache
    peak_blocks: jax.Array  # i32[], the most blocks that were in use at one time
    unshared_peak_blocks: jax.Array  # i32[], the same if each text had its own

    @classmethod
    def open(
        cls, model: Any, params: Any, cache: jkv.Cache, prompt: jax.Array, count: int
    ) -> tuple["PagedTexts", jax.Array, jax.Array]:
        """Compute a prompt once, and open texts that continue it.

        Args:
          model: a `jkv.decoding.Model`.
          params: its weights.
          cache: where to.
          prompt: i32[P].
          count: B.

        Returns:
          The texts, their numbers, i32[B], and the logits after them, f32[B, V].
        """
        cache, opened = jkv.allocate(cache, [0])
        length = prompt.shape[0]
        cache, batch = jkv.append(cache, opened.seq_ids, [length], capacity=length)
        logits, cache = model(params, prompt, cache, batch)
        texts = cls(jkv.commit(cache, batch), jnp.int32(0), jnp.int32(0))
        texts, seq_ids = texts.branch(jnp.repeat(opened.seq_ids, count))
        return texts.drop(opened.seq_ids), seq_ids, jnp.repeat(logits, count, axis=0)

    def branch(self, seq_ids: jax.Array) -> tuple["PagedTexts", jax.Array]:
        """Open a text on the past of each one given, i32[B]; return their numbers."""
        cache, forked = jkv.fork(self.cache, seq_ids)
        return self._replace(cache=cache), forked.seq_ids

    def extend(
        self, model: Any, params: Any, seq_ids: jax.Array, tokens: jax.Array
    ) -> tuple["PagedTexts", jax.Array]:
        """Append a token, i32[B], to each text; return logits after it, f32[B, V]."""
        cache, batch = jkv.append(self.cache, seq_ids)
        logits, cache = model(params, tokens, cache, batch)
        return self.count_blocks(jkv.commit(cache, batch)), logits

    def cut(self, seq_ids: jax.Array, counts: jax.Array) -> "PagedTexts":
        """Take the newest tokens, i32[B], back from each text."""
        lengths = self.cache.metadata.context_lengths[seq_ids]
        cache, _ = jkv.truncate(self.cache, seq_ids, lengths - counts)
        return self._replace(cache=cache)

    def drop(self, seq_ids: jax.Array) -> "PagedTexts":
        """Give texts up."""
        cache, _ = jkv.free(self.cache, seq_ids)
        return self._replace(cache=cache)

    def count_blocks(self, cache: jkv.Cache) -> "PagedTexts":
        """Take the cache of a step, and count its blocks in use."""
        used = cache.num_blocks - jkv.num_free_blocks(cache)
        alone = -(-cache.metadata.context_lengths // cache.block_size)
        return PagedTexts(
            cache,
            jnp.maximum(self.peak_blocks, used),
            jnp.maximum(self.unshared_peak_blocks, alone.sum()),
        )
