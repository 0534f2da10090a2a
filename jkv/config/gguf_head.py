"""The head of a GGUF file: its metadata, and where its tensors lie.

The format is ggml's (docs/gguf.md there), versions 2 and 3, which differ in nothing
that is read here. The package gguf makes arrays of each token of a vocabulary, which
takes 9 seconds for Gemma's 262,144; here a token is a slice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Kinds of metadata, by the format's numbers: a text stands behind its length, an array
# behind the kind and the number of its elements, a number is numpy's.
TEXT, ARRAY = 8, 9
NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}


class Place(NamedTuple):
    """Where a tensor lies."""

    shape: tuple[int, ...]  # of its numbers, the last axis contiguous
    kind: int  # as the format counts them
    offset: int  # in the file


class Head(NamedTuple):
    """What one file says."""

    metadata: dict[str, Any]
    places: dict[str, Place]  # by the tensors' names


def read_head(data: memoryview) -> Head:
    """Read what stands before a file's tensors, which is as short as it says."""
    reader = _Reader(data)
    if (version := reader.read_number("<u4")) not in VERSIONS:
        raise ValueError(
            f"its version is {version}, and {VERSIONS} are read; files of big-endian "
            "machines are not"
        )
    num_tensors, num_fields = reader.read_number("<u8"), reader.read_number("<u8")
    metadata = reader.read_table(num_fields, reader.read_field)
    places = reader.read_table(num_tensors, reader.read_place)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    begin = -(-reader.position // alignment) * alignment
    return Head(
        metadata,
        {
            name: place._replace(offset=begin + place.offset)
            for name, place in places.items()
        },
    )


class _Reader:
    """Reads one value after the other; ValueError where the file ends before."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = len(MAGIC)

    def read_table(
        self, count: int, read: Callable[[], tuple[str, Any]]
    ) -> dict[str, Any]:
        """Return as many values by their names."""
        found: dict[str, Any] = {}
        for _ in range(self._check(count)):
            name, value = read()
            if name in found:
                raise ValueError(f"it holds {name} twice")
            found[name] = value
        return found

    def read_field(self) -> tuple[str, Any]:
        """Return a name of metadata, and its value."""
        return self._read_text(), self._read_value(self.read_number("<u4"))

    def read_place(self) -> tuple[str, Place]:
        """Return a tensor's name, and its place behind the head's end."""
        name, num_axes = self._read_text(), self.read_number("<u4")
        shape = tuple(self._read_numbers("<u8", num_axes)[::-1]) or (1,)
        return name, Place(shape, self.read_number("<u4"), self.read_number("<u8"))

    def read_number(self, dtype: str) -> Any:
        return self._read_numbers(dtype, 1)[0]

    def _read_value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._read_text()
        if kind == ARRAY:
            kind, count = self.read_number("<u4"), self.read_number("<u8")
            if kind in NUMBERS:
                return self._read_numbers(NUMBERS[kind], count)
            return [self._read_value(kind) for _ in range(self._check(count))]
        if kind not in NUMBERS:
            raise ValueError(f"it holds metadata of the unknown kind {kind}")
        value = self.read_number(NUMBERS[kind])
        # Kept as float32: the decimal that was meant, not 9.99999997e-07.
        return float(str(np.float32(value))) if NUMBERS[kind] == "<f4" else value

    def _read_text(self) -> str:
        first = self.position + 8
        size = int.from_bytes(self._data[self.position : first], "little")
        self.position = first + self._check(size)
        return str(self._data[first : self.position], "utf-8")

    def _read_numbers(self, dtype: str, count: int) -> list[Any]:
        self._check(count)
        found = np.frombuffer(self._data, dtype, count, self.position)
        self.position += found.nbytes
        return found.tolist()

    def _check(self, count: int) -> int:
        """Return how many bytes, or values of a byte or more, are to come."""
        if count > len(self._data) - self.position:
            raise ValueError("it ends before its metadata does")
        return count
