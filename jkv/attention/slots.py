"""Where the keys and values of a step go: rows of them, and the slot of each row.

Letters as in `jkv.attention.call`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.formats.format import Formats, name_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotWrite:
    """The rows of one layer, the arrays that take them in, and where.

    A row goes to `arrays[name][layer, block_ids[row], :, offsets[row]]`. It is stored
    if it is valid and all of these are in range, and if the slot is in this part of the
    block, where the arrays have only one.
    """

    arrays: dict[str, jax.Array]  # [L, N, K, T, ...]
    # [R, K, D], what goes to the pools of keys and values, as their formats prepare it.
    rows: dict[str, jax.Array]
    layer: jax.Array  # i32[], negative for none
    block_ids: jax.Array  # i32[R], N for none
    offsets: jax.Array  # i32[R], in the whole block
    valid: jax.Array  # bool[R]
    # i32[], which part of each block the arrays have; None: the whole.
    part: jax.Array | None = None
    formats: Formats = dataclasses.field(metadata=dict(static=True))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.valid.shape[0]

    @property
    def pool(self) -> jax.Array:
        """The keys' array, which has the sizes that all share, [L, N, K, T, D]."""
        return self.arrays["key_pool"]

    def rows_as_bits(self) -> dict[str, jax.Array]:
        """Return the rows as the arrays keep them, which have the same names."""
        bits: dict[str, jax.Array] = {}
        for name, rows in self.rows.items():
            parts = self.formats.of(name)[0].put(rows)
            bits |= name_parts(name.removesuffix("_pool"), parts)
        return bits


def scatter(write: SlotWrite) -> dict[str, jax.Array]:
    """Return the arrays with the rows in their slots, by a scatter for each array."""
    block_ids, offsets = _locate(write)
    return _scatter(write, (block_ids, slice(None), offsets))


def scatter_by_head(write: SlotWrite) -> dict[str, jax.Array]:
    """Return the same by scatters of each head's elements of a row.

    TPUs keep the last two axes in tiles, and move heads beside the elements where a
    scatter takes both at once: a copy of the pool, and another one back.
    """
    block_ids, offsets = (each[:, None] for each in _locate(write))
    heads = jnp.arange(write.pool.shape[2], dtype=jnp.int32)
    return _scatter(write, (block_ids, heads, offsets))


def _locate(write: SlotWrite) -> tuple[jax.Array, jax.Array]:
    """Return the block and the offset in it of each row, i32[R]; N or more for none."""
    import chex  # importing it takes longer than all of jkv

    chex.assert_equal_shape([write.block_ids, write.offsets, write.valid])
    num_blocks, size = write.pool.shape[1], write.pool.shape[3]
    offsets, valid = write.offsets, write.valid
    if write.part is not None:
        offsets = offsets - write.part * size
        valid = valid & (offsets >= 0) & (offsets < size)
        offsets = jnp.where(valid, offsets, 0)
    # Rows without a slot get indices past the end, all different: the scatter is then
    # free of duplicates, which accelerators need to run it in parallel.
    past_end = num_blocks + jnp.arange(write.num_rows, dtype=jnp.int32)
    return jnp.where(valid & (write.layer >= 0), write.block_ids, past_end), offsets


def _scatter(write: SlotWrite, index: tuple[Any, ...]) -> dict[str, jax.Array]:
    bits, stored = write.rows_as_bits(), {}
    for name, array in write.arrays.items():
        slots = array.at[write.layer, *index]
        stored[name] = slots.set(bits[name], mode="drop", unique_indices=True)
    return stored
