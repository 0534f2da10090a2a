"""Writes into slots for the kernel that stores them: of any sizes, and as shapes."""

import dataclasses

import jax.numpy as jnp

from jkv.attention.elements import STORED_AS
from jkv.attention.slots import SlotWrite
from jkv.config.dtypes import needs_scales
from support.kernel_lowering import shape


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one write: what the arrays are and what goes there."""

    dtype: str = "bfloat16"
    # Of keys, and of values unless these lie in the keys.
    head_dims: tuple[int, ...] = (32, 32)
    layers: int = 2
    blocks: int = 5
    heads: int = 3
    block_size: int = 4
    rows: int = 7
    part: int | None = None
    given: str = "bfloat16"  # rows that are to be rounded


def make_write(sizes, draw):
    """A write of whatever `draw` makes of a shape and a dtype, nothing shared."""
    dtype, head_dims = jnp.dtype(sizes.dtype), sizes.head_dims
    bits = STORED_AS[dtype]
    has_scales = needs_scales(dtype)
    common = sizes.layers, sizes.blocks, sizes.heads, sizes.block_size
    arrays, rows = {}, {}
    for name, head_dim in zip(("key", "value"), head_dims, strict=False):
        arrays[f"{name}_pool"] = draw((*common, head_dim), bits)
        given = jnp.dtype(sizes.given) if has_scales else dtype
        rows[f"{name}_pool"] = draw((sizes.rows, sizes.heads, head_dim), given)
        if has_scales:
            arrays[f"{name}_scales"] = draw(common, jnp.uint16)
    return SlotWrite(
        arrays=arrays,
        rows=rows,
        layer=draw((), jnp.int32),
        block_ids=draw((sizes.rows,), jnp.int32),
        offsets=draw((sizes.rows,), jnp.int32),
        valid=draw((sizes.rows,), jnp.bool_),
        part=None if sizes.part is None else draw((), jnp.int32),
        elements=dtype if has_scales else None,
    )


def shape_write(sizes):
    """The same as shapes."""
    return make_write(sizes, lambda dims, dtype: shape(*dims, dtype=dtype))
