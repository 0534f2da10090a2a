"""Counts of elements and bytes, and the arrays that are made of them.

Counts are ints, positive, small enough for 32-bit indices. The arithmetic is on Python
ints, which cannot overflow. Byte counts are written and read as people do.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

# Ring positions are added before they are wrapped: twice the largest must fit in i32.
MAX_COUNT = 2**30 - 1

# Each class is compiled into the programs that take blocks.
MOST_CLASSES = 8

# Fields of a configuration whose cache finds nothing again.
WITHOUT_INDEX: dict[str, Any] = {"prefix_caching": False, "keep_classes": 1}

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")

_FACTORS = {
    **{unit.lower(): 1024**i for i, unit in enumerate(_BINARY)},
    **{unit: 1000**i for i, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
}


def checked_count(name: str, value: Any) -> int:
    """Return a size as a Python int, positive and small enough for 32-bit indices."""
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


def checked_num_blocks(num_blocks: int, prefix_caching: bool) -> int:
    """Return the size of a pool, or raise a `ValueError` that says what to change."""
    num_blocks = checked_count("num_blocks", num_blocks)
    # With a prefix index the ring is twice as long, and so are sums of its indices.
    if prefix_caching and num_blocks > MAX_COUNT // 2:
        raise ValueError(
            f"num_blocks must be at most {MAX_COUNT // 2} with prefix_caching, got "
            f"{num_blocks}; lower it, or raise block_size"
        )
    return num_blocks


def check_classes(keep_classes: Any, prefix_caching: bool) -> int:
    """Return the number of classes as a Python int, or say what cannot be."""
    count = checked_count("keep_classes", keep_classes)
    if count > MOST_CLASSES or (count > 1 and not prefix_caching):
        raise ValueError(
            f"keep_classes are 1 to {MOST_CLASSES} classes of cached blocks, and more "
            f"than one needs prefix_caching=True, without which nothing is cached: got "
            f"{count}"
        )
    return count


def check_window(
    sliding_window: Any, num_sink_tokens: Any, block_size: int, prefix_caching: bool
) -> tuple[int | None, int]:
    """Return a window and its sinks as Python ints, or say what cannot be."""
    if sliding_window is None:
        if num_sink_tokens != 0:
            raise ValueError(
                f"num_sink_tokens {num_sink_tokens!r} are kept where a window gives "
                f"others back; give sliding_window too, or leave num_sink_tokens out"
            )
        return None, 0
    window = checked_count("sliding_window", sliding_window)
    sinks = num_sink_tokens
    if sinks != 0:
        sinks = checked_count("num_sink_tokens", sinks)
    if prefix_caching and window <= block_size:
        raise ValueError(
            f"prefix_caching needs a window that reaches into the block before, so a "
            f"sliding_window above block_size: got {window} and {block_size}; lower "
            f"block_size, or leave prefix_caching out"
        )
    return window, int(sinks)


def count_window_blocks(
    window: int, num_sink_tokens: int, block_size: int, num_tokens: int
) -> int:
    """Return the most blocks of a sequence that grows by so many tokens at a time.

    Blocks are taken before those that the step gives back count as free. Until then a
    sequence has what the first row of the step before saw, and this step's rows.
    """
    kept = window - 1 + 2 * num_tokens
    blocks = (kept - 2) // block_size + 2  # wherever in a block they begin
    return blocks - (-num_sink_tokens // block_size)


def check_tables(max_sequences: int, max_blocks_per_sequence: int) -> None:
    """Refuse block tables with more entries than a 32-bit index can tell apart."""
    entries = max_sequences * max_blocks_per_sequence
    if entries > MAX_COUNT:
        raise ValueError(
            f"the block tables would have max_sequences * blocks per sequence = "
            f"{max_sequences} * {max_blocks_per_sequence} = {entries} "
            f"entries, more than {MAX_COUNT}; lower max_sequences or "
            f"max_context_length, or raise block_size"
        )


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


def human_bytes(count: float) -> str:
    """Return a byte count in the largest binary unit that keeps it above 1.

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
    # such as `"192GiB"`, `"1.5 TB"` or a plain count; GB are 10**9 bytes, GiB are 2**30
    text: str | int,
) -> int:
    """Return the bytes that an int, or a number with a unit, stands for.

    Raises:
      ValueError: for anything else, and for less than one byte.

    Example:
      >>> parse_bytes("192GiB"), parse_bytes("40 GB"), parse_bytes(4096)
      (206158430208, 40000000000, 4096)
    """
    match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-z]*)\s*", str(text).lower())
    unit = (match[2] or "b") if match else ""
    if match is None or unit not in _FACTORS:
        raise ValueError(
            f"{text!r} is no number of bytes; write a count, or a number with a unit: "
            f"B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024)"
        )
    # Whole numbers stay exact at any size.
    number = match[1].replace("_", "")
    exact = int(number) if number.isdigit() else float(number)
    count = int(exact * _FACTORS[unit])
    if count < 1:
        raise ValueError(f"{text!r} is less than one byte; give more")
    return count
