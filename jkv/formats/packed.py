"""Rows of four-bit elements, two in a byte, with a scale for each token and kv head.

A row is turned first, by a fixed orthonormal transform: what stands out in a few of its
elements is spread over all, which come near a normal distribution. So do the 16 levels:
`n (400 + n^2)` of the odd numbers n from -15 to 15 are exact numbers, and have within
2% of the least error that 16 levels of a normal can have.

Attention stays among turned numbers: turned queries have the same products with turned
keys, and a sum of turned values is turned back as one row.

(QuaRot, arXiv 2404.00456, turns rows of a cache so. Levels of a normal are those of
QLoRA, arXiv 2305.14314, there neither symmetric nor computed.)
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.formats.bits import as_stored, to_float32
from jkv.formats.format import Element, Parts, multiply_out
from jkv.formats.scaled import SCALE_DTYPE, Scaled, scale_rows

_ODD = np.arange(-15, 16, 2)
# About as large as the numbers of a normal. What is stored depends on them.
LEVELS = (_ODD * (400 + _ODD**2) / 4096).astype(np.float32)
_BOUNDS = (LEVELS[1:] + LEVELS[:-1]) / 2


@dataclasses.dataclass(frozen=True)
class Packed(Scaled):
    """Turned rows of 16 levels, the first of two elements in a byte's lower half."""

    is_turned: ClassVar[bool] = True

    @property
    def stored_as(self) -> np.dtype[Any]:
        """Bytes."""
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
        """Return turned rows."""
        return self.turn(super().prepare(rows).astype(jnp.float32))

    def put(self, rows: jax.Array) -> Parts:
        """Round; a row with NaN or infinity in it reads as NaN."""
        rows, scales = scale_rows(rows, np.float32(1) / LEVELS[-1])
        above = (rows > bound for bound in _BOUNDS)
        codes = sum((each.astype(jnp.uint8) for each in above), jnp.uint8(0))
        pairs = codes.reshape(*rows.shape[:-1], -1, 2)
        pool = pairs[..., 0] | (pairs[..., 1] << jnp.uint8(4))
        return {"pool": pool, "scales": as_stored(scales)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return the levels, turned as they are, and the scales as factors."""
        pool = stored["pool"]
        codes = jnp.stack([pool & jnp.uint8(15), pool >> jnp.uint8(4)], axis=-1)
        odd = 2.0 * codes.reshape(*pool.shape[:-1], -1).astype(jnp.float32) - 15.0
        levels = odd * (400.0 + odd * odd) * jnp.float32(1 / 4096)
        return levels, to_float32(stored["scales"], SCALE_DTYPE)

    def read(self, stored: Parts) -> jax.Array:
        """Return rows as they were before they were turned, in float32."""
        return self.turn_back(multiply_out(*self.get(stored)))


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
    """Return the Walsh-Hadamard transform of each block of a row, [..., D].

    By sums and differences, so that the bits of a row do not depend on the others.
    """
    size = _find_block(rows.shape[-1])
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    for _ in range(int(math.log2(size))):
        pairs = blocks.reshape(*blocks.shape[:-1], -1, 2)
        one, other = pairs[..., 0], pairs[..., 1]
        blocks = jnp.concatenate([one + other, one - other], axis=-1)
    return blocks.reshape(rows.shape) * np.float32(1 / math.sqrt(size))


def _find_block(width: int) -> int:
    """Return the largest power of two that divides a width."""
    return width & -width
