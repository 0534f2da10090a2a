"""Prompts: padded on the left for tunix, on the right for jkv; equal ones, found."""

import math
from collections.abc import Sequence
from typing import NamedTuple

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


class Repeats(NamedTuple):
    """B prompts as P, each with as many samples as the others."""

    first: list[int]  # of each of the P, the first of the B that it stands for
    num_samples: int  # B / P
    # i64[B], of which of the B prompts each sample is, samples of one together
    prompts: np.ndarray


def find_repeats(prompts: Sequence[Sequence[int]]) -> Repeats:
    """Find equal prompts, wherever they stand.

    A trainer repeats each prompt as often as the others. Where a batch has one more
    often, by chance, or a micro-batch cuts its samples apart, the number of samples is
    the greatest that divides all counts.

    Example:
      >>> found = find_repeats([[5], [7], [5], [7], [7], [7]])
      >>> found.first, found.num_samples, found.prompts.tolist()
      ([0, 1, 4], 2, [0, 2, 1, 3, 4, 5])
    """
    mentions: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        mentions.setdefault(tuple(prompt), []).append(number)
    num_samples = math.gcd(*(len(numbers) for numbers in mentions.values()))
    samples = [
        numbers[start : start + num_samples]
        for numbers in mentions.values()
        for start in range(0, len(numbers), num_samples)
    ]
    first = [each[0] for each in samples]
    return Repeats(first, num_samples, np.concatenate(samples))
