"""Slot writes of chosen sizes, as arrays or as shapes."""

import dataclasses

import jax.numpy as jnp

from jkv.attention.backend import SlotWrite
from jkv.formats.format import Formats, name_parts
from jkv.formats.table import FORMATS
from support.attention.kernel_lowering import shape


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one write: its arrays and rows."""

    dtype: str = "bfloat16"
    value_dtype: str | None = None
    # Of keys, and of values unless they are part of the keys.
    head_dims: tuple[int, ...] = (32, 32)
    layers: int = 2
    blocks: int = 5
    heads: int = 3
    block_size: int = 4
    rows: int = 7
    part: int | None = None
    given: str = "bfloat16"  # dtype of the rows before rounding


def make_write(sizes, draw):
    """Create a write with arrays from `draw(shape, dtype)`; no array is shared."""
    head_dims = sizes.head_dims
    dtypes = map(jnp.dtype, (sizes.dtype, sizes.value_dtype or sizes.dtype))
    formats = Formats(*(FORMATS[each] for each in dtypes))
    common = sizes.layers, sizes.blocks, sizes.heads, sizes.block_size
    arrays, rows = {}, {}
    sides = zip(("key", "value"), formats, head_dims, strict=False)
    for name, kept, head_dim in sides:
        for part, element in name_parts(name, kept.arrays(head_dim)).items():
            arrays[part] = draw((*common, *element.shape), element.dtype)
        given = jnp.dtype(sizes.given) if kept.is_quantized else kept.dtype
        rows[f"{name}_pool"] = draw((sizes.rows, sizes.heads, head_dim), given)
    return SlotWrite(
        arrays=arrays,
        rows=rows,
        layer=draw((), jnp.int32),
        block_ids=draw((sizes.rows,), jnp.int32),
        offsets=draw((sizes.rows,), jnp.int32),
        valid=draw((sizes.rows,), jnp.bool_),
        part=None if sizes.part is None else draw((), jnp.int32),
        formats=formats,
    )


def shape_write(sizes):
    """Return a write whose arrays are shapes."""
    return make_write(sizes, lambda dims, dtype: shape(*dims, dtype=dtype))
