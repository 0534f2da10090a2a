"""Tokens of prompts as arrays: padded on the left for tunix, on the right for jkv."""

from collections.abc import Sequence

import numpy as np
from tunix.generate import utils as generate_utils

Tokens = Sequence[list[int]]


def check_texts(texts: Tokens) -> None:
    if not texts:
        raise ValueError("prompts is empty; give at least one prompt")
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(f"prompt {i} has no tokens; there is nothing to continue")


def find_width(texts: Tokens, usual_width: int) -> int:
    """Return the columns that prompts take, widened as tunix's sampler does."""
    longest = max(len(text) for text in texts)
    if longest <= usual_width:
        return usual_width
    return int(generate_utils.next_power_of_2(longest))


def pad_left(texts: Tokens, width: int, pad_id: int) -> np.ndarray:
    """Return i32[B, width], the padding first."""
    rows = [[pad_id] * (width - len(text)) + text for text in texts]
    return np.array(rows, np.int32)


def pad_right(texts: Tokens, width: int) -> np.ndarray:
    """Return i32[B, width], -1 after each text's end."""
    return np.array([text + [-1] * (width - len(text)) for text in texts], np.int32)
