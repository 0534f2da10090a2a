"""Which layers of a model look back over a window only.

With a single group of layers a cache keeps all tokens of every one. With a group for
each window (`GroupedConfig`) the others keep no more than their rows see.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Kinds of layers whose keys are needed only so far back.
WINDOWED = {"sliding_attention", "chunked_attention"}

# And those whose keys are needed for ever.
FULL = {"full_attention", "attention"}

# Every how many-th layer sees everything, where the model type alone says it.
FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "gemma3_text": 6}


class Windows(NamedTuple):
    """How many layers have a window, and its tokens."""

    num_layers: int
    length: int


def list_windows(model: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer that keeps keys and values, None for all tokens.

    Args:
      model: the language model's settings, from a config.json.
      num_layers: layers that keep keys and values, the first of the model's.
    """
    length = model.get("sliding_window") or model.get("attention_chunk_size")
    if not isinstance(length, int) or not model.get("use_sliding_window", True):
        return (None,) * num_layers
    return tuple(
        length if has_window else None for has_window in _have_window(model, num_layers)
    )


def _have_window(model: dict[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have the window, bool[num_layers]."""
    kinds = model.get("layer_types")
    every = model.get("sliding_window_pattern") or FULL_EVERY.get(
        str(model.get("model_type"))
    )
    first = model.get("max_window_layers") or 0
    if isinstance(kinds, list):
        windowed = [kind in WINDOWED for kind in kinds if kind in WINDOWED | FULL]
        windowed += [False] * (num_layers - len(windowed))
        return windowed[:num_layers]
    if isinstance(every, int):
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    return [layer >= first for layer in range(num_layers)]


def count_windows(layers: Sequence[int | None]) -> Windows | None:
    """Return how many layers have a window, None if all see everything.

    Args:
      layers: the window of each, as `list_windows` returns them.
    """
    lengths = [length for length in layers if length is not None]
    return Windows(len(lengths), max(lengths)) if lengths else None


def order_windows(layers: Sequence[int | None]) -> list[int | None]:
    """Return the different windows of layers, the one that sees furthest first."""
    different = set(layers)
    finite = sorted((window for window in different if window), reverse=True)
    return [None, *finite] if None in different else [*finite]


def find_leader(windows: Sequence[int | None]) -> int:
    """Return the index of the window that sees furthest, the first of equal ones.

    Args:
      windows: of each group of layers, None for all tokens.
    """
    return windows.index(order_windows(windows)[0])
