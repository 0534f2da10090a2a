"""One array of a cache before it is made: its shape, its dtype, what it begins with."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

# One number for all elements, the numbers of a short array, or those of a long one.
Fill: TypeAlias = int | tuple[int, ...] | range


class ArrayLayout(NamedTuple):
    """One array of a cache."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Fill

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


Arrays: TypeAlias = dict[str, ArrayLayout]


def count_bytes(arrays: Iterable[ArrayLayout]) -> int:
    return sum(array.nbytes for array in arrays)


def within(path: str, arrays: Arrays) -> Arrays:
    """Return the arrays of a part of a cache by their paths in the whole."""
    return {f"{path}.{name}": array for name, array in arrays.items()}
