"""Formats in the kernels: conversion of tiles to operands, rounding of rows.

fp8 is decoded by bit operations: Triton's support depends on the GPU (no e4m3fn before
sm_89), and JAX rejects e4m3fnuz. The bits of e5m2 are the upper half of float16's. The
bits of e4m3, shifted, are float32's up to a power of two: three integer instructions
and one factor on every GPU. At the bandwidth of an MI300X or H200 there is time for
about five instructions per element.

In interpret mode XLA converts: CPUs may flush the intermediate numbers, subnormal in
float32 until they are multiplied, to zero.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.kernel.elements.conversion import (
    BFLOAT16,
    FLOAT32,
    WORD,
    bitcast,
    narrow,
)
from jkv.attention.kernel.elements.rounding import round_row
from jkv.attention.kernel.elements.sections import Section
from jkv.formats.format import Format, Numbers
from jkv.formats.packed import MIDDLE, Packed, unit_of
from jkv.formats.scaled import Scaled


@dataclasses.dataclass(frozen=True)
class KernelFormat:
    """Elements of 16 or 32 bits, loaded as numbers, or int8."""

    dtype: np.dtype[Any]

    # Number of row elements packed in one pool element.
    parts: ClassVar[int] = 1

    @property
    def has_bytes(self) -> bool:
        """True for one-byte elements, which the kernel rounds rows to."""
        return self.dtype.itemsize == 1

    @property
    def is_rounded_here(self) -> bool:
        """True if the store kernel rounds the rows."""
        return self.has_bytes

    def of(self, width: int) -> "KernelFormat":
        """Return the format for rows of `width` numbers."""
        del width
        return self

    def view_of(
        self,
        *,
        has_words: bool,  # one-byte elements are loaded as words
        has_view: bool,  # raw bits are loaded as numbers
    ) -> np.dtype[Any] | None:
        """Return the dtype to view a pool as, None for its own."""
        if self.has_bytes:
            return WORD if has_words else None
        return BFLOAT16 if has_view and self.dtype == BFLOAT16 else None

    def spread(self, sections: list[Section], width: int) -> list[Section]:
        """Return the columns of a row for each result of `to_operands`.

        Sections of the first part come first, then of the next.
        """
        size = width // self.parts
        return [
            each._replace(start=each.start + part * size) if part else each
            for part in range(self.parts)
            for each in sections
        ]

    def above(self, dtype: np.dtype[Any]) -> float:
        """Return the common offset of inexact operands from their numbers."""
        del dtype
        return 0.0

    def to_operands(
        self,
        tiles: list[jax.Array],  # elements
        dtype: np.dtype[Any],
        *,
        is_exact: bool,  # operands have no offset (`above`)
        interpret: bool,
    ) -> list[jax.Array]:
        """Convert loaded elements to operands, by section."""
        del is_exact
        return [
            (self.words_to_operand if tile.dtype == WORD else self.to_operand)(
                tile, dtype, interpret=interpret
            )
            for tile in tiles
        ]

    def to_operand(
        self,
        tile: jax.Array,  # loaded elements; NaN of e4m3 becomes an arbitrary number
        # float32, bfloat16 or float16; at least as precise as the elements
        dtype: np.dtype[Any],
        *,
        interpret: bool,
    ) -> jax.Array:
        """Convert elements to numbers, exactly."""
        if interpret or not self.has_bytes:
            return bitcast(tile, self.dtype).astype(dtype)
        return self._convert(tile, dtype)

    def words_to_operand(
        self,
        words: jax.Array,  # i32[..., D / 4], the first element in the lowest byte
        dtype: np.dtype[Any],
        *,
        interpret: bool,
    ) -> jax.Array:
        """Convert the four bytes of each word to numbers, [..., D]."""

        def convert(byte: int) -> jax.Array:
            # The byte, with its sign, in the highest bits.
            high = words << (24 - 8 * byte)
            if not interpret:
                return self._take_byte(words, high, byte, dtype)
            tile = (high >> 24).astype(jnp.int8)
            return self.to_operand(tile, dtype, interpret=True)

        # In column order: word, half of the word, byte of the half.
        pairs = _join(convert(0), convert(2)), _join(convert(1), convert(3))
        return _join(*pairs).reshape(*words.shape[:-1], 4 * words.shape[-1])

    def put(
        self,
        # columns of the row: bits, or numbers to be rounded to bytes
        sections: list[jax.Array],
    ) -> tuple[list[jax.Array], Any]:
        """Return the elements of a row, by section, and the bits of its scale."""
        if not self.is_rounded_here:
            return sections, None
        scale, elements = round_row(sections, self.dtype)
        return elements, scale

    def _convert(self, tile: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        return narrow(tile.astype(jnp.float32), dtype)

    def _take_byte(
        self, words: jax.Array, high: jax.Array, byte: int, dtype: np.dtype[Any]
    ) -> jax.Array:
        """Convert one byte of each word, given in the highest bits of `high`."""
        del words, byte
        return narrow((high >> 24).astype(jnp.float32), dtype)


class E5m2(KernelFormat):
    """fp8 with five exponent bits."""

    def _convert(self, tile: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        half = bitcast(tile, jnp.uint8).astype(jnp.uint16) << 8
        return _widen(half, dtype)

    def _take_byte(
        self, words: jax.Array, high: jax.Array, byte: int, dtype: np.dtype[Any]
    ) -> jax.Array:
        """Decode as float16, whose upper bytes are the upper bytes of both halves."""
        del high
        pair = (words if byte % 2 else words << 8) & jnp.int32(0xFF00FF00 - 2**32)
        half = (pair >> 16 if byte > 1 else pair).astype(jnp.uint16)
        return _widen(half, dtype)


# A sign-extended byte of e4m3, shifted left, has its sign, exponent and mantissa at the
# places of float32's.
_SHIFT, _MASK = 20, 0x87F00000 - 2**32


@dataclasses.dataclass(frozen=True)
class E4m3(KernelFormat):
    """fp8 with four exponent bits."""

    factor: float  # 2 to the difference of the exponent biases

    def _convert(self, tile: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        bits = bitcast(tile, jnp.int8).astype(jnp.int32) << _SHIFT
        return self._scale(bits, dtype)

    def _take_byte(
        self, words: jax.Array, high: jax.Array, byte: int, dtype: np.dtype[Any]
    ) -> jax.Array:
        """Shift the byte to float32's places."""
        del words, byte
        return self._scale(high >> (24 - _SHIFT), dtype)

    def _scale(self, bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        bits &= jnp.int32(_MASK)
        numbers = lax.bitcast_convert_type(bits, jnp.float32) * self.factor
        return narrow(numbers, dtype)


@dataclasses.dataclass(frozen=True)
class Nibbles(KernelFormat):
    """Four-bit steps, packed in units (`formats/packed.py`).

    As the last mantissa bits of a power of two, a step becomes the power plus itself,
    by two or three instructions for two 16-bit elements on every GPU. The common
    offset is subtracted from sums.
    """

    unit: np.dtype[Any] = np.dtype(np.uint8)

    @property
    def parts(self) -> int:  # type: ignore[override]
        """Elements per unit."""
        return 2 * self.unit.itemsize

    @property
    def is_rounded_here(self) -> bool:
        """False, as XLA rounds rows after rotating them."""
        return False

    def of(self, width: int) -> KernelFormat:
        """Return the format with the unit for rows of `width` numbers."""
        return dataclasses.replace(self, unit=unit_of(width))

    def view_of(self, *, has_words: bool, has_view: bool) -> np.dtype[Any] | None:
        """Return the unit's dtype."""
        del has_words, has_view
        return self.unit

    def above(self, dtype: np.dtype[Any]) -> float:
        """Return the offset, a power of two plus the middle step; 0 for float32."""
        return 0.0 if dtype == FLOAT32 else _find_base(dtype)[0] + MIDDLE

    def to_operands(
        self,
        tiles: list[jax.Array],
        dtype: np.dtype[Any],
        *,
        is_exact: bool,
        interpret: bool,
    ) -> list[jax.Array]:
        """Extract the columns of each part."""
        del interpret
        parts = range(self.parts)
        large = [self._take(tile, part, dtype) for part in parts for tile in tiles]
        if not is_exact and self.above(dtype):
            return large
        above = _find_base(dtype)[0] + MIDDLE
        return [(each.astype(FLOAT32) - above).astype(dtype) for each in large]

    def _take(self, units: jax.Array, part: int, dtype: np.dtype[Any]) -> jax.Array:
        base, place = _find_base(dtype)
        bits = np.array(base, dtype).view(f"uint{8 * dtype.itemsize}")
        units, shift = units.astype(bits.dtype), place - 4 * part
        moved = units << shift if shift > 0 else units >> -shift
        moved = (moved & bits.dtype.type(15 << place)) | bits
        return lax.bitcast_convert_type(moved, dtype)


def _find_base(dtype: np.dtype[Any]) -> tuple[float, int]:
    """Return a power of two, and the mantissa bit with value one among such numbers.

    In bfloat16, the most frequent operand dtype, it is the last bit, so some steps need
    no shift. Other dtypes have more bits; a larger power would cost sums precision.
    """
    if dtype == BFLOAT16:
        return 128.0, 0
    return 16.0, jnp.finfo(dtype).nmant - 4


def _widen(half: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert the bits of float16."""
    numbers = lax.bitcast_convert_type(half, jnp.float16)
    return narrow(numbers.astype(jnp.float32), dtype)


def _join(one: jax.Array, other: jax.Array) -> jax.Array:
    """Stack on a new last axis, [..., 2]."""
    return lax.concatenate([one[..., None], other[..., None]], one.ndim)


_NUMBERS = [KernelFormat(jnp.dtype(n)) for n in ("float32", "float16", "bfloat16")]
_BYTES = [
    KernelFormat(jnp.dtype(jnp.int8)),
    E4m3(jnp.dtype(jnp.float8_e4m3fn), 2.0**120),
    E4m3(jnp.dtype(jnp.float8_e4m3fnuz), 2.0**119),
    E5m2(jnp.dtype(jnp.float8_e5m2)),
]
# Formats supported by the kernels; fp8 in plain arrays may have no scales.
KERNEL_FORMATS: dict[Format, KernelFormat] = {
    **{Numbers(each.dtype): each for each in (*_NUMBERS, *_BYTES)},
    **{Scaled(each.dtype): each for each in _BYTES},
    Packed(jnp.dtype(jnp.int4)): Nibbles(jnp.dtype(jnp.int4)),
}
