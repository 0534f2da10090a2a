"""The interface of formats: the arrays that store a row, and their decoding.

A format is a frozen, hashable dataclass, so that jitted functions take it as a static
argument. A row is the key or value of one token in one kv head, `D` numbers. A format
stores each row separately, in one or more arrays with axes `[L, N, K, T]` and its own.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Dtype -> dtype of the array that stores it. XLA on CPU up to jaxlib 0.11.1 converts a
# whole bfloat16 array to float32 and back in every scatter, and later versions still do
# so for fp8. The same bits as unsigned integers are updated in place on all backends.
STORED_AS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(jnp.float32): np.dtype(jnp.float32),
    np.dtype(jnp.float16): np.dtype(jnp.float16),
    np.dtype(jnp.bfloat16): np.dtype(jnp.uint16),
    np.dtype(jnp.int8): np.dtype(jnp.int8),
    np.dtype(jnp.float8_e4m3fn): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e4m3fnuz): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e5m2): np.dtype(jnp.uint8),
}

# Array dtypes that do not determine the dtype of the encoding.
RAW_BITS = frozenset(
    bits for encoded_dtype, bits in STORED_AS.items() if bits != encoded_dtype
)

# Storage array names: key or value, pool or scales.
STORAGE_NAMES = "key_pool", "value_pool", "key_scales", "value_scales"


# Arrays of the keys or of the values, by part: "pool" and "scales".
Parts: TypeAlias = dict[str, jax.Array]


class Element(NamedTuple):
    """The part of a row in one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the array
    encoded_dtype: np.dtype[Any]  # dtype of the encoding, as recorded in files


@dataclasses.dataclass(frozen=True)
class Format:
    """One encoding of rows.

    Methods accept rows with any leading axes. `get` also accepts several rows flattened
    into one axis, the layout of gathered blocks.
    """

    dtype: np.dtype[Any]  # name in a configuration
    # True if rows are rounded to steps that depend on the row.
    is_quantized: ClassVar[bool] = False
    # True if `get` returns rotated rows.
    is_turned: ClassVar[bool] = False

    @property
    def stored_as(self) -> np.dtype[Any]:
        """The dtype of the pool."""
        return STORED_AS[self.dtype]

    def width_of(self, size: int) -> int:
        """Return D for a pool whose last axis has `size` elements."""
        return size

    def arrays(self, width: int) -> dict[str, Element]:
        """Return the element of a row of `width` numbers in each array."""
        raise NotImplementedError

    def nbytes(self, width: int) -> int:
        """Return the bytes of a row of `width` numbers."""
        elements = self.arrays(width).values()
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in elements)

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Convert rows, float[..., D], to the input dtype of `put`.

        Raises:
          ValueError: under differentiation, if the encoding has no derivative.
        """
        raise NotImplementedError

    def put(self, rows: jax.Array) -> Parts:
        """Encode rows; return arrays of shape [..., *element.shape]."""
        raise NotImplementedError

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Decode rows; return f32[..., D] and a factor per row, f32[...], or None.

        Callers multiply the factor into a token's score and weight, which have fewer
        elements than the row.
        """
        raise NotImplementedError

    def rotate(self, rows: jax.Array) -> jax.Array:
        """Rotate rows such as queries, float[..., D], like the rows of `get`."""
        return rows

    def rotate_back(self, rows: jax.Array) -> jax.Array:
        """Rotate weighted sums of decoded rows, float[..., D], back."""
        return rows

    def read(self, stored: Parts) -> jax.Array:
        """Decode rows for inspection, [..., D], in their own dtype or float32."""
        return multiply_out(*self.get(stored))


def multiply_out(numbers: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Apply the factors, f32[...], to rows, f32[..., D]."""
    return numbers if factor is None else numbers * factor[..., None]


class Formats(NamedTuple):
    """The formats of the keys and values of a group of layers."""

    key: Format
    value: Format

    def __str__(self) -> str:
        """Return the names of the formats in a configuration."""
        key, value = (each.dtype.name for each in self)
        return key if key == value else f"{key} keys, {value} values"

    def of(self, name: str) -> tuple[Format, str]:
        """Return the format of a named array, and the part in it."""
        row, part = name.split("_")
        return (self.key if row == "key" else self.value), part

    def encoded_dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of the encoding of a named array."""
        kept, part = self.of(name)
        return kept.arrays(2)[part].encoded_dtype


def name_parts(row: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Return parts under the names of their arrays; `row` is "key" or "value"."""
    return {f"{row}_{part}": each for part, each in parts.items()}


def parts_of(row: str, arrays: dict[str, jax.Array]) -> Parts:
    """Return the arrays of "key" or "value" rows, by part."""
    names = {name: name.removeprefix(f"{row}_") for name in arrays}
    return {part: arrays[name] for name, part in names.items() if part != name}


@dataclasses.dataclass(frozen=True)
class Numbers(Format):
    """Unscaled numbers: float32, float16, bfloat16; fp8 in arrays without scales."""

    def arrays(self, width: int) -> dict[str, Element]:
        return {"pool": Element((width,), self.stored_as, self.dtype)}

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Cast rows; raise under differentiation if they are stored as raw bits."""
        if self.stored_as != self.dtype:
            rows = without_derivative(rows, self.dtype.name)
        return rows.astype(self.dtype)

    def put(self, rows: jax.Array) -> Parts:
        return {"pool": as_stored(rows)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Convert to float32; there is no factor."""
        return to_float32(stored["pool"], self.dtype), None

    def read(self, stored: Parts) -> jax.Array:
        """Return the numbers in their dtype."""
        return as_bits(stored["pool"], self.dtype)


def without_derivative(rows: jax.Array, dtype: str) -> jax.Array:
    """Return rows that raise ValueError when they are differentiated."""
    return _cut_off(rows, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cut_off(rows: jax.Array, dtype: str) -> jax.Array:
    del dtype
    return rows


@_cut_off.defjvp
def _refuse_derivative(dtype: str, _primals: Any, _tangents: Any) -> NoReturn:
    raise ValueError(
        f"keys and values of dtype {dtype} have no derivative, as they are stored as "
        f"bits: differentiate with CacheConfig(dtype='float32'), or cut them off with "
        f"jax.lax.stop_gradient"
    )


def as_stored(numbers: jax.Array) -> jax.Array:
    """Bitcast numbers to the dtype of their storage array."""
    return as_bits(numbers, STORED_AS[np.dtype(numbers.dtype)])


def as_bits(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Bitcast an array to a dtype of the same size."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def to_float32(stored: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert stored elements to float32; raw bits are of `dtype`."""
    if stored.dtype in RAW_BITS:
        stored = lax.bitcast_convert_type(stored, dtype)
    return stored.astype(jnp.float32)
