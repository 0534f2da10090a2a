"""append and write: one step's tokens get their slots, then their K/V.

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

from jkv import (
    allocation,
    counters,
    pool,
    prefix_index,
    quantization,
    requests,
    ring,
)
from jkv.config import SCALE_NAMES
from jkv.requests import Integers
from jkv.state import Cache, Metadata
from jkv.status import Status


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The plan of one step: B requests over R token rows.

    Request i owns the rows from `query_starts[i]` on; of a served one, the first
    `query_lengths[i]` rows are its new tokens, the last of them at position
    `context_lengths[i] - 1`. A refused request has the length its sequence had before
    the call; padding and ids that are not open have 0.
    """

    seq_ids: jax.Array  # i32[B], as asked
    status: jax.Array  # i32[B], `Status`
    query_starts: jax.Array  # i32[B], first row; R or above when past the end
    query_lengths: jax.Array  # i32[B], tokens appended, 0 for a refused request
    context_lengths: jax.Array  # i32[B], tokens of the sequence after the step
    positions: jax.Array  # i32[R], position of each row in its sequence, 0 if invalid
    valid: jax.Array  # bool[R], whether a served request owns the row
    block_ids: jax.Array  # i32[R], block of the row's slot, N if invalid
    offsets: jax.Array  # i32[R], offset in the block, 0 if invalid
    epochs: jax.Array | None  # u32[B], for `commit`: when the sequence last lost tokens
    # Static: whether it is known from the call that each request has one row at most.
    is_decoding: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Token rows, R."""
        return self.positions.shape[0]

    @property
    def last_rows(self) -> jax.Array:
        """Row of each request's last token, i32[B]; R where it has none."""
        last = self.query_starts + self.query_lengths - 1
        return jnp.where(self.query_lengths > 0, last, self.num_rows)


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


def write(
    cache: Cache,
    layer: jax.Array | int,
    batch: Batch,
    keys: jax.Array,
    values: jax.Array | None = None,
) -> Cache:
    """Store one layer's keys and values in the slots of the batch.

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: i32[] or int, 0 to L-1; may be traced. Rows of any other layer are dropped.
      batch: the plan.
      keys: [R, K, D], any float dtype, cast to the cache's, or quantised; invalid rows
        are dropped.
      values: [R, K, Dv]. `None` for a cache whose values lie in its keys.

    Returns:
      The new cache. Under jit with donation the storage is updated in place.

    Raises:
      ValueError: for rows of the wrong shape, or a cache without storage.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> rows = jnp.ones((1, 1, 8))
      >>> cache = jkv.write(cache, 0, batch, rows, rows)
      >>> keys, values, length = jkv.read(cache, 0, 0)
      >>> float(keys[:length].sum()), int(length)
      (8.0, 1)
    """
    check_layer(cache, layer)
    if (values is None) != (cache.values is None):
        raise ValueError(
            "this cache's values lie in its keys (values_in_keys): leave values out"
            if cache.values is None
            else "write needs values too; only with values_in_keys they lie in the keys"
        )
    rows: dict[str, jax.Array] = {}
    for name, array in (("keys", keys), ("values", values)):
        if array is not None:
            rows |= _to_storage(cache, batch, name, array)
    layer = jnp.asarray(layer, jnp.int32)
    # Rows without a slot get indices past the end, all different: the scatter is then
    # free of duplicates, which accelerators need to run it in parallel.
    past_end = cache.num_blocks + jnp.arange(batch.num_rows, dtype=jnp.int32)
    known = batch.valid & (layer >= 0)
    block_ids = jnp.where(known, batch.block_ids, past_end)
    written = {
        name: stored.at[layer, block_ids, :, batch.offsets].set(
            rows[name], mode="drop", unique_indices=True
        )
        for name, stored in cache.storage.items()
    }
    return cache.with_storage(written)


def _to_storage(
    cache: Cache, batch: Batch, name: str, rows: jax.Array
) -> dict[str, jax.Array]:
    """Return rows of "keys" or "values" as the storage has them, and their scales."""
    width = cache.storage[name].shape[4]
    expected = (batch.num_rows, cache.num_kv_heads, width)
    if rows.shape != expected:
        raise ValueError(
            f"{name} must have shape [R, K, D] = {list(expected)}, one row per row "
            f"of the batch, got {list(rows.shape)}"
        )
    elements, scales = quantization.store(rows, cache.dtype)
    if scales is None:
        return {name: elements}
    return {name: elements, SCALE_NAMES[name]: scales}


def check_layer(cache: Cache, layer: jax.Array | int) -> None:
    """Reject a layer that is known not to exist; a traced one cannot be checked."""
    if cache.num_layers == 0:
        raise ValueError(
            "this cache has no storage (init(..., storage=False)); make one with "
            "storage to write, read or attend"
        )
    if isinstance(layer, int | np.integer) and not 0 <= layer < cache.num_layers:
        raise ValueError(
            f"layer must be in 0..{cache.num_layers - 1}, got {int(layer)}"
        )


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
    blocks = allocation.num_blocks_for(metadata, new_length)
    need = jnp.where(eligible, jnp.maximum(blocks - mapped, 0), 0)
    no_block, taken_before = requests.lacks_blocks(metadata, need)
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)

    # What is served: new lengths, and blocks in request order from the ring's head.
    served = eligible & ~no_block
    query_lengths = jnp.where(served, num_tokens, 0)
    new_length = jnp.where(served, new_length, length)
    need = jnp.where(served, need, 0)
    metadata = pool.expose(metadata, jnp.sum(need, dtype=jnp.int32))

    # Each row finds its request; the row that begins an unmapped block maps it.
    to_rows, index = _row_owners(starts, num_rows, max_query_length)
    valid = (index >= 0) & (index < to_rows(query_lengths))
    position = jnp.where(valid, to_rows(length) + index, 0)
    column, offset = metadata.locate(position)
    seq_of_row = jnp.where(valid, to_rows(seq_ids), metadata.max_sequences)
    fresh = column - to_rows(mapped)
    opens_block = valid & (offset == 0) & (fresh >= 0)
    metadata = allocation.map_blocks(
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
