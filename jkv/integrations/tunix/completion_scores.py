"""Log-probabilities of completions, whose prompt is computed once for all of them.

On the host, where equal prompts are found, and inside the jit of a trainer's loss.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv
from jkv.decoding.model.exact import ExactShape
from jkv.integrations.tunix.paged_model import PagedModel, Params
from jkv.integrations.tunix.prompts import check_texts, find_repeats, pad_right

_score = jax.jit(jkv.score, static_argnames=("model", "config", "exact"))


class Scorer(NamedTuple):
    """What is the same in all calls."""

    config: jkv.CacheConfig  # of the model; `jkv.score` counts blocks itself
    pad_id: int
    exact: ExactShape

    def score(
        self,
        model: PagedModel,
        weights: nnx.State[Any, Any],  # the state of the model
        prompt_tokens: jax.Array,  # i32[B, P], padded on the left
        completion_tokens: jax.Array,  # i32[B, C], padded on the right
    ) -> jax.Array:
        """Return the log-probabilities of completions, f32[B, C], 0 past their ends.

        Padding is told by its place: a prompt begins with its first other token, and of
        a completion's padding at the end the first is scored too: where texts are
        padded with the token that ends them, it is that one.
        """
        given = np.asarray(prompt_tokens, np.int32)
        starts = (np.cumsum(given != self.pad_id, axis=1) == 0).sum(axis=1)
        texts = [row[start:].tolist() for row, start in zip(given, starts, strict=True)]
        check_texts(texts)
        repeats = find_repeats(texts)
        prompts = pad_right([texts[prompt] for prompt in repeats.first], given.shape[1])
        completions = np.asarray(completion_tokens, np.int32)[repeats.prompts]
        ends = find_ends(completions, self.pad_id)
        is_past = np.arange(completions.shape[1]) > ends[:, None]
        completions = np.where(is_past, np.int32(-1), completions)
        params = Params(weights, 1.0)
        options = dict(config=self.config, exact=self.exact)
        scores = _score(model, params, prompts, completions, **options)
        return jnp.zeros_like(scores).at[repeats.prompts].set(scores)

    def score_traced(
        self,
        model: PagedModel,
        params: Params,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        num_samples: int,
    ) -> jax.Array:
        """Return what `score` does, with its derivative by the weights.

        What is traced has no values to find equal prompts by: `num_samples` completions
        that follow each other have one prompt. The padding at a completion's end is not
        scored at all, as a loss masks it.
        """
        prompts = prompt_tokens[::num_samples]
        is_token = jnp.cumsum(prompts != self.pad_id, axis=1) > 0
        order = jnp.argsort(~is_token, axis=1, stable=True)
        prompts = jnp.take_along_axis(jnp.where(is_token, prompts, -1), order, axis=1)
        is_token = completion_tokens != self.pad_id
        is_inside = jnp.cumsum(is_token[:, ::-1], axis=1)[:, ::-1] > 0
        completions = jnp.where(is_inside, completion_tokens, -1)
        # A division by a number that the compiler knows would round in another way.
        weights, temperature = params
        temperature = jax.lax.optimization_barrier(jnp.float32(temperature))
        params = Params(weights, temperature)
        return jkv.score(
            model, params, prompts, completions, config=self.config, exact=self.exact
        )


def find_ends(completions: np.ndarray, pad_id: int) -> np.ndarray:
    """Return where the padding of each completion begins, i64[B], C without any."""
    is_token = completions != pad_id
    behind = np.argmax(is_token[:, ::-1], axis=1)  # the padding of texts that have any
    return np.where(is_token.any(axis=1), completions.shape[1] - behind, 0)
