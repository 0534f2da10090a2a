"""append: assign slots to the tokens of one step.

`append` plans the step once for all layers: the sequence and the slot of each row. It
returns this plan, the `Batch`. A written block always has a reference count of 1
(`fork` and `truncate` ensure it), so neither `append` nor `write` copies.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect
from jkv.masks import CAUSAL, Mask, Resolved, Rows, resolve, without_rows
from jkv.metadata import requests, tables
from jkv.metadata.part import Granted, Growing, Served, Step, parts_of
from jkv.metadata.requests import Integers
from jkv.operations import find_owners, gather
from jkv.state import NO_SEQUENCE, Batch, Cache, Metadata, SequenceRow
from jkv.state.cache import Role
from jkv.state.entry import takes_cache
from jkv.status import Status, UsageError
from jkv.verbs.attending import plan_attention
from jkv.verbs.masking import read_mask, read_span


@takes_cache(role=Role.PLANS)
def append(
    cache: Cache,
    seq_ids: Integers,
    num_tokens: Integers = 1,
    *,
    capacity: int | None = None,
    max_query_length: int | None = None,
    tokens: Integers | None = None,
    num_pending: Integers | None = None,
    mask: Mask = CAUSAL,
    max_span: int | None = None,
) -> tuple[Cache, Batch]:
    """Grow sequences by `num_tokens` each and plan the rows of the step.

    Blocks are taken from the pool only when a token needs one. Rows are packed in
    request order: request i owns rows from `sum(num_tokens[:i])` on, also if it is
    refused or padding. With a sliding window, `append` releases blocks outside the
    window of all rows of this and later steps: `write` and attend one step before the
    next `append`.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding; an empty array counts as one padding
        request.
      num_tokens: i32[B] or int, 0 or more; may vary from call to call.
      capacity: static number of rows R, default B.
      max_query_length: static Q, for the padded layout: R = B * Q, and request i owns
        rows i * Q up to (i + 1) * Q. Mutually exclusive with `capacity`.
      tokens: i32[R], token ids of the rows, stored if the cache records tokens, -1 for
        unknown ones. Other caches ignore them.
      num_pending: i32[B] or int, number of newest tokens of each sequence that
        `truncate` can roll back, at most `StateConfig.max_pending`: new tokens, and
        before them tokens already pending. None: as many of the new tokens as possible.
        Recurrent-state layers keep the inputs of pending tokens; caches without such
        layers need no value.
      mask: the new rows of its request that each row attends to. Recurrent-state
        layers are causal under any mask.
      max_span: static bound on the rows of a span; with `TreeMask`, `starts` or
        `one_window` on the rows of a request. Default R; a step costs up to
        R * max_span.

    Returns:
      The new cache and the `Batch`. Status: OK, INVALID_SEQUENCE, INVALID_ARGUMENT
      (a negative count, more pending tokens than allowed, or an invalid entry of the
      mask: an end past the request's last row, a start after its row, a parent not
      before its child, a span longer than `max_span`), CONTEXT_FULL, BATCH_FULL
      (rows past R) or OUT_OF_BLOCKS.

    Raises:
      ValueError: if an argument has the wrong type or shape, or for a tree on a cache
        with recurrent-state layers.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, [5, 1], capacity=8)
      >>> batch.positions.tolist(), batch.block_ids.tolist()
      ([0, 1, 2, 3, 4, 0, 0, 0], [0, 0, 0, 0, 1, 2, 8, 8])
    """
    # One token and one row per request is decoding; rows then equal requests at trace
    # time.
    one_each = isinstance(num_tokens, int) and num_tokens == 1
    seq_ids, num_tokens = requests.broadcast(seq_ids=seq_ids, num_tokens=num_tokens)
    if capacity is not None and max_query_length is not None:
        raise ValueError("got capacity and max_query_length; pass only one of them")
    num_requests = len(seq_ids)
    if num_requests == 0:
        padding, rows = [NO_SEQUENCE], 0 if capacity is None else capacity
        return append(cache, padding, 0, capacity=rows, tokens=tokens)
    if max_query_length is None:
        num_rows = num_requests if capacity is None else capacity
        requests.check_static("capacity", num_rows, 0)
        max_query_length = 1 if one_each and num_rows == num_requests else None
    else:
        requests.check_static("max_query_length", max_query_length, 1)
        num_rows = num_requests * max_query_length
    checked, most = read_mask(cache.metadata, mask, num_rows, num_requests), 0
    if max_span is not None or checked is not None:
        most = read_span(max_span, num_rows)
    recorded = None
    if tokens is not None:
        (recorded,) = requests.broadcast(tokens=tokens)
        expect("tokens", recorded, "R", {"R": num_rows}, why="one for each row")
    if not cache.metadata.records_tokens:
        recorded = None
    elif recorded is None:
        recorded = jnp.full((num_rows,), -1, jnp.int32)
    pending = _read_pending_counts(cache.metadata, num_tokens, num_pending)
    metadata, plan = _append(
        cache.metadata,
        seq_ids,
        num_tokens,
        recorded,
        pending,
        checked,
        num_rows=num_rows,
        max_query_length=max_query_length,
        max_span=0 if checked is None else min(most, max_query_length or most),
    )
    is_decoding = max_query_length == 1
    batch = Batch(is_decoding=is_decoding, sizes=cache.sizes, **plan)
    cache = cache.with_metadata(metadata)
    return cache, plan_attention(cache, batch)


_STATIC = "num_rows", "max_query_length", "max_span"


@functools.partial(jax.jit, static_argnames=_STATIC)
def _append(
    metadata: Metadata,
    seq_ids: jax.Array,
    num_tokens: jax.Array,
    tokens: jax.Array | None,
    num_pending: jax.Array | None,
    mask: Mask | None,
    *,
    num_rows: int,
    max_query_length: int | None,
    max_span: int,
) -> tuple[Metadata, dict[str, Any]]:
    """Return the metadata and the fields of the `Batch` by name."""
    rows = _lay_out(num_tokens, num_rows, max_query_length)
    before, masked = metadata.sequences.read(seq_ids), None
    if mask is not None:
        numbered = rows.number(jnp.asarray(num_tokens))
        past = jnp.asarray(before.context_length)
        masked = resolve(mask, numbered, past, max_span)
    requested = seq_ids, num_tokens, num_pending
    growth = _judge_growth(metadata, *requested, rows, before, masked)
    is_decoding = max_query_length == 1
    step = _make_step(metadata, seq_ids, tokens, rows, growth, is_decoding)
    blocks: list[jax.Array | None] = [None] * len(metadata.groups)
    of_parts = zip(parts_of(metadata), growth.plans, growth.granted, strict=True)
    for part, plan, granted in of_parts:
        metadata, of_part = plan.apply(metadata, step, granted)
        for number in part.numbers:
            blocks[number] = of_part
    if tokens is not None:
        # The tokens of pruned sequences do not determine their keys.
        recorded = metadata.sequences.pruned.unpruned(step.table_row)
        metadata = metadata.index.record(metadata, recorded, step.position, tokens)
    row = step.done.rows(metadata)
    metadata = requests.mark_used(metadata, row, growth.before, growth.new_length)
    metadata = requests.settle(metadata, growth.status, growth.served)
    metadata, pending_counts = _note_pending(metadata, step, growth, num_pending)
    positions, step_mask = step.position, None
    if masked is not None:
        step_mask = without_rows(masked.mask, step.valid)
        if step_mask.is_tree:
            behind = rows.spread(step_mask.past) + masked.depth
            positions = jnp.where(step.valid, behind, 0)
    dropped, pruned = None, metadata.sequences.pruned
    if pruned.is_there:
        dropped = pruned.positions_of(step.table_row, jnp.zeros_like(positions))
        positions += dropped
    return metadata, dict(
        seq_ids=jnp.asarray(seq_ids),
        status=growth.status,
        query_starts=rows.starts,
        query_lengths=growth.query_lengths,
        context_lengths=jnp.where(growth.is_live, growth.new_length, 0),
        positions=positions,
        dropped=dropped,
        mask=step_mask,
        valid=step.valid,
        offsets=step.offset,
        blocks_of_groups=tuple(blocks),
        epochs=metadata.index.epochs_of(seq_ids),
        pending_counts=pending_counts,
    )


class _Layout(NamedTuple):
    """Rows of each of B requests, served or not, among R."""

    starts: jax.Array  # i32[B], the first row
    room: jax.Array | int  # i32[B], rows from there to the end
    rank: jax.Array  # i32[R], index within its request
    owner: jax.Array | None  # i32[R]; None: the same number for each request

    def number(self, num_tokens: jax.Array) -> Rows:
        """Return the rows, numbered within their requests, for a mask."""
        request = self.spread(jnp.arange(num_tokens.shape[0], dtype=jnp.int32))
        return Rows(self.rank, self.spread(num_tokens), request)

    def spread(self, values: jax.Array) -> jax.Array:
        """Repeat the value of each request for its rows: [B] to [R]."""
        if self.owner is not None:
            return gather(values, self.owner)
        num_requests, num_rows = values.shape[0], self.rank.shape[0]
        each = num_rows // max(num_requests, 1)
        return jnp.broadcast_to(values[:, None], (num_requests, each)).reshape(-1)


def _lay_out(
    num_tokens: jax.Array, num_rows: int, max_query_length: int | None
) -> _Layout:
    """Pack the rows in request order, or pad them to `max_query_length` each."""
    num_requests = num_tokens.shape[0]
    if max_query_length is not None:
        first_rows = np.arange(num_requests, dtype=np.int32) * max_query_length
        shape = (num_requests, max_query_length)
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 1).reshape(-1)
        return _Layout(jnp.asarray(first_rows), max_query_length, index, None)
    owned = jnp.clip(num_tokens, 0, num_rows)
    ends = requests.saturating_cumsum(owned, num_rows)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = find_owners(starts, 0, num_rows)
    return _Layout(starts, num_rows - starts, row - gather(starts, owner), owner)


class _Growth(NamedTuple):
    """Outcome of each of B requests."""

    status: jax.Array  # i32[B], `Status`
    is_live: jax.Array  # bool[B], True if the id is open
    served: jax.Array  # bool[B], OK and not padding
    before: SequenceRow  # rows of the sequences before the call, i32[B]
    new_length: jax.Array  # i32[B], tokens after it
    query_lengths: jax.Array  # i32[B], tokens appended, 0 unless served
    plans: list[Growing]  # by part
    granted: tuple[tuple[Granted, ...], ...]  # by part, then by pool


def _judge_growth(
    metadata: Metadata,
    seq_ids: jax.Array,
    num_tokens: jax.Array,
    num_pending: jax.Array | None,
    rows: _Layout,
    before: SequenceRow,
    masked: Resolved | None,
) -> _Growth:
    """Check the requests against the free blocks before the call."""
    length = jnp.asarray(before.context_length)
    padding = requests.is_padding(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    is_first = requests.is_first_mention(metadata, seq_ids)
    wrong = num_tokens < 0
    if masked is not None:
        wrong |= masked.is_wrong
    if num_pending is not None:
        wrong |= (num_pending < 0) | (num_pending > metadata.max_pending)
    causes = [
        (Status.INVALID_SEQUENCE, ~(live & is_first)),
        (Status.INVALID_ARGUMENT, wrong),
        (Status.CONTEXT_FULL, num_tokens > metadata.max_context_length - length),
        (Status.BATCH_FULL, (num_tokens > rows.room) & (num_tokens > 0)),
    ]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding
    new_length = length + jnp.where(eligible, num_tokens, 0)
    plans = [
        part.grow(metadata, seq_ids, new_length, eligible)
        for part in parts_of(metadata)
    ]
    no_block, granted = requests.agree([plan.lacks for plan in plans])
    served = eligible & ~no_block
    return _Growth(
        status=jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status),
        is_live=live,
        served=served,
        before=before,
        new_length=jnp.where(served, new_length, length),
        query_lengths=jnp.where(served, num_tokens, 0),
        plans=plans,
        granted=granted,
    )


def _make_step(
    metadata: Metadata,
    seq_ids: jax.Array,
    tokens: jax.Array | None,
    rows: _Layout,
    growth: _Growth,
    is_decoding: bool,
) -> Step:
    """Place the new tokens of served requests after their cached ones."""
    served = growth.served
    valid = (rows.rank >= 0) & (rows.rank < rows.spread(growth.query_lengths))
    length = jnp.asarray(growth.before.context_length)
    position = jnp.where(valid, rows.spread(length) + rows.rank, 0)
    column, offset = tables.locate(position, metadata.block_size)
    return Step(
        done=Served(served, seq_ids),
        length=length,
        query_lengths=growth.query_lengths,
        is_decoding=is_decoding,
        valid=valid,
        position=position,
        table_row=jnp.where(valid, rows.spread(seq_ids), metadata.max_sequences),
        column=column,
        offset=offset,
        tokens=tokens,
    )


def _note_pending(
    metadata: Metadata, step: Step, growth: _Growth, num_pending: jax.Array | None
) -> tuple[Metadata, tuple[jax.Array, jax.Array] | None]:
    """Store pending counts; return them before and after the step, i32[B] each."""
    if num_pending is None:
        return metadata, None
    seq_ids = step.done.seq_ids
    before = metadata.sequences.pending_of(seq_ids)
    before = jnp.where(growth.is_live & ~requests.is_padding(seq_ids), before, 0)
    newest = jnp.minimum(num_pending, before + growth.query_lengths)
    after = jnp.where(growth.query_lengths > 0, newest, before)
    return metadata.with_pending(step.done.rows(metadata), after), (before, after)


def _read_pending_counts(
    metadata: Metadata, num_tokens: jax.Array, num_pending: Integers | None
) -> jax.Array | None:
    """Return the pending tokens requested, i32[B]; None if the cache allows none."""
    most = metadata.max_pending
    is_known = num_pending is not None and not isinstance(num_pending, jax.core.Tracer)
    if is_known and np.any(np.asarray(num_pending) > most):
        raise UsageError(
            f"num_pending is at most {most} in this cache, got {num_pending}; "
            f"recurrent-state layers allow more with StateConfig.max_pending and its "
            f"inputs, other layers need no num_pending"
        )
    if most == 0:
        return None
    if num_pending is None:
        return jnp.clip(num_tokens, 0, most)
    (counts,) = requests.broadcast(num_pending=num_pending)
    return jnp.broadcast_to(counts, num_tokens.shape)
