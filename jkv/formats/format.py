"""What a format is: which arrays hold a row of keys or values, and what they mean.

A format is a value: a frozen dataclass, hashable, that what is jitted is told of. A row
is what one kv head has of one token, `D` numbers. Rows are stored one by one, in one
array or several, each with the axes `[L, N, K, T]` and then its own.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import numpy as np

from jkv.formats.bits import STORED_AS

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


# Names of arrays: whose rows, and what of them.
STORAGE_NAMES = "key_pool", "value_pool", "key_scales", "value_scales"


def name_parts(row: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of "key" or "value" rows by the names of their arrays."""
    return {f"{row}_{part}": each for part, each in parts.items()}


def parts_of(row: str, arrays: dict[str, jax.Array]) -> Parts:
    """Return those of the arrays that have "key" or "value" rows, by part."""
    names = {name: name.removeprefix(f"{row}_") for name in arrays}
    return {part: arrays[name] for name, part in names.items() if part != name}
