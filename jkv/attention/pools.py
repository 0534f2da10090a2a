"""Reading blocks out of a pool without ever touching the rest of it.

A pool is `[L, N, K, T, D]`. Slicing a layer out, or converting the pool to another
dtype inside jit, would copy it; so whole blocks are gathered by (layer, block) first
and only the gathered chunk is turned into numbers, by its format.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.validation import (
    require_format,
    require_pools,
    require_rank,
    require_value_dim,
)
from jkv.formats.format import Format, Formats, Parts


class Stored(NamedTuple):
    """Keys or values as they are stored."""

    parts: Parts  # [L, N, K, T, ...] each
    format: Format

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.parts["pool"].shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pools:
    """Stored keys and values, and what they mean.

    Symbols: `L` layers, `N` blocks, `K` kv heads, `T` tokens per block, `D` (`Dv`) key
    (value) head dim.
    """

    keys: jax.Array  # [L, N, K, T, D], or as their format has it
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of each key
    # [L, N, K, T], float or bits of one, where the format has scales. Without `values`
    # the keys' scales are theirs.
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    # Static: no shape tells them.
    head_dim: int = dataclasses.field(metadata={"static": True})  # D
    value_dim: int = dataclasses.field(metadata={"static": True})  # Dv
    formats: Formats = dataclasses.field(metadata={"static": True})

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.keys.shape[2]

    @property
    def block_size(self) -> int:
        """T."""
        return self.keys.shape[3]

    @property
    def stored_keys(self) -> Stored:
        """The keys."""
        parts = {"pool": self.keys, "scales": self.key_scales}
        return Stored(_those_there(parts), self.formats.key)

    @property
    def stored_values(self) -> Stored | None:
        """The values, None where they are the first Dv of each key."""
        if self.values is None:
            return None
        parts = {"pool": self.values, "scales": self.value_scales}
        return Stored(_those_there(parts), self.formats.value)

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """What the elements are, one dtype unless keys and values differ."""
        return {each.dtype for each in self.formats}


def _those_there(parts: dict[str, jax.Array | None]) -> Parts:
    return {name: array for name, array in parts.items() if array is not None}


def make_pools(
    keys_and_scales: tuple[jax.Array, jax.Array | None],
    values_and_scales: tuple[jax.Array | None, jax.Array | None],
    *,
    has_layers: bool,
    dtypes: Sequence[jax.typing.DTypeLike | None] = (None, None),
    value_head_dim: int | None = None,
) -> Pools:
    """Check pools with their scales, and bring them to five axes.

    Raises:
      ValueError: saying what does not fit.
    """
    keys, key_scales = keys_and_scales
    values, value_scales = values_and_scales
    if not has_layers:
        require_rank("key_pool", keys, 4, "[N, K, T, D] when layer is None")
        if values is not None:
            require_rank("value_pool", values, 4, "[N, K, T, Dv], layer is None")
        # The new axis is a view under jit, and free.
        keys, values, key_scales, value_scales = jax.tree.map(
            lambda array: array[None], (keys, values, key_scales, value_scales)
        )
    require_pools(keys, values)
    of_keys = of_values = require_format("key", keys, key_scales, dtypes[0])
    head_dim, value_dim = of_keys.width_of(keys.shape[4]), None
    if values is not None:
        of_values = require_format("value", values, value_scales, dtypes[1])
        value_dim = of_values.width_of(values.shape[4])
    elif value_scales is not None:
        raise ValueError(
            "with value_pool=None the keys' scales are the values': leave value_scales "
            "out"
        )
    return Pools(
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        head_dim=head_dim,
        value_dim=require_value_dim(value_dim, head_dim, value_head_dim),
        formats=Formats(of_keys, of_values),
    )


def gather_pieces(
    stored: Stored,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P, W], clamped into the pool
) -> tuple[jax.Array, jax.Array | None]:
    """Return pieces of W blocks by head, as `f32[P * K * W, T * D]`.

    What one head has of a piece comes out side by side, as one product wants it. And
    the pieces' factors, f32[P, K, W * T], None for none. Rubbish ids are never dropped
    or filled: the caller masks what they bring.
    """
    num_heads = stored.parts["pool"].shape[2]
    heads = jnp.clip(blocks, 0, stored.num_blocks - 1)[:, None] * num_heads
    heads += jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    parts = {
        # The view is free: a head of a block is a block of one head.
        name: _gather_part(
            array.reshape(array.shape[0], -1, 1, *array.shape[3:]),
            layer,
            heads.reshape(-1),
        )
        if array.ndim > 4
        else _gather_part(array, layer, blocks)
        for name, array in stored.parts.items()
    }
    numbers, factor = stored.format.get(parts)
    if factor is not None:
        factor = jnp.swapaxes(factor, 1, 2)
        factor = factor.reshape(*factor.shape[:2], -1)
    return numbers, factor


def _gather_part(
    array: jax.Array,  # [L, N, K, T, ...]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[...]
) -> jax.Array:
    """Return [..., K, T] of what has a number for each row, else [C, K * T * D]."""
    if array.ndim == 4:
        found: jax.Array = array.at[layer, blocks].get(mode="clip")
        return found
    return lax.platform_dependent(
        array,
        jnp.stack([jnp.full_like(blocks, layer), blocks], axis=-1),
        tpu=_gather_tiled,
        default=_gather_flat,
    )


def _gather_flat(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Return [C, K * T * D] by way of a flat view of the blocks.

    The view is free, and its long last axis is what XLA copies with vector instructions
    on a CPU; an axis of 64 it unrolls into single elements.
    """
    return _gather(pool.reshape(*pool.shape[:2], -1), starts)


def _gather_tiled(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Return [C, K * T * D]; the blocks become flat when they have been gathered.

    TPUs keep the last two axes in tiles, so that a flat view would copy the whole pool.
    """
    return _gather(pool, starts).reshape(starts.shape[0], -1)


def _gather(array: jax.Array, starts: jax.Array) -> jax.Array:
    """Return `array[starts[i, 0], starts[i, 1]]` for each i, clamped."""
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, array.ndim - 1)),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1),
    )
    return lax.gather(
        array,
        starts,
        dimensions,
        slice_sizes=(1, 1, *array.shape[2:]),
        mode=lax.GatherScatterMode.CLIP,
    )


def read_twice(
    chunk: jax.Array,  # f32[P * K * W, T * D] from `gather_pieces`
    never: jax.Array,  # bool[], false, but not to the compiler's knowledge
    otherwise: float,  # what to return
) -> jax.Array:
    """Return the number `otherwise`, by way of a second reader of the flat chunk.

    With the reshape of the chunk as its only reader, XLA merges the two, copies along
    the short axis and is back at single elements: a third of the time of a decode step
    in JAX 0.10.2. An `optimization_barrier` is respected only by newer versions.
    """
    return jnp.where(never, chunk[0, 0], jnp.float32(otherwise))


def add_blocks(
    pool: jax.Array,  # f32[L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C], ids out of range are dropped
    chunk: jax.Array,  # f32[C, K, T, D]
) -> jax.Array:
    """Add a chunk back to where its blocks are in a layer."""
    # A negative index would wrap even with mode="drop".
    blocks = jnp.where(blocks < 0, pool.shape[1], blocks)
    return pool.at[layer, blocks].add(chunk, mode="drop")
