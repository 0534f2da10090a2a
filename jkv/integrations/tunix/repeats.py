"""Equal prompts, found: each is computed once and its samples are forked from it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Repeats(NamedTuple):
    """B prompts as P, each with as many samples as the others."""

    first: list[int]  # of each of the P, the first of the B that it stands for
    num_samples: int  # B / P
    # i64[B], of which of the B prompts each sample is, samples of one together
    prompts: np.ndarray


def find_repeats(
    prompts: Sequence[Sequence[int]],  # token ids of each
) -> Repeats:
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
