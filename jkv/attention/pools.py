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

# What `kv_dtype` may say of a pool whose elements are raw bits.
BIT_DTYPES = {
    jnp.dtype(jnp.uint16): (jnp.dtype(jnp.bfloat16),),
    jnp.dtype(jnp.uint8): (
        jnp.dtype(jnp.float8_e4m3fn),
        jnp.dtype(jnp.float8_e4m3fnuz),
        jnp.dtype(jnp.float8_e5m2),
    ),
}


# One byte an element: scales per token and kv head may stand beside them, and must
# beside int8, which means nothing without.
ONE_BYTE_DTYPES = (jnp.dtype(jnp.int8), *BIT_DTYPES[jnp.dtype(jnp.uint8)])


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


def gather_blocks(
    pool: jax.Array,  # [L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C], clamped into the pool
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Return the blocks as `f32[C, K * T * D]`, each as flat as it lies in memory.

    Rubbish ids are clamped, never dropped or filled: the caller masks what they bring.
    """
    num_layers, num_blocks, *block_shape = pool.shape
    block_elements = block_shape[0] * block_shape[1] * block_shape[2]
    starts = jnp.stack([jnp.full_like(blocks, layer), blocks], axis=-1)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)
    )
    # The flat view is free, and its long last axis is what XLA copies with vector
    # instructions on a CPU; an axis of 64 it unrolls into single elements.
    chunk = lax.gather(
        pool.reshape(num_layers, num_blocks, block_elements),
        starts,
        dimensions,
        slice_sizes=(1, 1, block_elements),
        mode=lax.GatherScatterMode.CLIP,
    )
    return to_float32(chunk, kv_dtype)


def gather_scales(
    scales: jax.Array,  # [L, N, K, T]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C], clamped into the pool
) -> jax.Array:
    """Return the scales of the blocks' tokens, f32[C, K, T]."""
    found = scales.at[layer, blocks].get(mode="clip")
    return to_float32(found, jnp.bfloat16)


def read_twice(chunk: jax.Array, never: jax.Array, otherwise: float) -> jax.Array:
    """Return the number `otherwise`, by way of a second reader of the flat chunk.

    With the reshape of the chunk as its only reader, XLA merges the two, copies along
    the short axis and is back at single elements: a third of the time of a decode step
    in JAX 0.10.2. An `optimization_barrier` is respected only by newer versions.

    Args:
      chunk: f32[C, K * T * D] from `gather_blocks`.
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


def to_float32(
    chunk: jax.Array, kv_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Turn stored elements into float32; `kv_dtype` says what raw bits mean."""
    if kv_dtype is not None and chunk.dtype in BIT_DTYPES:
        chunk = lax.bitcast_convert_type(chunk, kv_dtype)
    return chunk.astype(jnp.float32)
