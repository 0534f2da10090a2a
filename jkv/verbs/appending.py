"""append: the tokens of one step get their slots.

`append` decides everything at once, for all layers: which rows of the step belong to
which sequence and where each row is stored. The `Batch` it returns is that plan. A
block to be written belongs to one sequence alone (`fork` and `truncate` see to that),
so neither `append` nor `write` ever copies.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import allocator, counters, requests, ring, tables
from jkv.metadata.prefixes import prefix_index
from jkv.metadata.requests import Integers
from jkv.state import Batch, Cache, Metadata
from jkv.status import Status


def append(
    cache: Cache,
    seq_ids: Integers,
    num_tokens: Integers = 1,
    *,
    capacity: int | None = None,
    max_query_length: int | None = None,
    tokens: jax.Array | None = None,
) -> tuple[Cache, Batch]:
    """Grow sequences by `num_tokens` each and plan the rows of the step.

    Blocks are taken from the pool exactly when a token needs one. Rows are packed in
    request order: request i owns rows `sum(num_tokens[:i])` and on, refused or not, as
    does padding.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      num_tokens: i32[B] or int, 0 or more; it may vary from call to call.
      capacity: static number of rows R, default B.
      max_query_length: static Q, for the padded layout instead: R = B * Q and request i
        owns rows i * Q up to (i + 1) * Q. Give this or `capacity`.
      tokens: i32[R], token ids of the rows, kept if the cache records tokens; -1 is
        kept for rows without.

    Returns:
      The new cache and the `Batch`. Status: OK, INVALID_SEQUENCE, INVALID_ARGUMENT
      (negative count), CONTEXT_FULL, BATCH_FULL (rows past R) or OUT_OF_BLOCKS.

    Raises:
      ValueError: for arguments of wrong type or shape.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, [5, 1], capacity=8)
      >>> batch.positions.tolist(), batch.block_ids.tolist()
      ([0, 1, 2, 3, 4, 0, 0, 0], [0, 0, 0, 0, 1, 2, 4, 4])
    """
    # One token each, a row each, is decoding: rows and requests are then the same
    # thing, known at trace time.
    one_each = isinstance(num_tokens, int) and num_tokens == 1
    seq_ids, num_tokens = requests.broadcast(seq_ids=seq_ids, num_tokens=num_tokens)
    if capacity is not None and max_query_length is not None:
        raise ValueError("give capacity or max_query_length, not both")
    num_requests = len(seq_ids)
    if num_requests == 0:
        raise ValueError("append needs at least one request; -1 is padding")
    if max_query_length is None:
        capacity = num_requests if capacity is None else capacity
        max_query_length = 1 if one_each and capacity == num_requests else None
    num_rows = num_requests * max_query_length if max_query_length else capacity
    num_rows = _checked_rows(num_rows, tokens)
    metadata, batch = _append(
        cache.metadata,
        seq_ids,
        num_tokens,
        None if cache.metadata.tokens is None else _as_rows(tokens, num_rows),
        num_rows=num_rows,
        max_query_length=max_query_length,
    )
    return dataclasses.replace(cache, metadata=metadata), batch


@functools.partial(jax.jit, static_argnames=("num_rows", "max_query_length"))
def _append(
    metadata: Metadata,
    seq_ids: jax.Array,
    num_tokens: jax.Array,
    tokens: jax.Array | None,
    *,
    num_rows: int,
    max_query_length: int | None,
) -> tuple[Metadata, Batch]:
    length = metadata.context_lengths.at[seq_ids].get(mode="clip")
    mapped = metadata.num_mapped_blocks.at[seq_ids].get(mode="clip")
    padding = requests.is_padding(seq_ids)
    live = requests.is_live(metadata, seq_ids)

    # The rows each request owns, refused or not.
    if max_query_length is None:
        owned = jnp.clip(num_tokens, 0, num_rows)
        starts = requests.saturating_cumsum(owned, num_rows)
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), starts[:-1]])
        no_rows = num_tokens > num_rows - starts
    else:
        first_rows = np.arange(seq_ids.shape[0], dtype=np.int32) * max_query_length
        starts = jnp.asarray(first_rows)
        no_rows = num_tokens > max_query_length

    # Status, and blocks needed by those that no other cause refuses.
    causes = [
        (
            Status.INVALID_SEQUENCE,
            ~(live & requests.is_first_mention(metadata, seq_ids)),
        ),
        (Status.INVALID_ARGUMENT, num_tokens < 0),
        (Status.CONTEXT_FULL, num_tokens > metadata.max_context_length - length),
        (Status.BATCH_FULL, no_rows & (num_tokens > 0)),
    ]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding
    new_length = length + jnp.where(eligible, num_tokens, 0)
    blocks = tables.num_blocks_for(metadata, new_length)
    need = jnp.where(eligible, jnp.maximum(blocks - mapped, 0), 0)
    no_block, taken_before = requests.lacks_blocks(metadata, need)
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)

    # What is served: new lengths, and blocks in request order from the ring's head.
    served = eligible & ~no_block
    query_lengths = jnp.where(served, num_tokens, 0)
    new_length = jnp.where(served, new_length, length)
    need = jnp.where(served, need, 0)
    metadata = allocator.expose(metadata, jnp.sum(need, dtype=jnp.int32))

    # Each row finds its request; the row that begins an unmapped block maps it.
    to_rows, index = _row_owners(starts, num_rows, max_query_length)
    valid = (index >= 0) & (index < to_rows(query_lengths))
    position = jnp.where(valid, to_rows(length) + index, 0)
    column, offset = metadata.locate(position)
    seq_of_row = jnp.where(valid, to_rows(seq_ids), metadata.max_sequences)
    fresh = column - to_rows(mapped)
    opens_block = valid & (offset == 0) & (fresh >= 0)
    metadata = tables.map_blocks(
        metadata,
        jnp.where(opens_block, seq_of_row, metadata.max_sequences),
        column,
        ring.peek(metadata.free_blocks, to_rows(taken_before) + fresh),
    )
    block_ids = metadata.block_tables.at[seq_of_row, column].get(
        mode="fill", fill_value=metadata.num_blocks
    )

    row = jnp.where(served, seq_ids, metadata.max_sequences)
    metadata = counters.mark_used(metadata, row)
    metadata, taken = counters.settle(metadata, status, served, need)
    metadata = dataclasses.replace(
        metadata,
        context_lengths=metadata.context_lengths.at[row].set(new_length, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].add(need, mode="drop"),
        free_blocks=ring.pop(metadata.free_blocks, taken),
    )
    if tokens is not None and metadata.tokens is not None:
        recorded = metadata.tokens.at[block_ids, offset].set(tokens, mode="drop")
        metadata = dataclasses.replace(metadata, tokens=recorded)
    batch = Batch(
        seq_ids=jnp.asarray(seq_ids),
        status=status,
        query_starts=starts,
        query_lengths=query_lengths,
        context_lengths=jnp.where(live, new_length, 0),
        positions=position,
        valid=valid,
        block_ids=block_ids,
        offsets=offset,
        epochs=prefix_index.epochs(metadata, seq_ids),
        is_decoding=max_query_length == 1,
    )
    return metadata, batch


def _row_owners(
    starts: jax.Array, num_rows: int, max_query_length: int | None
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Let each row find the request that owns it.

    Returns:
      A function that spreads values of the requests, [B], over their rows, [R], and the
      index of each row within its request, i32[R].
    """
    if max_query_length is not None:
        shape = (starts.shape[0], max_query_length)
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 1).reshape(-1)
        return lambda a: jnp.broadcast_to(a[:, None], shape).reshape(-1), index
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # The owner is the last request that starts at or before the row.
    request = jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1
    return lambda a: a[request], row - starts[request]


def _as_rows(tokens: jax.Array | None, num_rows: int) -> jax.Array:
    """Return the token of each row, i32[R], -1 where none is told."""
    if tokens is None:
        return jnp.full((num_rows,), -1, jnp.int32)
    return jnp.asarray(tokens, jnp.int32)


def _checked_rows(num_rows: int | None, tokens: jax.Array | None) -> int:
    """Return the number of rows; reject one, or token rows, that cannot be."""
    if not isinstance(num_rows, int) or num_rows < 0:
        raise ValueError(
            f"the number of rows must be a static int of at least 0, got {num_rows!r}"
        )
    if tokens is not None and tokens.shape != (num_rows,):
        raise ValueError(
            f"tokens must be i32[R] with R = {num_rows} rows, got "
            f"{tokens.dtype}{list(tokens.shape)}"
        )
    return num_rows
