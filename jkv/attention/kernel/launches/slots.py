"""The kernel that stores the keys and values of a step, in one launch.

XLA launches a scatter per array: two in each layer, and six with scales, which are
computed first. Here a program processes one row of one kv head: it rounds the row for
quantized formats, and stores it in all arrays, as the scatters do.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.backend import SlotWrite
from jkv.attention.kernel import backend
from jkv.attention.kernel.elements.conversion import bitcast
from jkv.attention.kernel.elements.formats import KERNEL_FORMATS, KernelFormat
from jkv.attention.kernel.elements.sections import MIN_SIZE, cut
from jkv.formats.format import name_parts

# A row of a head has a few hundred bytes: one load and one store for a warp.
_NUM_WARPS = 1


class _Operands(NamedTuple):
    """The operands of the kernel: refs inside it, arrays outside."""

    layer: jax.Array  # i32[1]
    part: jax.Array | None  # i32[1], of each block; None for whole blocks
    block_ids: jax.Array  # i32[R]
    offsets: jax.Array  # i32[R]
    valid: jax.Array  # i8[R]
    # [R, K, D], bits or numbers to be rounded; or [R, K], bits of scales
    rows: dict[str, jax.Array]


def why_scattered(
    # of a group of layers by name, [L, N, K, T, ...]; only shapes and dtypes are used
    arrays: dict[str, jax.Array],
) -> str | None:
    """Return the reason to use scatters on any GPU, None to use the kernel."""
    for name, array in arrays.items():
        # Offsets in elements have 32 bits for arrays of up to 2**32 bytes.
        if array.size > 2**31 and array.size * array.dtype.itemsize <= 2**32:
            return f"{name} has {array.size} elements in at most 2**32 bytes"
        if array.ndim == 5 and (array.shape[4] < MIN_SIZE or array.shape[4] % 8):
            return (
                f"rows of {name} have {array.shape[4]} elements, which is not a "
                f"multiple of 8 from {MIN_SIZE} on"
            )
    return "one array is one launch either way" if len(arrays) == 1 else None


def store_rows(write: SlotWrite, *, way: backend.Way) -> dict[str, jax.Array]:
    """Store the rows in their slots, in place."""
    launch = functools.partial(_launch, way=way)
    results = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for name, array in write.arrays.items()
    }
    return backend.defer(launch, (write,), results, way)


def _launch(write: SlotWrite, *, way: backend.Way) -> dict[str, jax.Array]:
    num_rows, num_kv_heads = write.num_rows, write.pool.shape[2]
    interpret = way.interpret
    if not num_rows:
        return write.arrays
    # Compiled kernels take bits without a conversion, see `view_as`.
    view = bitcast if interpret else backend.view_as
    formats = {n: KERNEL_FORMATS[write.formats.of(n)[0]] for n in write.arrays}
    rows: dict[str, jax.Array] = {}
    for name, each in write.rows.items():
        if formats[name].is_rounded_here:
            rows[name] = each
        elif formats[name].has_bytes:  # rounded by XLA, which rotates them
            parts = write.formats.of(name)[0].put(each)
            rows |= name_parts(name.removesuffix("_pool"), parts)
        else:
            rows[name] = view(each, write.arrays[name].dtype)
    valid = write.valid.astype(jnp.int8) if interpret else view(write.valid, jnp.int8)
    operands = _Operands(
        layer=write.layer[None],
        part=None if write.part is None else write.part[None],
        block_ids=write.block_ids,
        offsets=write.offsets,
        valid=valid,
        rows=rows,
    )
    (arrays,) = backend.launch(
        "jkv_store",
        functools.partial(_store_row, formats=formats),
        (operands, write.arrays),
        (
            {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype)
                for name, array in write.arrays.items()
            },
        ),
        grid=(num_rows, num_kv_heads),
        compilation=backend.Compilation(_NUM_WARPS, 1, way),
        in_place=True,
    )
    stored: dict[str, jax.Array] = arrays
    return stored


def _store_row(
    operands: _Operands,
    before: Any,
    arrays: dict[str, jax.Array],
    *,
    formats: dict[str, KernelFormat],
) -> None:
    """Store one row of one kv head in its slot of each array.

    Arrays are aliased to `before`, so other slots are unchanged.
    """
    del before
    o = operands
    row, head = backend.program_id(0), backend.program_id(1)
    num_layers, num_blocks, _, block_size = arrays["key_pool"].shape[:4]
    layer, block, offset = o.layer[0], o.block_ids[row], o.offsets[row]
    if o.part is not None:
        offset -= o.part[0] * block_size
    is_stored = o.valid[row] != 0
    for index, size in ((layer, num_layers), (block, num_blocks), (offset, block_size)):
        is_stored &= (index >= 0) & (index < size)

    # Masked stores need indices in range in interpret mode.
    layer = jnp.clip(layer, 0, num_layers - 1)
    block = jnp.clip(block, 0, num_blocks - 1)
    offset = jnp.clip(offset, 0, block_size - 1)
    slot = layer, block, head, offset
    for name, rows in o.rows.items():
        if len(rows.shape) == 2:
            backend.store_masked(arrays[name], slot, rows[row, head], is_stored)
            continue
        sections = cut(rows.shape[2])
        bits = [rows[row, head, section.columns[0]] for section in sections]
        bits, scale = formats[name].put(bits)
        if scale is not None:
            scales = arrays[name.replace("_pool", "_scales")]
            backend.store_masked(scales, slot, scale, is_stored)
        for section, each in zip(sections, bits, strict=True):
            where = *slot, section.columns[0]
            mask = section.over(is_stored[None])[0]
            backend.store_masked(arrays[name], where, each, mask)
