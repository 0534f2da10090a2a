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

# Model types whose `sliding_window_size` counts the tokens before the token itself.
PAST_TOKENS = {"mimo_v2_flash"}


class Windows(NamedTuple):
    """How many layers have a window, and its tokens."""

    num_layers: int
    length: int


def list_windows(
    model: dict[str, Any],  # the language model's settings, from a config.json
    # of all layers of the model, as `name_layers` returns them
    kinds: Sequence[str] | None,
    num_layers: int,  # layers that keep keys and values, the first of the model's
) -> tuple[int | None, ...]:
    """Return the window of each layer that keeps keys and values; None: all tokens."""
    length = model.get("sliding_window") or model.get("attention_chunk_size")
    if model.get("model_type") in PAST_TOKENS and model.get("sliding_window_size"):
        length = model["sliding_window_size"] + 1
    is_length = isinstance(length, int) and length > 0  # -1 is off
    if not is_length or not model.get("use_sliding_window", True):
        return (None,) * num_layers
    if kinds is None:
        first = model.get("max_window_layers") or 0
        windowed = [layer >= first for layer in range(num_layers)]
    else:
        windowed = [kind in WINDOWED for kind in kinds if kind in WINDOWED | FULL]
        windowed += [False] * (num_layers - len(windowed))
    return tuple(length if each else None for each in windowed[:num_layers])


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
