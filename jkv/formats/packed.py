"""Int4 rows: two elements per byte, with a scale for each token and kv head.

Rows are first rotated by a fixed orthonormal transform, as in QuaRot (arXiv
2404.00456). It spreads outliers over all elements, which become nearly normal. Elements
are rounded to 16 uniform steps. Of three candidate scales each row takes the one with
the least error, within 10% of the error of the 16 optimal levels for a normal.

Attention operates on rotated rows: rotated queries have the same products with rotated
keys, and a weighted sum of rotated values is rotated back as one row.

Elements in one unit of two bytes are a quarter of the row apart if the row has a
multiple of 64 elements, else elements in one byte are half a row apart. So a slice of
all units is a slice of the row.
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

# Steps 0 to 15 minus this are the decoded numbers.
MIDDLE = 7.5
# Candidates for the outermost step, relative to the largest magnitude.
_OUTERMOST = (0.8, 0.9, 1.0)
# Resolution of errors, in parts of a step: sums of integers are independent of order.
_PARTS = 64.0
# A rotated element may exceed the largest float32 even if its row does not. At this
# bound the outermost step is finite with a scale rounded up by 1/128.
_LARGEST = np.float32(0.99 * np.finfo(np.float32).max)


def unit_of(width: int) -> np.dtype[Any]:
    """Return the dtype of the units that a row's elements are packed in."""
    return np.dtype(np.uint8 if width % 64 else np.uint16)


@dataclasses.dataclass(frozen=True)
class Packed(Scaled):
    """Rotated rows of 16 steps; the row's first part is in the units' lowest bits."""

    is_turned: ClassVar[bool] = True

    @property
    def stored_as(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def width_of(self, size: int) -> int:
        """Return 2 * size, as a byte holds two elements."""
        return 2 * size

    def arrays(self, width: int) -> dict[str, Element]:
        """Return the elements of "pool" and "scales"."""
        if width % 2:
            raise ValueError(
                f"{self.dtype.name} packs two elements in a byte, so the head dim must "
                f"be even, got {width}; change the head dim or the dtype"
            )
        pairs = Element((width // 2,), self.stored_as, self.stored_as)
        return super().arrays(width) | {"pool": pairs}

    def rotate(self, rows: jax.Array) -> jax.Array:
        """Multiply by signs, then apply the Hadamard transform."""
        return _transform(_flip(rows.astype(jnp.float32))).astype(rows.dtype)

    def rotate_back(self, rows: jax.Array) -> jax.Array:
        """Apply the Hadamard transform, its own inverse, then multiply by the signs."""
        return _flip(_transform(rows.astype(jnp.float32))).astype(rows.dtype)

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Rotate rows, clipped to `_LARGEST` so that finite rows stay finite."""
        rows = super().prepare(rows).astype(jnp.float32)
        is_finite = jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True)
        rotated = self.rotate(rows)
        return jnp.where(is_finite, jnp.clip(rotated, -_LARGEST, _LARGEST), rotated)

    def put(self, rows: jax.Array) -> Parts:
        """Encode rows; a row with NaN or infinity decodes to NaN."""
        steps, scales, least = _find_steps(rows, _OUTERMOST[0])
        for share in _OUTERMOST[1:]:
            other_steps, other_scales, error = _find_steps(rows, share)
            is_less = error < least
            steps = jnp.where(is_less[..., None], other_steps, steps)
            scales = jnp.where(is_less, other_scales, scales)
            least = jnp.minimum(error, least)
        return {"pool": _pack(steps), "scales": as_stored(scales)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return the centered steps of rotated rows, and the scales as factors."""
        pool, scales = stored["pool"], stored["scales"]
        width = self.width_of(pool.size // max(1, scales.size))
        numbers = _unpack(pool, width).astype(jnp.float32) - MIDDLE
        return numbers, to_float32(scales, SCALE_DTYPE)

    def read(self, stored: Parts) -> jax.Array:
        """Decode rows and rotate them back, in float32."""
        return self.rotate_back(multiply_out(*self.get(stored)))


def _find_steps(
    rows: jax.Array, share: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return steps i32[..., D], scales, and squared errors f32[...] of rows."""
    rows, scales = scale_rows(rows, np.float32(share / MIDDLE))
    # No sum of unrounded products: compilers differ in fusing multiply-adds.
    steps = jnp.clip(jnp.floor(rows).astype(jnp.int32) + 8, 0, 15)
    wanted = jnp.floor(rows * _PARTS).astype(jnp.int32)
    off = wanted - (steps * int(_PARTS) - int(MIDDLE * _PARTS))
    return steps, scales, jnp.sum(off * off, axis=-1).astype(jnp.float32) * share**2


def _pack(steps: jax.Array) -> jax.Array:
    """Pack steps into bytes, u8[..., D / 2]."""
    unit = unit_of(steps.shape[-1])
    parts = steps.reshape(*steps.shape[:-1], 2 * unit.itemsize, -1).astype(unit)
    units = jnp.sum(parts << _places(parts), axis=-2, dtype=unit)
    pool = lax.bitcast_convert_type(units, jnp.uint8)
    return pool.reshape(*steps.shape[:-1], -1)


def _unpack(pool: jax.Array, width: int) -> jax.Array:
    """Unpack the steps of rows of `width` elements, [..., rows * D]."""
    size = unit_of(width).itemsize
    units = pool.reshape(*pool.shape[:-1], -1, width // (2 * size), size)
    halves = [
        half
        for number in range(size)
        for half in (units[..., number] & 15, units[..., number] >> 4)
    ]
    return jnp.stack(halves, axis=-2).reshape(*pool.shape[:-1], -1)


def _places(units: jax.Array) -> jax.Array:
    """Return the shift of each part in units [..., n], as [..., parts, 1]."""
    places = jnp.arange(0, 8 * units.dtype.itemsize, 4, dtype=units.dtype)
    return places.reshape((1,) * (units.ndim - 2) + (-1, 1))


def _flip(rows: jax.Array) -> jax.Array:
    """Multiply each block of a row, [..., D], by fixed signs.

    The signs form a bent function, which differs from every row of the transform in
    nearly half of the places. So a common offset of all elements is spread as well.
    """
    size = _find_block(rows.shape[-1])
    number = np.arange(rows.shape[-1]) % size
    pairs = number & (number >> 1) & 0x5555
    signs = np.where(np.bitwise_count(pairs) % 2, -1, 1).astype(np.float32)
    return rows * signs.reshape((1,) * (rows.ndim - 1) + signs.shape)


def _transform(rows: jax.Array) -> jax.Array:
    """Return the Walsh-Hadamard transform of the blocks of a row, in a fixed order.

    Elements are first divided by a power of two, which is exact, so that no sum exceeds
    the largest element and finite rows stay finite.
    """
    size = _find_block(rows.shape[-1])
    blocks = rows.reshape(*rows.shape[:-1], -1, size) * np.float32(1 / size)
    for _ in range(int(math.log2(size))):
        pairs = blocks.reshape(*blocks.shape[:-1], -1, 2)
        one, other = pairs[..., 0], pairs[..., 1]
        blocks = jnp.concatenate([one + other, one - other], axis=-1)
    return blocks.reshape(rows.shape) * np.float32(math.sqrt(size))


def _find_block(width: int) -> int:
    """Return the largest power of two that divides `width`."""
    return width & -width
