"""What the kernels know of formats: how tiles become operands, how rows are rounded.

fp8 is taken apart by its bits: what Triton offers depends on the card (none of e4m3fn
before sm_89) and JAX does not let e4m3fnuz through at all. The bits of e5m2 are the
upper half of float16's. Those of e4m3 are float32's, shifted, up to a power of two:
three integer instructions and one factor, whatever the card. How many there are
matters: at the bandwidth of an MI300X or H200 there is time for about five per element.

Interpreted, the numbers are converted as XLA does it: a processor may take the small
ones for zero, which are subnormal numbers of float32 until they are multiplied.
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
    """Elements of 16 or 32 bits, which are numbers as they are loaded, or int8."""

    dtype: np.dtype[Any]

    # Elements in one of the pool, each in a part of the row.
    parts: ClassVar[int] = 1
    # Whether words take fewer registers than single elements, and more instructions.
    has_costly_words: ClassVar[bool] = False

    @property
    def has_bytes(self) -> bool:
        """Whether elements have one byte, to which the kernel rounds rows."""
        return self.dtype.itemsize == 1

    @property
    def is_rounded_here(self) -> bool:
        """Whether rows are numbers that the kernel rounds when it stores them."""
        return self.has_bytes

    def of(self, width: int) -> "KernelFormat":
        """Return the format of rows of so many numbers."""
        del width
        return self

    def view_of(
        self,
        *,
        has_words: bool,  # whether those of one byte are loaded as words
        has_view: bool,  # whether bits are loaded as the numbers that they mean
    ) -> np.dtype[Any] | None:
        """Return what elements of a pool are loaded as; None: as they are."""
        if self.has_bytes:
            return WORD if has_words else None
        return BFLOAT16 if has_view and self.dtype == BFLOAT16 else None

    def spread(self, sections: list[Section], width: int) -> list[Section]:
        """Return columns of rows of so many numbers, as `to_operands` has them.

        Those in sections of a part, of one part after the other.
        """
        size = width // self.parts
        return [
            each._replace(start=each.start + part * size) if part else each
            for part in range(self.parts)
            for each in sections
        ]

    def above(self, dtype: np.dtype[Any]) -> float:
        """Return how much larger operands may be than the numbers that they mean."""
        del dtype
        return 0.0

    def to_operands(
        self,
        tiles: list[jax.Array],  # elements
        dtype: np.dtype[Any],
        *,
        is_exact: bool,  # whether operands are the numbers; else they may be above them
        interpret: bool,
    ) -> list[jax.Array]:
        """Return what is multiplied for the sections whose elements were loaded."""
        del is_exact
        return [
            (self.words_to_operand if tile.dtype == WORD else self.to_operand)(
                tile, dtype, interpret=interpret
            )
            for tile in tiles
        ]

    def to_operand(
        self,
        tile: jax.Array,  # elements as loaded; NaN of e4m3 comes out as some number
        # float32, bfloat16 or float16; at least as precise as the elements
        dtype: np.dtype[Any],
        *,
        interpret: bool,  # whether the kernel is interpreted
    ) -> jax.Array:
        """Return the numbers that elements mean, in a dtype that holds them exactly."""
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
        """Return the numbers that four bytes of each word mean, [..., D]."""

        def convert(byte: int) -> jax.Array:
            # The byte in front, with its sign.
            high = words << (24 - 8 * byte)
            if not interpret:
                return self._take_byte(words, high, byte, dtype)
            tile = (high >> 24).astype(jnp.int8)
            return self.to_operand(tile, dtype, interpret=True)

        # In the order of the columns: the words, which half, which byte of the half.
        pairs = _join(convert(0), convert(2)), _join(convert(1), convert(3))
        return _join(*pairs).reshape(*words.shape[:-1], 4 * words.shape[-1])

    def put(
        self,
        # the row's columns, bits or, of bytes, numbers to be rounded
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
        """Convert one byte of all words, which `high` has in front."""
        del words, byte
        return narrow((high >> 24).astype(jnp.float32), dtype)


class E5m2(KernelFormat):
    """Five bits of exponent."""

    def _convert(self, tile: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        half = bitcast(tile, jnp.uint8).astype(jnp.uint16) << 8
        return _widen(half, dtype)

    def _take_byte(
        self, words: jax.Array, high: jax.Array, byte: int, dtype: np.dtype[Any]
    ) -> jax.Array:
        """Take two numbers of float16: of the upper bytes of both halves of a word."""
        del high
        pair = (words if byte % 2 else words << 8) & jnp.int32(0xFF00FF00 - 2**32)
        half = (pair >> 16 if byte > 1 else pair).astype(jnp.uint16)
        return _widen(half, dtype)


# Where sign, exponent and digits of e4m3 are among the bits of float32, when the byte,
# sign-extended, is shifted left.
_SHIFT, _MASK = 20, 0x87F00000 - 2**32


@dataclasses.dataclass(frozen=True)
class E4m3(KernelFormat):
    """Four bits of exponent."""

    factor: float  # what is missing, 2 to the difference of the exponents' biases
    has_costly_words: ClassVar[bool] = True

    def _convert(self, tile: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        bits = bitcast(tile, jnp.int8).astype(jnp.int32) << _SHIFT
        return self._scale(bits, dtype)

    def _take_byte(
        self, words: jax.Array, high: jax.Array, byte: int, dtype: np.dtype[Any]
    ) -> jax.Array:
        """Shift by what the byte lacks."""
        del words, byte
        return self._scale(high >> (24 - _SHIFT), dtype)

    def _scale(self, bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        bits &= jnp.int32(_MASK)
        numbers = lax.bitcast_convert_type(bits, jnp.float32) * self.factor
        return narrow(numbers, dtype)


@dataclasses.dataclass(frozen=True)
class Nibbles(KernelFormat):
    """Steps of four bits, several in a unit (`formats/packed.py`).

    As the last digits of a float a step is itself and a power of two. That takes two or
    three instructions for two elements of 16 bits, whatever the card. What operands are
    above the numbers is the same for all: it is taken off sums.
    """

    unit: np.dtype[Any] = np.dtype(np.uint8)

    @property
    def parts(self) -> int:  # type: ignore[override]
        """Elements of a unit."""
        return 2 * self.unit.itemsize

    @property
    def is_rounded_here(self) -> bool:
        """XLA does it, where it turns rows."""
        return False

    def of(self, width: int) -> KernelFormat:
        """Return the format with the units of such rows."""
        return dataclasses.replace(self, unit=unit_of(width))

    def view_of(self, *, has_words: bool, has_view: bool) -> np.dtype[Any] | None:
        """Return the unit."""
        del has_words, has_view
        return self.unit

    def above(self, dtype: np.dtype[Any]) -> float:
        """Return the power of two and the middle of the steps; float32 is exact."""
        return 0.0 if dtype == FLOAT32 else _find_base(dtype)[0] + MIDDLE

    def to_operands(
        self,
        tiles: list[jax.Array],
        dtype: np.dtype[Any],
        *,
        is_exact: bool,
        interpret: bool,
    ) -> list[jax.Array]:
        """Return the columns of each part."""
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
    """Return a power of two, and the place of a one among the bits of such numbers.

    In bfloat16, which is multiplied most, the last place: some steps need no shift. The
    other dtypes have more digits, of which a larger power would cost sums some.
    """
    if dtype == BFLOAT16:
        return 128.0, 0
    return 16.0, jnp.finfo(dtype).nmant - 4


def _widen(half: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert the bits of float16."""
    numbers = lax.bitcast_convert_type(half, jnp.float16)
    return narrow(numbers.astype(jnp.float32), dtype)


def _join(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return [..., 2]."""
    return lax.concatenate([one[..., None], other[..., None]], one.ndim)


_NUMBERS = [KernelFormat(jnp.dtype(n)) for n in ("float32", "float16", "bfloat16")]
_BYTES = [
    KernelFormat(jnp.dtype(jnp.int8)),
    E4m3(jnp.dtype(jnp.float8_e4m3fn), 2.0**120),
    E4m3(jnp.dtype(jnp.float8_e4m3fnuz), 2.0**119),
    E5m2(jnp.dtype(jnp.float8_e5m2)),
]
# What the kernels read; in plain arrays fp8 may have no scales.
KERNEL_FORMATS: dict[Format, KernelFormat] = {
    **{Numbers(each.dtype): each for each in (*_NUMBERS, *_BYTES)},
    **{Scaled(each.dtype): each for each in _BYTES},
    Packed(jnp.dtype(jnp.int4)): Nibbles(jnp.dtype(jnp.int4)),
}
