"""Prefill: what texts lack in the cache is computed, in chunks, the oldest first.

Symbols: B texts, R rows of a chunk, V tokens in the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.decoding.model.rows import locate_rows, share_rows
from jkv.decoding.model.runner import Runner
from jkv.decoding.texts.blocks import count_cached
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Batch, Cache

Carry = TypeVar("Carry")


class Unread(NamedTuple):
    """Texts of which tokens are not in the cache yet."""

    seq_ids: jax.Array  # i32[B], their sequences, -1 for none
    # Returns the tokens, i32[R], of texts i32[R] at positions i32[R].
    find_tokens: Callable[[jax.Array, jax.Array], jax.Array]
    commits: bool = True  # whether full blocks can be found afterwards
    partings: jax.Array | None = None  # i32[B], as for `end_at_snapshots`


def run_chunk(
    runner: Runner,
    cache: Cache,
    texts: Unread,
    done: jax.Array,  # i32[B], tokens of each that are in the cache
    counts: jax.Array,  # i32[B], tokens to compute of each, together at most R
    num_rows: int,  # R
) -> tuple[Cache, Batch, jax.Array]:
    """Compute the next tokens of texts in one step; returns as `Runner.run`."""
    seq_ids = jnp.where(counts > 0, texts.seq_ids, NO_SEQUENCE)
    tokens = texts.find_tokens(*locate_rows(counts, done, num_rows))
    return runner.run(cache, seq_ids, tokens, counts, commits=texts.commits)


class ChunkSizes(NamedTuple):
    """How a chunk is divided among texts."""

    num_rows: int  # R, at least B
    # i32[B], a permutation: texts with the smallest have rows first. None: their order.
    ages: jax.Array | None = None
    most_each: int | None = None  # tokens of a text in a chunk; None: as many as rows

    def share(self, left: jax.Array) -> jax.Array:
        """Return the rows of each text, i32[B], of which so much is left, i32[B]."""
        ages = self.ages
        if ages is None:
            ages = jnp.arange(left.shape[0], dtype=jnp.int32)
        if self.most_each is not None:
            left = jnp.minimum(left, self.most_each)
        return share_rows(left, ages, self.num_rows)


def end_at_snapshots(
    cache: Cache,
    done: jax.Array,  # i32[B], tokens of each text in it
    counts: jax.Array,  # i32[B], tokens to compute now
    left: jax.Array,  # i32[B], tokens to compute at all
    # i32[B], where each text parts from others, 0 where that is not known
    parting: jax.Array | None = None,
) -> jax.Array:
    """Return fewer rows of texts, i32[B], where their states are to be copied.

    A text stops at the last multiple of `snapshot_every` before its end, from which a
    prompt that begins like it goes on; at the one up to which it is like a text that is
    known; and, where a chunk does not reach its end, at the last that the chunk has.
    One row is left at least where there was one.
    """
    snapshot_every, end = cache.metadata.index.snapshot_every, done + counts
    if snapshot_every is None:
        return counts
    every = jnp.int32(snapshot_every)

    def floor(lengths: jax.Array) -> jax.Array:
        return jax.lax.div(lengths, every) * every

    stops = [floor(jnp.maximum(done + left - 1, 0))]
    stops.append(jnp.where(counts < left, floor(end), end))
    if parting is not None:
        stops.append(floor(parting))
    for stop in stops:
        end = jnp.where(stop > done, jnp.minimum(end, stop), end)
    return jnp.where(counts > 0, end - done, counts)


class Chunk(NamedTuple):
    """What a chunk brought, for each text."""

    logits: jax.Array  # f32[B, V], after the text's last row, any without one
    batch: Batch  # what the cache answered, and the rows that were computed
    is_whole: jax.Array  # bool[B], whether it brought all that was left


def run_chunks(
    runner: Runner,
    cache: Cache,
    texts: Unread,
    carry: Carry,
    sizes: ChunkSizes,
    *,
    count_left: Callable[[Carry, jax.Array], jax.Array],
    note: Callable[[Cache, Carry, Chunk], Carry],
) -> tuple[Cache, Carry]:
    """Compute texts in chunks, until nothing is left or no text finds a block.

    Args:
      texts: B of them.
      carry: what `note` changes.
      sizes: how a chunk is divided.
      count_left: of the carry and the tokens of each text in the cache, i32[B]: i32[B],
        how many more are to be computed.
      note: returns what becomes of the carry after a chunk.
    """

    def find_left(cache: Cache, carry: Carry) -> tuple[jax.Array, jax.Array]:
        done = count_cached(cache, texts.seq_ids)
        left = count_left(carry, done)
        return done, jnp.where(texts.seq_ids >= 0, left, 0)

    def trip(
        loop: tuple[Cache, Carry, jax.Array],
    ) -> tuple[Cache, Carry, jax.Array]:
        cache, carry, _ = loop
        done, left = find_left(cache, carry)
        counts = end_at_snapshots(cache, done, sizes.share(left), left, texts.partings)
        cache, batch, logits = run_chunk(
            runner, cache, texts, done, counts, sizes.num_rows
        )
        is_served = batch.query_lengths > 0
        carry = note(cache, carry, Chunk(logits, batch, is_served & (counts == left)))
        return cache, carry, jnp.any(is_served)

    def goes_on(loop: tuple[Cache, Carry, jax.Array]) -> jax.Array:
        _, left = find_left(*loop[:2])
        return jnp.any(left > 0) & loop[2]

    cache, carry, _ = while_loop(goes_on, trip, (cache, carry, jnp.ones((), bool)))
    return cache, carry
