"""Which layers of a model look back over a window only.

With a single group of layers a cache keeps all tokens of every one. With a group for
each window (`GroupedConfig`) the others keep no more than their rows see.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Windows(NamedTuple):
    """How many layers have a window, and its tokens."""

    num_layers: int
    length: int


def count_windows(layers: Sequence[int | None]) -> Windows | None:
    """Return how many of these layers have a window, None if all see everything."""
    lengths = [length for length in layers if length is not None]
    return Windows(len(lengths), max(lengths)) if lengths else None


def order_windows(layers: Sequence[int | None]) -> list[int | None]:
    """Return the different windows of layers, the one that sees furthest first."""
    different = set(layers)
    finite = sorted((window for window in different if window), reverse=True)
    return [None, *finite] if None in different else [*finite]


def find_leader(windows: Sequence[int | None]) -> int:
    """Return the index of the first window that sees furthest, of none 0."""
    if not windows:
        return 0
    return windows.index(order_windows(windows)[0])
