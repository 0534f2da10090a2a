"""Selection of a table row for a call, and the calls that the kernels reject."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention.backend import Pools
from jkv.attention.kernel.elements.formats import KERNEL_FORMATS
from jkv.attention.kernel.elements.sections import MIN_SIZE, fill_head_dim
from jkv.attention.kernel.tiles import table
from jkv.attention.kernel.tiles.table import TABLE, Backward, Tuning

_CDNA = ("gfx90a", "gfx940", "gfx941", "gfx942")
_CDNA4 = ("gfx950",)


# Prefixes of targets without the last digit. gfx1250 has matrix instructions as RDNA.
_RDNA = ("gfx110", "gfx115", "gfx125")
_RDNA4 = ("gfx120",)


_OPERANDS = (jnp.dtype("float32"), jnp.dtype("float16"), jnp.dtype("bfloat16"))


def find_family(platform: str, target: str | None) -> str | None:
    """Return the key of the table; None for GPUs without the required instructions."""
    if platform == "rocm":
        if target is None or target[:-1] in _RDNA:
            return "rdna"
        if target[:-1] in _RDNA4:
            return "rdna4"
        if target in _CDNA4:
            return "cdna4"
        return "cdna" if target in _CDNA else None
    if target is not None and int(target.removeprefix("sm_")) < 80:
        return None
    return "hopper" if target == "sm_90" else "other"


def find_tuning(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> Tuning | None:
    """Return the tuning of a call on a target, None if the table has no row."""
    if platform == "cpu":
        return table.INTERPRETED
    name = find_family(platform, target)
    if name is None:
        return None
    family, kind = TABLE[name], find_kind(queries, pools)
    # Columns of keys and values after padding.
    dims = fill_head_dim(pools.head_dim), fill_head_dim(pools.value_dim)
    if set(dims) & set(family.spilling.get(kind, ())):
        return None
    has_one_dtype = find_weight_dtype(queries, pools) == find_operand_dtype(
        queries, pools
    )
    for row in family.rows:
        if row.has_one_dtype and not has_one_dtype:
            continue
        if kind in row.kinds and max(dims) <= row.max_head_dim:
            return row.tuned_for(family.units)
    return None


def find_backward(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> Backward | None:
    """Return the tiles of a derivative on a target, None if the table has no row."""
    if why_no_derivative(queries, pools):
        return None
    if platform == "cpu":
        return table.INTERPRETED_BACKWARD
    name = find_family(platform, target)
    if name is None:
        return None
    kind, dims = find_kind(queries, pools), (pools.head_dim, pools.value_dim)
    for row in TABLE[name].backward:
        # Padding to a multiple of 16 is fine; further padding may spill.
        is_whole = row.multiple == MIN_SIZE or not any(d % row.multiple for d in dims)
        if kind in row.kinds and max(dims) <= row.max_head_dim and is_whole:
            return row
    return None


def find_kind(queries: jax.Array, pools: Pools) -> str:
    """Return the kind of a call, which selects rows of the table.

    "float32", "half", "byte", "four" (four-bit elements), or "mixed" for float32
    queries with one-byte elements.
    """
    has_bytes = any(dtype.itemsize == 1 for dtype in pools.dtypes)
    if find_operand_dtype(queries, pools) == jnp.float32:
        return "mixed" if has_bytes else "float32"
    if any(each.is_turned for each in pools.formats):
        return "four"
    return "byte" if has_bytes else "half"


def find_operand_dtype(queries: jax.Array, pools: Pools) -> np.dtype[Any]:
    """Return the dtype of query-key products, exact for both operands.

    One-byte elements are exact in every query dtype.
    """
    dtypes = {queries.dtype, *(dt for dt in pools.dtypes if dt.itemsize > 1)}
    return dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)


def find_weight_dtype(queries: jax.Array, pools: Pools) -> np.dtype[Any]:
    """Return the dtype of weight-value products.

    Bfloat16 instead of float16 with scales, whose product with a weight may underflow.
    """
    dtype = find_operand_dtype(queries, pools)
    is_scaled = pools.key_scales is not None or pools.value_scales is not None
    return jnp.dtype(jnp.bfloat16) if is_scaled and dtype == jnp.float16 else dtype


def why_not(
    queries: jax.Array,  # [R, H, D]; only shape and dtype are used
    pools: Pools,
    platform: str,  # "rocm", "cuda", or "cpu" for interpret mode
    target: str | None,  # see `DeviceType`; None for an unknown GPU
) -> str | None:
    """Return the reason the kernel cannot serve a call, None if it can."""
    reason = why_never(queries, pools)
    if reason is not None or find_tuning(queries, pools, platform, target):
        return reason
    return _describe(queries, pools, platform, target)


def _describe(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> str:
    width = max(pools.head_dim, pools.value_dim)
    dtypes = sorted({str(queries.dtype), *map(str, pools.dtypes)})
    return (
        f"there is no tile for head dim {width} with {' and '.join(dtypes)} on "
        f"{target or f'an unknown {platform} GPU'}"
    )


def why_no_derivative(queries: jax.Array, pools: Pools) -> str | None:
    """Return the reason no target supports the derivative, None if one may."""
    reason = why_never(queries, pools)
    if reason is not None:
        return reason
    if find_weight_dtype(queries, pools) != find_operand_dtype(queries, pools):
        return "scales times float16 weights may underflow"
    arrays = [array for array in (pools.keys, pools.values) if array is not None]
    if len({jnp.issubdtype(array.dtype, jnp.floating) for array in arrays}) > 1:
        return "keys and values must both be floats or both be bits"
    return None


def why_no_tile(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> str | None:
    """Return the reason the derivative has no kernels on a target; see below."""
    reason = why_no_derivative(queries, pools)
    if reason is not None or find_backward(queries, pools, platform, target):
        return reason
    return _describe(queries, pools, platform, target)


def why_never(queries: jax.Array, pools: Pools) -> str | None:
    """Return the reason no target can serve a call, None if one may."""
    formats = {each: each.dtype.name for each in pools.formats}
    for each, name in formats.items():
        if each not in KERNEL_FORMATS:
            names = dict.fromkeys(known.dtype.name for known in KERNEL_FORMATS)
            return f"kernels support {', '.join(names)}, not {name}"
    dims = {"key": pools.head_dim, "value": pools.value_dim}
    for (name, dim), kept in zip(dims.items(), pools.formats, strict=True):
        # Other dims are not multiples of 16 bytes, and padding to 256 comes in halves:
        # both took too many registers on Hopper.
        multiple = 8 if dim < 240 else MIN_SIZE
        if not MIN_SIZE <= dim <= 576 or dim % multiple:
            return (
                f"the {name} head dim must be a multiple of 8 from 16 to 240 or one of "
                f"16 up to 576; it is {dim}"
            )
        if kept.is_turned and (dim % MIN_SIZE or dim < 2 * MIN_SIZE):
            return (
                f"the {name} head dim must be a multiple of 16 from 32 on in four "
                f"bits; it is {dim}"
            )
    for name, pool in {"key": pools.keys, "value": pools.values}.items():
        # Offsets in elements have 32 bits for pools of up to 2**32 bytes.
        if pool is None or pool.size <= 2**31:
            continue
        if (num_bytes := pool.size * pool.dtype.itemsize) <= 2**32:
            return (
                f"the {name} pool has {pool.size} elements in {num_bytes} bytes, "
                "which the compiler would address with 32 bits; use less than 2**31 "
                "elements or more than 2**32 bytes"
            )
    if queries.dtype not in _OPERANDS:
        return f"kernels support float32, float16 and bfloat16, not {queries.dtype}"
    return None
