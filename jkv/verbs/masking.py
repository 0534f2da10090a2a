"""with_mask, peek: the rows of a step under another mask, and rows that only read."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jkv.arguments import saturated
from jkv.masks import (
    CausalMask,
    Mask,
    Rows,
    check_mask,
    has_tree,
    read_only_mask,
    resolve,
    without_rows,
)
from jkv.metadata import requests
from jkv.metadata.requests import Integers
from jkv.operations import find_owners, gather
from jkv.state import Batch, Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status, UsageError
from jkv.verbs.attending import plan_attention


def read_mask(
    metadata: Metadata, mask: Mask, num_rows: int, num_requests: int
) -> Mask | None:
    """Return a mask with i32 arrays, None for causal rows; refuse other values."""
    has_states = len(metadata.block_numbers) < len(metadata.groups)
    return _read_arrays(mask, num_rows, num_requests, has_states)


def _read_arrays(
    mask: Mask, num_rows: int, num_requests: int, has_states: bool
) -> Mask | None:
    def as_array(name: str, value: Any) -> jax.Array:
        return jnp.asarray(saturated(name, value))

    if isinstance(mask, CausalMask):
        return None
    checked = check_mask(mask, num_rows, num_requests, as_array)
    if has_tree(checked) and has_states:
        raise ValueError(
            "mask must not be a TreeMask on a cache with recurrent-state layers, whose "
            "states follow one path; append each path to a fork of its own"
        )
    return checked


def read_span(max_span: int | None, num_rows: int) -> int:
    """Return the static bound of spans; refuse other values."""
    if max_span is None:
        return num_rows
    requests.check_static("max_span", max_span, 1)
    return min(max_span, num_rows)


def with_mask(batch: Batch, mask: Mask, *, max_span: int | None = None) -> Batch:
    """Return the same rows and slots of a step under another mask.

    Rows may be written again in every layer until `commit`; the last write counts. So a
    canvas is denoised under a `SpanMask`, and its final tokens are written under
    `CausalMask()`.

    Args:
      batch: a batch of `append`, or of this function.
      mask: the mask, as for `append`.
      max_span: as for `append`.

    Returns:
      The batch. A request with an invalid entry of the mask has the status
      INVALID_ARGUMENT and a query length of 0: nothing of it is written or committed.

    Raises:
      ValueError: an array of another shape, or a batch of `peek`.
      UsageError: a value of another kind.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> spans = jkv.SpanMask([2, 2, 2])
      >>> cache, canvas = jkv.append(cache, opened.seq_ids, 3, capacity=3, mask=spans)
      >>> final = jkv.with_mask(canvas, jkv.CausalMask())
      >>> final.positions.tolist(), final.mask
      ([0, 1, 2], None)
    """
    if not isinstance(batch, Batch):
        raise UsageError(
            f"batch must be the jkv.Batch that append returned, got {batch!r:.80}"
        )
    old = batch.mask
    if old is not None and old.reads_only:
        raise ValueError(
            "batch must come from append, got a batch of peek, whose rows have no "
            "slots; append the rows"
        )
    has_states = None in batch.blocks_of_groups
    new = _read_arrays(mask, batch.num_rows, len(batch.seq_ids), has_states)
    most = read_span(max_span, batch.num_rows)
    return _with_mask(batch, new, max_span=0 if new is None else most)


@functools.partial(jax.jit, static_argnames="max_span")
def _with_mask(batch: Batch, mask: Mask | None, *, max_span: int) -> Batch:
    rows, past = _number_rows(batch)
    depth, status, valid = rows.rank, batch.status, rows.is_owned
    lengths, found, plan = batch.query_lengths, None, None
    if mask is not None:
        resolved = resolve(mask, rows, past, max_span)
        is_wrong = resolved.is_wrong & (lengths > 0)
        status = jnp.where(is_wrong, jnp.int32(Status.INVALID_ARGUMENT), status)
        lengths = jnp.where(is_wrong, 0, lengths)
        valid &= ~gather(is_wrong, rows.request)
        found, depth = without_rows(resolved.mask, valid), resolved.depth
    elif batch.mask is None or batch.mask.adds_later:
        plan = batch.plan  # planned for causal attention
    positions = batch.positions_of(gather(past, rows.request) + depth)
    return dataclasses.replace(
        batch,
        status=status,
        query_lengths=lengths,
        positions=jnp.where(valid, positions, 0),
        valid=valid,
        mask=found,
        plan=plan,
        is_second=True,
    )


def _number_rows(batch: Batch) -> tuple[Rows, jax.Array]:
    """Return the rows of a batch, and the tokens before the step, i32[B]."""
    request = find_owners(batch.query_starts, 0, batch.num_rows)
    row = jnp.arange(batch.num_rows, dtype=jnp.int32)
    rank = row - gather(batch.query_starts, request)
    rows = Rows(rank, gather(batch.query_lengths, request), request)
    past = batch.context_lengths - batch.query_lengths
    return rows, past if batch.mask is None else batch.mask.past


@takes_cache()
def peek(cache: Cache, seq_ids: Integers, num_rows: int = 1) -> Batch:
    """Plan rows that read sequences without slots of their own.

    For drafters that only attend to the target's cache. `write` drops the rows,
    `attend` sees all cached tokens of the sequence, or those that the window shows to
    the next token, and `commit` does nothing. It needs no blocks and changes nothing.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding. Ids may repeat.
      num_rows: static number of rows of each request; R = B * num_rows.

    Returns:
      A batch, valid until the sequences change. All rows of a request have the position
      `next_positions`. Status: OK, or INVALID_SEQUENCE, and its rows return zeros.

    Raises:
      ValueError: if an argument has the wrong type or shape.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, 3, capacity=3)
      >>> jkv.peek(cache, opened.seq_ids, 2).positions.tolist()
      [3, 3]
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    requests.check_static("num_rows", num_rows, 1)
    fields = _peek(cache.metadata, seq_ids, num_rows=num_rows)
    batch = Batch(is_decoding=num_rows == 1, sizes=cache.sizes, **fields)
    return plan_attention(cache, batch)


@functools.partial(jax.jit, static_argnames="num_rows")
def _peek(metadata: Metadata, seq_ids: jax.Array, *, num_rows: int) -> dict[str, Any]:
    """Return the fields of the `Batch` by name."""
    seq_ids, num_requests = jnp.asarray(seq_ids), seq_ids.shape[0]
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    past = jnp.where(live, before.context_length, 0)
    pruned = metadata.sequences.pruned
    positions = pruned.positions_of(seq_ids, past)
    nowhere = jnp.zeros((num_requests * num_rows,), jnp.int32)

    def by_row(values: jax.Array) -> jax.Array:
        each = (num_requests, num_rows)
        return jnp.broadcast_to(values[:, None], each).reshape(-1)

    return dict(
        seq_ids=seq_ids,
        status=requests.find_status(
            requests.is_padding(seq_ids), [(Status.INVALID_SEQUENCE, ~live)]
        ),
        query_starts=jnp.arange(num_requests, dtype=jnp.int32) * num_rows,
        query_lengths=jnp.where(live, num_rows, 0),
        context_lengths=past,
        positions=by_row(positions),
        dropped=by_row(positions - past) if pruned.is_there else None,
        valid=by_row(live),
        offsets=nowhere,
        blocks_of_groups=tuple(
            nowhere + metadata.groups[number].num_blocks
            if number in metadata.block_numbers
            else None
            for number in range(len(metadata.groups))
        ),
        epochs=None,
        mask=read_only_mask(past, num_rows),
    )
