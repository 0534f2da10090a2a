"""Rows of four-bit elements, two in a byte, with a scale for each token and kv head.

A row is turned first, by a fixed orthonormal transform: what stands out in a few of its
elements is spread over all, which come near a normal distribution. Its elements are
rounded to 16 even steps. Where the outermost lie is chosen for each row: of three
scales the one with the least error, within a tenth of that of 16 levels of a normal.

Attention stays among turned numbers: turned queries have the same products with turned
keys, and a sum of turned values is turned back as one row.

Elements of a unit of two bytes are a quarter of the row apart, where it has 64 or a
multiple, those of a byte half of it elsewhere: a part of all units is a part of a row.

(QuaRot, arXiv 2404.00456, turns rows of a cache so.)
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.formats.format import Element, Parts, as_stored, multiply_out, to_float32
from jkv.formats.scaled import SCALE_DTYPE, Scaled, scale_rows

# Steps, from 0 to 15, are numbers when this is taken from them.
MIDDLE = 7.5
# Where the outermost step may lie, by the largest magnitude.
_OUTERMOST = (0.8, 0.9, 1.0)
# Parts of a step that errors are counted in: in integers, so that their sum does not
# depend on its order.
_PARTS = 64.0
# A turned element may exceed float32 where no element of its row does. With its scale
# rounded up by 1/128, the outermost step of this one is still finite.
_LARGEST = np.float32(0.99 * np.finfo(np.float32).max)


def unit_of(width: int) -> np.dtype[Any]:
    """Return what elements of a row lie in."""
    return np.dtype(np.uint8 if width % 64 else np.uint16)


@dataclasses.dataclass(frozen=True)
class Packed(Scaled):
    """Turned rows of 16 steps, the first part of a row in the units' lowest bits."""

    is_turned: ClassVar[bool] = True

    @property
    def stored_as(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def width_of(self, size: int) -> int:
        """Return two for each byte."""
        return 2 * size

    def arrays(self, width: int) -> dict[str, Element]:
        """Return the pairs and the scales."""
        if width % 2:
            raise ValueError(
                f"{self.dtype.name} has two elements in a byte, and {width} of them in "
                f"a row are no pairs: give an even head dim, or another dtype"
            )
        pairs = Element((width // 2,), self.stored_as, self.stored_as)
        return super().arrays(width) | {"pool": pairs}

    def turn(self, rows: jax.Array) -> jax.Array:
        """Multiply by signs, then transform; the inverse of `turn_back`."""
        return _transform(_flip(rows.astype(jnp.float32))).astype(rows.dtype)

    def turn_back(self, rows: jax.Array) -> jax.Array:
        """Transform, which is its own inverse, then multiply by the same signs."""
        return _flip(_transform(rows.astype(jnp.float32))).astype(rows.dtype)

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Turn rows; elements of a finite row stay finite, at most `_LARGEST`."""
        rows = super().prepare(rows).astype(jnp.float32)
        is_finite = jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True)
        turned = self.turn(rows)
        return jnp.where(is_finite, jnp.clip(turned, -_LARGEST, _LARGEST), turned)

    def put(self, rows: jax.Array) -> Parts:
        """Round; a row with NaN or infinity in it reads as NaN."""
        steps, scales, least = _find_steps(rows, _OUTERMOST[0])
        for share in _OUTERMOST[1:]:
            other_steps, other_scales, error = _find_steps(rows, share)
            is_less = error < least
            steps = jnp.where(is_less[..., None], other_steps, steps)
            scales = jnp.where(is_less, other_scales, scales)
            least = jnp.minimum(error, least)
        return {"pool": _pack(steps), "scales": as_stored(scales)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return the steps around zero, turned as they are, and scales as factors."""
        pool, scales = stored["pool"], stored["scales"]
        width = self.width_of(pool.size // max(1, scales.size))
        numbers = _unpack(pool, width).astype(jnp.float32) - MIDDLE
        return numbers, to_float32(scales, SCALE_DTYPE)

    def read(self, stored: Parts) -> jax.Array:
        """Return rows as they were before they were turned, in float32."""
        return self.turn_back(multiply_out(*self.get(stored)))


def _find_steps(
    rows: jax.Array, share: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the steps of rows, i32[..., D], their scales, and the errors, f32[...]."""
    rows, scales = scale_rows(rows, np.float32(share / MIDDLE))
    # Nothing is added to a product before it is rounded: whether that is one operation
    # depends on the compiler.
    steps = jnp.clip(jnp.floor(rows).astype(jnp.int32) + 8, 0, 15)
    wanted = jnp.floor(rows * _PARTS).astype(jnp.int32)
    off = wanted - (steps * int(_PARTS) - int(MIDDLE * _PARTS))
    return steps, scales, jnp.sum(off * off, axis=-1).astype(jnp.float32) * share**2


def _pack(steps: jax.Array) -> jax.Array:
    """Return the bytes of steps, u8[..., D / 2]."""
    unit = unit_of(steps.shape[-1])
    parts = steps.reshape(*steps.shape[:-1], 2 * unit.itemsize, -1).astype(unit)
    units = jnp.sum(parts << _places(parts), axis=-2, dtype=unit)
    pool = lax.bitcast_convert_type(units, jnp.uint8)
    return pool.reshape(*steps.shape[:-1], -1)


def _unpack(pool: jax.Array, width: int) -> jax.Array:
    """Return the steps of rows of a width, [..., rows * D], of what `_pack` gave."""
    size = unit_of(width).itemsize
    units = pool.reshape(*pool.shape[:-1], -1, width // (2 * size), size)
    halves = [
        half
        for number in range(size)
        for half in (units[..., number] & 15, units[..., number] >> 4)
    ]
    return jnp.stack(halves, axis=-2).reshape(*pool.shape[:-1], -1)


def _places(units: jax.Array) -> jax.Array:
    """Return where the bits of each part of units, [..., n], are: [..., parts, 1]."""
    places = jnp.arange(0, 8 * units.dtype.itemsize, 4, dtype=units.dtype)
    return places.reshape((1,) * (units.ndim - 2) + (-1, 1))


def _flip(rows: jax.Array) -> jax.Array:
    """Multiply each block of a row, [..., D], by its signs.

    They differ from every row of the transform in nearly half of the places (a bent
    function): what all elements have in common is spread over all.
    """
    size = _find_block(rows.shape[-1])
    number = np.arange(rows.shape[-1]) % size
    pairs = number & (number >> 1) & 0x5555
    signs = np.where(np.bitwise_count(pairs) % 2, -1, 1).astype(np.float32)
    return rows * signs.reshape((1,) * (rows.ndim - 1) + signs.shape)


def _transform(rows: jax.Array) -> jax.Array:
    """Return the Walsh-Hadamard transform of blocks of a row, by sums of its own.

    Sums are of elements over a power of two, which changes no bit of them, and at most
    the largest element: sums of finite rows are finite.
    """
    size = _find_block(rows.shape[-1])
    blocks = rows.reshape(*rows.shape[:-1], -1, size) * np.float32(1 / size)
    for _ in range(int(math.log2(size))):
        pairs = blocks.reshape(*blocks.shape[:-1], -1, 2)
        one, other = pairs[..., 0], pairs[..., 1]
        blocks = jnp.concatenate([one + other, one - other], axis=-1)
    return blocks.reshape(rows.shape) * np.float32(math.sqrt(size))


def _find_block(width: int) -> int:
    """Return the largest power of two that divides a width."""
    return width & -width
