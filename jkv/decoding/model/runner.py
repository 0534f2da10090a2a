"""A model with its weights: steps, and prefill in chunks.

A step has one row for each running sequence; the rest go to the oldest. Prefill
computes the uncached tokens of sequences in chunks, oldest first.

Symbols: B sequences, W places, R rows of a step or a chunk, V vocabulary size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.arguments import explains_arguments
from jkv.decoding.model.drafter import Drafter, Follower, SharedLayers
from jkv.decoding.model.steps import (
    CHUNK_SIZE,
    Exact,
    Model,
    call_model,
)
from jkv.decoding.sequences.blocks import count_cached
from jkv.masks import CAUSAL, SpanMask
from jkv.metadata.requests import check_counts, saturating_cumsum
from jkv.operations import find_owners, gather, running_sum, when, while_loop
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.writing import commit

# Most sizes that `spread_row_counts` returns: each compiles a copy of the model.
_MOST_SIZES = 4

_LEAST_SPARED = 128  # rows that a further size must save

_MULTIPLE = 16  # of the sizes in between, for matrix units


class Runner(NamedTuple):
    """A model with its weights.

    Symbols: B sequences of a step, R rows, V vocabulary size.
    """

    model: Model
    params: Any
    exact: Exact | None = None  # fixed shape of all calls; None: varies
    drafter: Drafter | None = None  # behind each call of the model; None for none

    def run(
        self,
        cache: Cache,  # with the open sequences
        seq_ids: jax.Array,  # i32[B], -1 for none
        # i32[R], >= 0, arbitrary for padding: one per sequence without counts, else the
        # tokens of each sequence in turn.
        tokens: jax.Array,
        counts: jax.Array | None = None,  # i32[B], tokens of each
        *,
        # True if a prefix index may find full blocks afterwards
        commits: bool = True,
        # i32[], newest tokens per sequence that recurrent-state layers may have to roll
        # back
        num_pending: jax.Array | int = 0,
        # i32[B], rows to return logits of; None for the last of each sequence
        logit_rows: jax.Array | None = None,
    ) -> tuple[Cache, Batch, jax.Array]:
        """Append tokens to sequences, compute their rows and commit them.

        Returns:
          The cache, the batch, and f32[B, V]: the logits of each sequence's last row,
          or of `logit_rows`; arbitrary without a row.
        """
        num_sequences = seq_ids.shape[0]
        cache, batch, tokens = self.append(
            cache, seq_ids, tokens, counts, records=commits, num_pending=num_pending
        )
        if logit_rows is not None:
            batch = dataclasses.replace(batch, logit_rows=logit_rows)
        cache, logits = self.compute(cache, batch, tokens)
        if commits:
            cache = commit(cache, batch)
        if num_sequences < batch.seq_ids.shape[0]:
            batch = batch.first_requests(num_sequences)
            logits = logits[:num_sequences]
        return cache, batch, logits

    def append(
        self,
        cache: Cache,
        seq_ids: jax.Array,  # i32[B]
        tokens: jax.Array,  # i32[R]
        counts: jax.Array | None,  # i32[B]
        *,
        records: bool = True,
        num_pending: jax.Array | int = 0,
        mask: SpanMask | None = None,  # of the R rows
        max_span: int | None = None,
    ) -> tuple[Cache, Batch, jax.Array]:
        """Append tokens to sequences; arguments as for `run`.

        Returns:
          The cache, the batch and its tokens; both are padded with `exact`.
        """
        if self.exact is not None:
            self.exact.check_cache(cache)
            seq_ids, tokens, counts = self.exact.pad(seq_ids, tokens, counts)
        # Without counts rows are sequences, which costs less.
        num_rows = None if counts is None else tokens.shape[0]
        if mask is not None:
            more = (0, tokens.shape[0] - mask.ends.shape[0])  # rows of padding
            ends = jnp.pad(mask.ends, more, constant_values=-1)
            mask = dataclasses.replace(mask, ends=ends)
        cache, batch = append(
            cache,
            seq_ids,
            1 if counts is None else counts,
            tokens=tokens if records else None,
            num_pending=num_pending,
            capacity=num_rows,
            mask=CAUSAL if mask is None else mask,
            max_span=max_span,
        )
        return cache, batch, tokens

    def compute(
        self, cache: Cache, batch: Batch, tokens: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Compute the rows of an appended step; commit nothing.

        Args:
          cache: after the `append` that returned the batch.
          batch: the step, of R rows.
          tokens: i32[R].

        Returns:
          The cache and f32[B, V], the logits of each sequence's last row.
        """
        logits, cache = self._call(tokens, cache, batch)
        return cache, logits.astype(jnp.float32)

    def _call(
        self, tokens: jax.Array, cache: Cache, batch: Batch
    ) -> tuple[jax.Array, Cache]:
        """Call the model; with `exact` as a program of its own.

        XLA fuses a model with its surroundings, which may change the rounding. A loop
        of one trip that carries all inputs of the model leaves nothing to fuse it with.
        """
        if self.exact is None:
            return call_model(self.model, self.params, tokens, cache, batch)[:2]
        batch = self.exact.fix(cache, batch)
        leaves, structure = jax.tree.flatten((tokens, batch))

        def call(
            carry: tuple[jax.Array, Cache], *leaves: jax.Array
        ) -> tuple[jax.Array, Cache]:
            tokens, batch = jax.tree.unflatten(structure, leaves)
            return call_model(self.model, self.params, tokens, carry[1], batch)[:2]

        logits = jax.eval_shape(call, (tokens, cache), *leaves)[0]
        empty = jnp.zeros(logits.shape, logits.dtype)
        return when(jnp.any(batch.query_lengths > 0), call, (empty, cache), *leaves)

    def compute_followed(
        self,
        cache: Cache,  # after the `append` that returned the batch
        batch: Batch,  # the step, of R rows
        tokens: jax.Array,  # i32[R]
        follower: Follower,  # of B requests
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Compute an appended step and update the drafter; do not commit.

        Returns:
          The cache; f32[B, V], the logits of each sequence's last row; and f32[B, A],
          its auxiliary hidden states.
        """
        cache, logits, hidden = self.compute_hidden(cache, batch, tokens)
        cache = follower.update(cache, batch, tokens, hidden)
        return cache, logits, follower.read_last(batch, hidden)

    def compute_hidden(
        self,
        cache: Cache,  # after the `append` that returned the batch
        batch: Batch,  # the step, of R rows
        tokens: jax.Array,  # i32[R]
        *,
        all_rows: bool = False,  # logits of every row instead of last rows
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Compute an appended step for a drafter; do not commit.

        Returns:
          The cache, the logits, and f32[R, A], the hidden states of the drafter's
          auxiliary layers, without columns for none.
        """
        assert self.drafter is not None
        whole, aux_layers = cache.layer_groups, self.drafter.aux_layers
        # The target's own layers: it may scan over them.
        layers = SharedLayers.of(cache, self.drafter).target
        called = call_model(
            self.model,
            self.params,
            tokens,
            cache.with_layers(layers),
            batch,
            all_rows=all_rows,
            aux_layers=aux_layers,
        )
        hidden = called.hidden
        if hidden is None:
            hidden = jnp.zeros((batch.num_rows, 0), jnp.float32)
        cache = called.cache.with_layers(whole)
        return cache, called.logits.astype(jnp.float32), hidden

    def count_hidden(self, cache: Cache, num_sequences: int) -> int:
        """Return A, the width of the hidden states; the model is only traced."""
        nowhere = jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32)

        def probe(cache: Cache) -> jax.Array:
            tokens = jnp.zeros((num_sequences + 1,), jnp.int32)
            counts = jnp.zeros_like(nowhere)
            cache, batch, tokens = self.append(cache, nowhere, tokens, counts)
            return self.compute_hidden(cache, batch, tokens)[2]

        return int(jax.eval_shape(probe, cache).shape[1])

    def count_vocabulary(self, cache: Cache, num_sequences: int) -> int:
        """Return V, from the shape of the logits; the model is only traced."""

        if self.drafter is not None:
            shared = SharedLayers.of(cache, self.drafter)
            cache = cache.with_layers(shared.target)

        def probe(cache: Cache) -> jax.Array:
            nowhere = jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32)
            # One row more than sequences: a model may confuse the two sizes.
            tokens = jnp.zeros((num_sequences + 1,), jnp.int32)
            return self.run(cache, nowhere, tokens, jnp.zeros_like(nowhere))[2]

        return int(jax.eval_shape(probe, cache).shape[1])


@explains_arguments
def spread_row_counts(
    max_running: int, chunk_size: int = CHUNK_SIZE
) -> tuple[int, ...]:
    """Return row counts for queues of prompts much shorter than a chunk.

    If one sequence finishes at a time, a step has the rows of one prompt beside the
    running sequences, and `generate` computes all rows of the smallest sufficient size.
    Sizes between the smallest and the largest, at equal ratios, avoid most of that
    padding; each compiles a copy of the model.

    Args:
      max_running: most sequences that run at one time, the smallest size.
      chunk_size: rows of the largest size, unless more sequences run.

    Returns:
      Ascending numbers for `row_counts` of `generate`, at most four.

    Raises:
      ValueError: for a number below 1.

    Example:
      >>> from jkv.decoding import spread_row_counts
      >>> spread_row_counts(64), spread_row_counts(8), spread_row_counts(8, 64)
      ((64, 128, 256, 512), (8, 128, 512), (8, 64))
    """
    check_counts(max_running=max_running, chunk_size=chunk_size)
    most = max(max_running, chunk_size)
    ratio = most / max_running
    num_sizes = min(_MOST_SIZES, 1 + int(math.log2(ratio)))
    counts = [most]
    for i in reversed(range(1, num_sizes - 1)):
        size = max_running * ratio ** (i / (num_sizes - 1))
        size = _MULTIPLE * round(size / _MULTIPLE)
        if size > max_running and counts[0] - size >= _LEAST_SPARED:
            counts.insert(0, size)
    return tuple(sorted({max_running, *counts}))


def share_rows(
    left: jax.Array,  # i32[W], tokens still to compute
    ages: jax.Array,  # i32[W], ages of the places
    num_rows: int,  # rows of the largest step, at least W
    # i32[W], least rows that a place can use, more than 1 for a span; None: 1
    least: jax.Array | None = None,
) -> jax.Array:
    """Return the rows of a step for each place, i32[W].

    A place may get fewer than its least rows. To not starve it, younger prompts get
    rows only after it.
    """
    first = jnp.minimum(left, 1)
    if least is not None:
        oldest = jnp.min(jnp.where((left > 0) & (least > 1), ages, ages.shape[0]))
        first = jnp.where((left > 1) & (ages >= oldest), 0, first)
    more = jnp.clip(left - first, 0, num_rows)
    more_by_age = jnp.zeros_like(more).at[ages].set(more)
    wanted = saturating_cumsum(more_by_age, num_rows)
    wanted_by_older = gather(
        jnp.concatenate([jnp.zeros((1,), jnp.int32), wanted[:-1]]), ages
    )
    room = num_rows - jnp.sum(first, dtype=jnp.int32)
    return first + jnp.clip(room - wanted_by_older, 0, more)


def locate_rows(
    counts: jax.Array,  # i32[W], rows of each place, in turn
    first: jax.Array,  # i32[W], position of the first row of each place
    num_rows: int,  # R, static
) -> tuple[jax.Array, jax.Array]:
    """Return the owner and the position of each row of a step, i32[R] each."""
    starts = running_sum(counts) - counts
    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = find_owners(starts, 0, num_rows)
    return owner, row + gather(first - starts, owner)


def choose_size(work: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Return the index of the smallest of ascending sizes that fits the work, i32[]."""
    too_small = [(work > size).astype(jnp.int32) for size in sizes[:-1]]
    return sum(too_small, start=jnp.int32(0))


Carry = TypeVar("Carry")


class Unread(NamedTuple):
    """Sequences with tokens that are not in the cache yet."""

    seq_ids: jax.Array  # i32[B], their cache rows, -1 for none
    # Returns the tokens, i32[R], of sequences i32[R] at positions i32[R].
    find_tokens: Callable[[jax.Array, jax.Array], jax.Array]
    commits: bool = True  # full blocks can be found afterwards
    divergence: jax.Array | None = None  # i32[B], as for `end_at_snapshots`


def run_chunk(
    runner: Runner,
    cache: Cache,
    unread: Unread,
    done: jax.Array,  # i32[B], tokens in the cache
    counts: jax.Array,  # i32[B], tokens to compute, at most R in total
    num_rows: int,  # R
) -> tuple[Cache, Batch, jax.Array]:
    """Compute the next tokens of sequences in one step; returns as `Runner.run`."""
    seq_ids = jnp.where(counts > 0, unread.seq_ids, NO_SEQUENCE)
    tokens = unread.find_tokens(*locate_rows(counts, done, num_rows))
    return runner.run(cache, seq_ids, tokens, counts, commits=unread.commits)


class ChunkSizes(NamedTuple):
    """The division of a chunk among sequences."""

    num_rows: int  # R, at least B
    # i32[B], a permutation: smaller ages get rows first. None: in order.
    ages: jax.Array | None = None
    most_each: int | None = None  # most tokens of a sequence in a chunk; None: no limit

    def share(self, left: jax.Array) -> jax.Array:
        """Return the rows of each sequence, i32[B], from its remaining tokens."""
        ages = self.ages
        if ages is None:
            ages = jnp.arange(left.shape[0], dtype=jnp.int32)
        if self.most_each is not None:
            left = jnp.minimum(left, self.most_each)
        return share_rows(left, ages, self.num_rows)


def end_at_snapshots(
    cache: Cache,
    done: jax.Array,  # i32[B], tokens in the cache
    counts: jax.Array,  # i32[B], tokens to compute in this chunk
    left: jax.Array,  # i32[B], tokens to compute in all
    # i32[B], divergence point of each sequence, 0 if unknown
    divergence: jax.Array | None = None,
) -> jax.Array:
    """Shorten the rows of sequences, i32[B], to end where states are to be copied.

    A sequence stops at the last multiple of `snapshot_every` before its end, from which
    prompts with the same prefix continue; at the last one before its divergence point;
    and, if the chunk does not reach its end, at the last one in the chunk. A sequence
    with rows keeps at least one.
    """
    snapshot_every, end = cache.metadata.index.snapshot_every, done + counts
    if snapshot_every is None:
        return counts
    every = jnp.int32(snapshot_every)

    def floor(lengths: jax.Array) -> jax.Array:
        return jax.lax.div(lengths, every) * every

    stops = [floor(jnp.maximum(done + left - 1, 0))]
    stops.append(jnp.where(counts < left, floor(end), end))
    if divergence is not None:
        stops.append(floor(divergence))
    for stop in stops:
        end = jnp.where(stop > done, jnp.minimum(end, stop), end)
    return jnp.where(counts > 0, end - done, counts)


class Chunk(NamedTuple):
    """Results of a chunk for each sequence."""

    logits: jax.Array  # f32[B, V], after the last row; arbitrary without one
    batch: Batch  # of the append, with the computed rows
    is_whole: jax.Array  # bool[B], all remaining tokens were computed


def run_chunks(
    runner: Runner,
    cache: Cache,
    unread: Unread,
    carry: Carry,
    sizes: ChunkSizes,
    *,
    count_left: Callable[[Carry, jax.Array], jax.Array],
    note: Callable[[Cache, Carry, Chunk], Carry],
) -> tuple[Cache, Carry]:
    """Compute sequences in chunks until all are complete or none gets a block.

    Args:
      unread: B sequences.
      carry: updated by `note`.
      sizes: the division of a chunk.
      count_left: returns the remaining tokens, i32[B], from the carry and the cached
        tokens, i32[B].
      note: returns the carry after a chunk.
    """

    def find_left(cache: Cache, carry: Carry) -> tuple[jax.Array, jax.Array]:
        done = count_cached(cache, unread.seq_ids)
        left = count_left(carry, done)
        return done, jnp.where(unread.seq_ids >= 0, left, 0)

    def trip(
        loop: tuple[Cache, Carry, jax.Array],
    ) -> tuple[Cache, Carry, jax.Array]:
        cache, carry, _ = loop
        done, left = find_left(cache, carry)
        counts = end_at_snapshots(
            cache, done, sizes.share(left), left, unread.divergence
        )
        cache, batch, logits = run_chunk(
            runner, cache, unread, done, counts, sizes.num_rows
        )
        is_served = batch.query_lengths > 0
        carry = note(cache, carry, Chunk(logits, batch, is_served & (counts == left)))
        return cache, carry, jnp.any(is_served)

    def goes_on(loop: tuple[Cache, Carry, jax.Array]) -> jax.Array:
        _, left = find_left(*loop[:2])
        return jnp.any(left > 0) & loop[2]

    cache, carry, _ = while_loop(goes_on, trip, (cache, carry, jnp.ones((), bool)))
    return cache, carry
