"""Padding, deduplication and scoring of prompts.

tunix pads prompts on the left, jkv on the right.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate import utils as generate_utils

import jkv
from jkv.decoding.model.steps import ExactShape
from jkv.integrations.tunix.paged_model import PagedModel, Params

Tokens = Sequence[list[int]]


def check_sequences(sequences: Tokens) -> None:
    if not sequences:
        raise ValueError("prompts is empty; pass at least one prompt")
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise ValueError(f"prompts[{i}] has no tokens; pass at least one token")


def find_width(sequences: Tokens, usual_width: int) -> int:
    """Return the width of the padded prompts, as tunix's sampler computes it."""
    longest = max(len(sequence) for sequence in sequences)
    if longest <= usual_width:
        return usual_width
    return int(generate_utils.next_power_of_2(longest))


def pad_left(sequences: Tokens, width: int, pad_id: int) -> np.ndarray:
    """Return i32[B, width], padded on the left."""
    rows = [[pad_id] * (width - len(sequence)) + sequence for sequence in sequences]
    return np.array(rows, np.int32)


def pad_right(sequences: Tokens, width: int) -> np.ndarray:
    """Return i32[B, width], padded with -1 on the right."""
    return np.array(
        [sequence + [-1] * (width - len(sequence)) for sequence in sequences], np.int32
    )


class Repeats(NamedTuple):
    """B prompts as P distinct ones with an equal number of samples each."""

    first: list[int]  # index into the B prompts of each of the P
    num_samples: int  # B / P
    # i64[B], index into the B prompts of each sample, grouped by prompt
    prompts: np.ndarray


def find_repeats(prompts: Sequence[Sequence[int]]) -> Repeats:
    """Group equal prompts, at any positions.

    A trainer repeats all prompts equally often. If a batch repeats one more often by
    chance, or a micro-batch splits its samples, the number of samples is the greatest
    common divisor of all counts.

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


class Scorer(NamedTuple):
    """The static part of scoring calls."""

    config: jkv.CacheConfig  # of the model; `jkv.score` sets the number of blocks
    pad_id: int
    exact: ExactShape

    def score(
        self,
        model: PagedModel,
        params: Params,
        prompt_tokens: jax.Array,  # i32[B, P], padded on the left
        completion_tokens: jax.Array,  # i32[B, C], padded on the right
        num_samples: int,  # adjacent completions of each prompt
        ends: bool = False,  # also score the first padding token
    ) -> jax.Array:
        """Return log-probabilities of completions, f32[B, C], 0 after each end.

        Padding is detected by position: a prompt starts with its first other token, a
        completion ends with its last. Differentiable with respect to the weights.
        """
        prompts = prompt_tokens[::num_samples]
        is_token = jnp.cumsum(prompts != self.pad_id, axis=1) > 0
        order = jnp.argsort(~is_token, axis=1, stable=True)
        prompts = jnp.take_along_axis(jnp.where(is_token, prompts, -1), order, axis=1)
        column = jnp.arange(1, completion_tokens.shape[1] + 1)
        last = jnp.max(jnp.where(completion_tokens != self.pad_id, column, 0), axis=1)
        is_inside = column <= last[:, None] + ends
        completions = jnp.where(is_inside, completion_tokens, -1)
        # Division by a compile-time constant would round differently.
        temperature = jax.lax.optimization_barrier(jnp.float32(params.temperature))
        params = params._replace(temperature=temperature)
        return jkv.score(
            model, params, prompts, completions, config=self.config, exact=self.exact
        )

    def score_all(
        self,
        model: PagedModel,
        params: Params,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
    ) -> jax.Array:
        """Return `score` for prompts on the host, with equal ones deduplicated.

        The first padding token is scored too, since it may be the end token of the
        completion.
        """
        given = np.asarray(prompt_tokens, np.int32)
        starts = (np.cumsum(given != self.pad_id, axis=1) == 0).sum(axis=1)
        sequences = [
            row[start:].tolist() for row, start in zip(given, starts, strict=True)
        ]
        check_sequences(sequences)
        repeats = find_repeats(sequences)
        completions = np.asarray(completion_tokens, np.int32)[repeats.prompts]
        given, num_samples = given[repeats.prompts], repeats.num_samples
        scores = _score(self, model, params, given, completions, num_samples, True)
        return jnp.zeros_like(scores).at[repeats.prompts].set(scores)


_score = jax.jit(Scorer.score, static_argnums=(0, 1, 5, 6))
