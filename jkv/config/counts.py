"""Validated counts and windows, array layouts, and byte counts in readable units.

Counts are positive Python ints, which cannot overflow, bounded so that indices fit in
32 bits.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

# Ring positions are added before they are wrapped, so twice a count must fit in i32.
MAX_COUNT = 2**30 - 1

# Programs that allocate blocks contain code for each class.
MOST_CLASSES = 8

# Entries of a row of the prefix index's hash table.
ROW_SIZE = 12

# Fields of a configuration without a prefix index.
WITHOUT_INDEX: dict[str, Any] = {"prefix_caching": False, "keep_classes": 1}

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")

_FACTORS = {
    **{unit.lower(): 1024**i for i, unit in enumerate(_BINARY)},
    **{unit: 1000**i for i, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
}


def checked_count(name: str, value: Any) -> int:
    """Return a size as a Python int in 1..MAX_COUNT, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}; "
            f"convert it with int(...)"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    if value > MAX_COUNT:
        raise ValueError(f"{name} must be at most {MAX_COUNT}, got {value}; lower it")
    return int(value)


def read_count(name: str, value: Any, field: str) -> int:
    """Return a positive int of a config.json; the error names `field` as a way out."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}; give {field}")
    return value


def checked_num_blocks(num_blocks: int, prefix_caching: bool) -> int:
    """Return the size of a pool, or raise ValueError."""
    num_blocks = checked_count("num_blocks", num_blocks)
    # A prefix index doubles the ring, and so the sums of its positions.
    if prefix_caching and num_blocks > MAX_COUNT // 2:
        raise ValueError(
            f"num_blocks must be at most {MAX_COUNT // 2} with prefix_caching, got "
            f"{num_blocks}; lower it, or raise block_size"
        )
    return num_blocks


def check_classes(keep_classes: Any, prefix_caching: bool) -> int:
    """Return the number of retention priorities, or raise ValueError."""
    count = checked_count("keep_classes", keep_classes)
    if count > MOST_CLASSES or (count > 1 and not prefix_caching):
        raise ValueError(
            f"keep_classes must be 1 to {MOST_CLASSES}, and 1 without prefix_caching, "
            f"got {count}; lower it, or set prefix_caching=True"
        )
    return count


def check_window(
    sliding_window: Any, num_sink_tokens: Any, block_size: int, prefix_caching: bool
) -> tuple[int | None, int]:
    """Return the sliding window and its sink tokens, or raise ValueError."""
    if sliding_window is None:
        if num_sink_tokens != 0:
            raise ValueError(
                f"num_sink_tokens must be 0 without sliding_window, got "
                f"{num_sink_tokens!r}; pass sliding_window, or omit num_sink_tokens"
            )
        return None, 0
    window = checked_count("sliding_window", sliding_window)
    sinks = num_sink_tokens
    if sinks != 0:
        sinks = checked_count("num_sink_tokens", sinks)
    if prefix_caching and window <= block_size:
        raise ValueError(
            f"prefix_caching needs a sliding_window above block_size: got {window} and "
            f"{block_size}; lower block_size, or omit prefix_caching"
        )
    return window, int(sinks)


def count_window_blocks(
    window: int, num_sink_tokens: int, block_size: int, num_tokens: int
) -> int:
    """Return the most blocks of a windowed sequence that grows by `num_tokens`.

    A step allocates its blocks before it releases others. Until then a sequence holds
    the window of the previous step's first row, and the rows of both steps.
    """
    kept = window - 1 + 2 * num_tokens
    blocks = (kept - 2) // block_size + 2  # for any offset of the first token
    return blocks - (-num_sink_tokens // block_size)


class Windows(NamedTuple):
    """The number of windowed layers, and their longest window in tokens."""

    num_layers: int
    length: int


def count_windows(layers: Sequence[int | None]) -> Windows | None:
    """Return the windows of layers, None if all have full attention."""
    lengths = [length for length in layers if length is not None]
    return Windows(len(lengths), max(lengths)) if lengths else None


def order_windows(layers: Sequence[int | None]) -> list[int | None]:
    """Return the distinct windows, longest first; None, full attention, is longest."""
    different = set(layers)
    finite = sorted((window for window in different if window), reverse=True)
    return [None, *finite] if None in different else [*finite]


def find_leader(windows: Sequence[int | None]) -> int:
    """Return the index of the first longest window, 0 without any."""
    if not windows:
        return 0
    return windows.index(order_windows(windows)[0])


def check_tables(max_sequences: int, max_blocks_per_sequence: int) -> None:
    """Reject block tables with more entries than 32-bit indices allow."""
    entries = max_sequences * max_blocks_per_sequence
    if entries > MAX_COUNT:
        raise ValueError(
            f"max_sequences * blocks per sequence, the entries of the block tables, "
            f"must be at most {MAX_COUNT}, got {max_sequences} * "
            f"{max_blocks_per_sequence} = {entries}; lower max_sequences or "
            f"max_context_length, or raise block_size"
        )


# One number for all elements, or the elements of a one-dimensional array.
Fill: TypeAlias = int | tuple[int, ...] | range


class ArrayLayout(NamedTuple):
    """Shape, dtype and initial contents of one array of a cache."""

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
    """Prefix the paths of arrays."""
    return {f"{path}.{name}": array for name, array in arrays.items()}


def human_bytes(count: float) -> str:
    """Format a byte count in the largest binary unit with a value of at least 1.

    Example:
      >>> human_bytes(640), human_bytes(3 * 2**29), human_bytes(2**52)
      ('640 B', '1.5 GiB', '4096.0 TiB')
    """
    for unit in _BINARY:
        if count < 1024 or unit == _BINARY[-1]:
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def parse_bytes(
    # such as "192GiB", "1.5 TB" or a plain count; GB are 10**9 bytes, GiB are 2**30
    text: str | int,
) -> int:
    """Convert an int, or a string with a unit, to bytes.

    Raises:
      ValueError: an invalid string, or less than one byte.

    Example:
      >>> parse_bytes("192GiB"), parse_bytes("40 GB"), parse_bytes(4096)
      (206158430208, 40000000000, 4096)
    """
    match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-z]*)\s*", str(text).lower())
    unit = (match[2] or "b") if match else ""
    if match is None or unit not in _FACTORS:
        raise ValueError(
            f"{text!r} is not a number of bytes; write a count, or a number with a "
            f"unit: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024)"
        )
    # Ints stay exact at any size.
    number = match[1].replace("_", "")
    exact = int(number) if number.isdigit() else float(number)
    count = int(exact * _FACTORS[unit])
    if count < 1:
        raise ValueError(f"{text!r} is less than one byte; give more")
    return count
