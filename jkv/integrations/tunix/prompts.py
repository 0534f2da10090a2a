"""Prompts: padded on the left for tunix, on the right for jkv; equal ones, found.

And log-probabilities of what continues them, each prompt computed once for all.
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


class Scorer(NamedTuple):
    """What is the same in all calls that score completions; static under jit."""

    config: jkv.CacheConfig  # of the model; `jkv.score` counts blocks itself
    pad_id: int
    exact: ExactShape

    def score(
        self,
        model: PagedModel,
        params: Params,
        prompt_tokens: jax.Array,  # i32[B, P], padded on the left
        completion_tokens: jax.Array,  # i32[B, C], padded on the right
        num_samples: int,  # completions of each prompt, which follow each other
        ends: bool = False,  # whether the first padding of each is scored, too
    ) -> jax.Array:
        """Return log-probabilities of completions, f32[B, C], 0 behind each one's end.

        Padding is told by its place: a prompt begins with its first other token, a
        completion ends with its last. Differentiable by the weights.
        """
        prompts = prompt_tokens[::num_samples]
        is_token = jnp.cumsum(prompts != self.pad_id, axis=1) > 0
        order = jnp.argsort(~is_token, axis=1, stable=True)
        prompts = jnp.take_along_axis(jnp.where(is_token, prompts, -1), order, axis=1)
        column = jnp.arange(1, completion_tokens.shape[1] + 1)
        last = jnp.max(jnp.where(completion_tokens != self.pad_id, column, 0), axis=1)
        is_inside = column <= last[:, None] + ends
        completions = jnp.where(is_inside, completion_tokens, -1)
        # A division by a number that the compiler knows would round in another way.
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
        """Return the same on the host, where equal prompts are found.

        The first padding is scored, too: where texts are padded with the token that
        ends them, it is that one.
        """
        given = np.asarray(prompt_tokens, np.int32)
        starts = (np.cumsum(given != self.pad_id, axis=1) == 0).sum(axis=1)
        texts = [row[start:].tolist() for row, start in zip(given, starts, strict=True)]
        check_texts(texts)
        repeats = find_repeats(texts)
        completions = np.asarray(completion_tokens, np.int32)[repeats.prompts]
        given, num_samples = given[repeats.prompts], repeats.num_samples
        scores = _score(self, model, params, given, completions, num_samples, True)
        return jnp.zeros_like(scores).at[repeats.prompts].set(scores)


_score = jax.jit(Scorer.score, static_argnums=(0, 1, 5, 6))
