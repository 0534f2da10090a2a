"""The rows of a step to store in the pools, and their slots.

Symbols as in `jkv.attention.call`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.formats.format import Formats, name_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotWrite:
    """Rows of one layer to store, the arrays to update, and the slot of each row.

    A row goes to `arrays[name][layer, block_ids[row], :, offsets[row]]`. It is stored
    if it is valid, its indices are in range and, with `part`, its slot is in this part
    of the block.
    """

    arrays: dict[str, jax.Array]  # [L, N, K, T, ...]
    # [R, K, D] of "key_pool" and "value_pool", in the input dtype of their formats
    rows: dict[str, jax.Array]
    layer: jax.Array  # i32[], negative for none
    block_ids: jax.Array  # i32[R], N for none
    offsets: jax.Array  # i32[R], in the whole block
    valid: jax.Array  # bool[R]
    # i32[], the part of each block that the arrays hold; None: whole blocks.
    part: jax.Array | None = None
    formats: Formats = dataclasses.field(metadata=dict(static=True))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.valid.shape[0]

    @property
    def pool(self) -> jax.Array:
        """The keys' array; all arrays share its sizes [L, N, K, T]."""
        return self.arrays["key_pool"]

    def rows_as_bits(self) -> dict[str, jax.Array]:
        """Encode the rows by their formats, keyed by the names of the arrays."""
        bits: dict[str, jax.Array] = {}
        for name, rows in self.rows.items():
            parts = self.formats.of(name)[0].put(rows)
            bits |= name_parts(name.removesuffix("_pool"), parts)
        return bits


def scatter(write: SlotWrite) -> dict[str, jax.Array]:
    """Store the rows with one scatter per array."""
    block_ids, offsets = _locate(write)
    return _scatter(write, (block_ids, slice(None), offsets))


def scatter_by_head(write: SlotWrite) -> dict[str, jax.Array]:
    """Store the rows with one update per kv head of a row.

    TPUs tile the last two axes. A scatter of several heads moves the head axis beside
    the elements, which copies the pool twice.
    """
    block_ids, offsets = (each[:, None] for each in _locate(write))
    heads = jnp.arange(write.pool.shape[2], dtype=jnp.int32)
    return _scatter(write, (block_ids, heads, offsets))


def _locate(write: SlotWrite) -> tuple[jax.Array, jax.Array]:
    """Return each row's block and offset in it, i32[R]; N or more for no slot."""
    import chex  # importing it takes longer than importing jkv

    chex.assert_equal_shape([write.block_ids, write.offsets, write.valid])
    num_blocks, size = write.pool.shape[1], write.pool.shape[3]
    offsets, valid = write.offsets, write.valid
    if write.part is not None:
        offsets = offsets - write.part * size
        valid = valid & (offsets >= 0) & (offsets < size)
        offsets = jnp.where(valid, offsets, 0)
    # Rows without a slot get distinct indices past the end, so that `unique_indices`
    # holds, which accelerators need for a parallel scatter.
    past_end = num_blocks + jnp.arange(write.num_rows, dtype=jnp.int32)
    return jnp.where(valid & (write.layer >= 0), write.block_ids, past_end), offsets


def _scatter(write: SlotWrite, index: tuple[Any, ...]) -> dict[str, jax.Array]:
    bits, stored = write.rows_as_bits(), {}
    for name, array in write.arrays.items():
        slots = array.at[write.layer, *index]
        stored[name] = slots.set(bits[name], mode="drop", unique_indices=True)
    return stored
