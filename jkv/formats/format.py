"""What a format is: which arrays hold a row of keys or values, and what they mean.

A format is a value: a frozen dataclass, hashable, that what is jitted is told of. A row
is what one kv head has of one token, `D` numbers. Rows are stored one by one, in one
array or several, each with the axes `[L, N, K, T]` and then its own.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Meaning -> dtype of the array that holds it. XLA on CPU up to jaxlib 0.11.1 turns a
# whole bfloat16 array into float32 and back on every scatter, and still does so with
# fp8; the same bits as unsigned integers are updated in place by every version and
# backend, so they are stored that way.
STORED_AS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(jnp.float32): np.dtype(jnp.float32),
    np.dtype(jnp.float16): np.dtype(jnp.float16),
    np.dtype(jnp.bfloat16): np.dtype(jnp.uint16),
    np.dtype(jnp.int8): np.dtype(jnp.int8),
    np.dtype(jnp.float8_e4m3fn): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e4m3fnuz): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e5m2): np.dtype(jnp.uint8),
}

# Dtypes that do not say by themselves what they hold.
RAW_BITS = frozenset(bits for meaning, bits in STORED_AS.items() if bits != meaning)

# Names of arrays: whose rows, and what of them.
STORAGE_NAMES = "key_pool", "value_pool", "key_scales", "value_scales"


# Arrays by what they hold of rows, "pool" and "scales".
Parts: TypeAlias = dict[str, jax.Array]


class Element(NamedTuple):
    """What one array holds of a row."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the array
    meaning: np.dtype[Any]  # of its bits, as files say it


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to store rows.

    Its functions take rows with any axes before the last one. `get` takes several rows
    in one axis, too, side by side: blocks are gathered so, and no other shape is known.
    """

    dtype: np.dtype[Any]  # what a configuration calls it by
    # Whether it rounds to steps that depend on the row, whatever its numbers were.
    is_quantized: ClassVar[bool] = False
    # Whether numbers of `get` are turned, so that elements have no place of their own.
    is_turned: ClassVar[bool] = False

    @property
    def stored_as(self) -> np.dtype[Any]:
        """The dtype of the pool."""
        return STORED_AS[self.dtype]

    def width_of(self, size: int) -> int:
        """Return the numbers of a row of which the pool has so many elements."""
        return size

    def arrays(self, width: int) -> dict[str, Element]:
        """Return what each array holds of rows of so many numbers."""
        raise NotImplementedError

    def nbytes(self, width: int) -> int:
        """Return the bytes of a row of so many numbers."""
        elements = self.arrays(width).values()
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in elements)

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Return rows, float[..., D], in the dtype in which `put` takes them.

        Raises:
          ValueError: where they are differentiated, unless derivatives flow through
            what is stored.
        """
        raise NotImplementedError

    def put(self, rows: jax.Array) -> Parts:
        """Return what the arrays hold of rows, [..., *element.shape] each."""
        raise NotImplementedError

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return the numbers of rows, f32[..., D], and a factor for each row, f32[...].

        None for no factor. It is multiplied into a token's score and weight, which are
        fewer than its elements.
        """
        raise NotImplementedError

    def turn(self, rows: jax.Array) -> jax.Array:
        """Return rows such as queries, float[..., D], turned as what `get` gives."""
        return rows

    def turn_back(self, rows: jax.Array) -> jax.Array:
        """Return sums of numbers of `get`, float[..., D], as sums of rows."""
        return rows

    def read(self, stored: Parts) -> jax.Array:
        """Return rows for people, [..., D], in their own dtype or in float32."""
        return multiply_out(*self.get(stored))


def multiply_out(numbers: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return rows, f32[..., D], with their factors, f32[...]."""
    return numbers if factor is None else numbers * factor[..., None]


class Formats(NamedTuple):
    """How a group of layers stores the rows of its keys and of its values."""

    key: Format
    value: Format

    def __str__(self) -> str:
        """Say what configurations call them."""
        key, value = (each.dtype.name for each in self)
        return key if key == value else f"{key} keys, {value} values"

    def of(self, name: str) -> tuple[Format, str]:
        """Return the format of an array by its name, and what it holds of rows."""
        row, part = name.split("_")
        return (self.key if row == "key" else self.value), part

    def meaning(self, name: str) -> np.dtype[Any]:
        """Return what the bits of an array mean, by its name."""
        kept, part = self.of(name)
        return kept.arrays(2)[part].meaning


def name_parts(row: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of "key" or "value" rows by the names of their arrays."""
    return {f"{row}_{part}": each for part, each in parts.items()}


def parts_of(row: str, arrays: dict[str, jax.Array]) -> Parts:
    """Return those of the arrays that have "key" or "value" rows, by part."""
    names = {name: name.removeprefix(f"{row}_") for name in arrays}
    return {part: arrays[name] for name, part in names.items() if part != name}


@dataclasses.dataclass(frozen=True)
class Numbers(Format):
    """Each number for itself: float32, float16, bfloat16; in plain arrays fp8, too."""

    def arrays(self, width: int) -> dict[str, Element]:
        return {"pool": Element((width,), self.stored_as, self.dtype)}

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Cast; what is stored as bits has no derivative from here on."""
        if self.stored_as != self.dtype:
            rows = without_derivative(rows, self.dtype.name)
        return rows.astype(self.dtype)

    def put(self, rows: jax.Array) -> Parts:
        return {"pool": as_stored(rows)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return what the bits mean; nothing is multiplied."""
        return to_float32(stored["pool"], self.dtype), None

    def read(self, stored: Parts) -> jax.Array:
        """Return the numbers in their dtype."""
        return as_bits(stored["pool"], self.dtype)


def without_derivative(rows: jax.Array, dtype: str) -> jax.Array:
    """Return rows of which no derivative can be had, as they are stored as bits."""
    return _cut_off(rows, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cut_off(rows: jax.Array, dtype: str) -> jax.Array:
    del dtype
    return rows


@_cut_off.defjvp
def _refuse_derivative(dtype: str, _primals: Any, _tangents: Any) -> NoReturn:
    raise ValueError(
        f"there is no derivative with respect to keys and values stored as {dtype}: it "
        f"would be zero without a word. Differentiate on a cache with "
        f"CacheConfig(dtype='float32'), or cut them off with jax.lax.stop_gradient"
    )


def as_stored(numbers: jax.Array) -> jax.Array:
    """Return the bits of numbers as arrays keep them."""
    return as_bits(numbers, STORED_AS[np.dtype(numbers.dtype)])


def as_bits(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return an array as another dtype of that many bits has it."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def to_float32(stored: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Turn what is stored into float32; `dtype` says what raw bits mean."""
    if stored.dtype in RAW_BITS:
        stored = lax.bitcast_convert_type(stored, dtype)
    return stored.astype(jnp.float32)
