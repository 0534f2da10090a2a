"""Reading blocks out of a pool without ever touching the rest of it.

A pool is `[L, N, K, T, D]`. Slicing a layer out, or converting the pool to another
dtype inside jit, would copy it; so whole blocks are gathered by (layer, block) first
and only the gathered chunk is turned into numbers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.elements import to_float32
from jkv.attention.validation import (
    require_elements,
    require_pools,
    require_rank,
    require_scales,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pools:
    """Stored keys and values, and what their elements mean.

    Symbols: `L` layers, `N` blocks, `K` kv heads, `T` tokens per block, `D` (`Dv`) key
    (value) head dim.
    """

    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of each key
    # [L, N, K, T], what each token's elements are multiplied by; float, or u16 bits of
    # bfloat16. None: nothing. Without `values` the keys' scales are theirs.
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    # Static: no shape tells them when the values lie in the keys, or bits are raw.
    head_dim: int = dataclasses.field(metadata={"static": True})  # D
    value_dim: int = dataclasses.field(metadata={"static": True})  # Dv
    kv_dtype: np.dtype[Any] | None = dataclasses.field(metadata={"static": True})

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.keys.shape[2]

    @property
    def block_size(self) -> int:
        """T."""
        return self.keys.shape[3]

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """What the elements are, one dtype unless keys and values differ."""
        arrays = [self.keys] if self.values is None else [self.keys, self.values]
        return {
            array.dtype
            if self.kv_dtype is None or jnp.issubdtype(array.dtype, jnp.floating)
            else self.kv_dtype
            for array in arrays
        }


def make_pools(
    keys: jax.Array,
    values: jax.Array | None,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
    *,
    has_layers: bool,
    kv_dtype: jax.typing.DTypeLike | None,
    value_head_dim: int | None,
) -> Pools:
    """Check the arrays and bring them to five axes, with one layer if they have none.

    Raises:
      ValueError: saying what does not fit.
    """
    if not has_layers:
        require_rank("key_pool", keys, 4, "[N, K, T, D] when layer is None")
        if values is not None:
            require_rank("value_pool", values, 4, "[N, K, T, Dv], layer is None")
        # The new axis is a view under jit, and free.
        keys, values, key_scales, value_scales = jax.tree.map(
            lambda array: array[None], (keys, values, key_scales, value_scales)
        )
    value_dim = require_pools(keys, values, value_head_dim)
    require_elements(keys, values, kv_dtype)
    require_scales(keys, values, key_scales, value_scales)
    return Pools(
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        head_dim=keys.shape[4],
        value_dim=value_dim,
        kv_dtype=None if kv_dtype is None else jnp.dtype(kv_dtype),
    )


def gather_blocks(
    pool: jax.Array,  # [L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C], clamped into the pool
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Return the blocks as `f32[C, K * T * D]`, each as flat as it lies in memory.

    Rubbish ids are clamped, never dropped or filled: the caller masks what they bring.
    """
    chunk = lax.platform_dependent(
        pool,
        jnp.stack([jnp.full_like(blocks, layer), blocks], axis=-1),
        tpu=_gather_tiled,
        default=_gather_flat,
    )
    return to_float32(chunk, kv_dtype)


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


def gather_pieces(
    pool: jax.Array,  # [L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P, W], clamped into the pool
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Return pieces of W blocks by head, as `f32[P * K * W, T * D]`.

    What one head has of a piece comes out side by side, as one product wants it.
    """
    num_layers, num_blocks, num_kv_heads, *block_shape = pool.shape
    # The view is free: a head of a block is a block of one head.
    by_head = pool.reshape(num_layers, num_blocks * num_kv_heads, 1, *block_shape)
    blocks = jnp.clip(blocks, 0, num_blocks - 1)[:, None] * num_kv_heads
    blocks += jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    return gather_blocks(by_head, layer, blocks.reshape(-1), kv_dtype)


def gather_scales(
    scales: jax.Array,  # [L, N, K, T]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[...], clamped into the pool
) -> jax.Array:
    """Return the scales of the blocks' tokens, f32[..., K, T]."""
    found = scales.at[layer, blocks].get(mode="clip")
    return to_float32(found, jnp.bfloat16)


def read_twice(chunk: jax.Array, never: jax.Array, otherwise: float) -> jax.Array:
    """Return the number `otherwise`, by way of a second reader of the flat chunk.

    With the reshape of the chunk as its only reader, XLA merges the two, copies along
    the short axis and is back at single elements: a third of the time of a decode step
    in JAX 0.10.2. An `optimization_barrier` is respected only by newer versions.

    Args:
      chunk: f32[C, K * T * D] from `gather_blocks`, or from `gather_pieces`.
      never: bool[], false, but not to the compiler's knowledge.
      otherwise: what to return.
    """
    return jnp.where(never, chunk[0, 0], jnp.float32(otherwise))


def add_blocks(
    pool: jax.Array,  # f32[L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C], ids out of range are dropped
    chunk: jax.Array,  # f32[C, K, T, D]
) -> jax.Array:
    """Add a chunk back where `gather_blocks` would take it from: its transpose."""
    # A negative index would wrap even with mode="drop".
    blocks = jnp.where(blocks < 0, pool.shape[1], blocks)
    return pool.at[layer, blocks].add(chunk, mode="drop")
