"""Best of n: one of several samples of each prompt, by likelihood or by vote.

Symbols: Q prompts of S samples, N = Q * S sequences, A numbers of an answer.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jkv.arguments import expect, explains_arguments
from jkv.decoding.texts.results import Generation


@explains_arguments
def select_best(
    result: Generation,
    num_samples: int,
    *,
    by: Literal["mean_logprob", "majority"] = "mean_logprob",
    answers: jax.Array | None = None,  # i32[N] or i32[N, A]
) -> jax.Array:
    """Choose one sample of each prompt.

    By "mean_logprob" the one whose tokens are the most likely on average, which does
    not prefer short ones as their sum would. By "majority" the answer that most samples
    have, which is self-consistency (Wang et al., arXiv 2203.11171); among samples that
    have it, and among answers with as many, the mean log-probability decides, then the
    order. Samples without a token, or without a number for a likelihood, come last.

    Args:
      result: what `generate` returned with these samples.
      num_samples: samples of each prompt, S; static.
      by: "mean_logprob" or "majority"; static.
      answers: what a majority agrees on: a number for each sequence, or the tokens of
        its answer. None is all of its new tokens. A sequence whose first number is
        negative has no answer and no vote.

    Returns:
      i32[Q], the sequence chosen for each prompt, a row of `result`.

    Raises:
      ValueError: for numbers of samples or answers that do not fit the result.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> from jkv.decoding import FinishReason, select_best
      >>> result = jkv.Generation.empty(jnp.full(4, FinishReason.STOP), 3)._replace(
      ...     lengths=jnp.array([1, 2, 2, 3]),
      ...     logprobs=jnp.array([[-4., 0, 0], [-3, -3, 0], [-1, -2, 0], [-3, -3, -3]]))
      >>> select_best(result, 4).tolist()
      [2]
      >>> answers = jnp.array([7, 8, 9, 8])
      >>> select_best(result, 4, by="majority", answers=answers).tolist()
      [1]
    """
    num_sequences = result.lengths.shape[0]
    if num_samples < 1 or num_sequences % num_samples:
        raise ValueError(
            f"a result of {num_sequences} sequences cannot have {num_samples} samples "
            f"of each prompt; give the num_samples that generate was given"
        )
    if by not in ("mean_logprob", "majority"):
        raise ValueError(f'by must be "mean_logprob" or "majority", got {by!r}')
    lengths = result.lengths.astype(jnp.float32)
    means = jnp.sum(result.logprobs, axis=1) / jnp.maximum(lengths, 1.0)
    is_good = (result.lengths > 0) & ~jnp.isnan(means)
    means = jnp.where(is_good, means, -jnp.inf).reshape(-1, num_samples)
    if by == "majority":
        votes = _count_votes(result, num_samples, answers)
        is_most = votes == jnp.max(votes, axis=1, keepdims=True)
        means = jnp.where(is_most, means, -jnp.inf)
        # Where no likelihood is a number, the votes alone decide.
        best = jnp.argmax(is_most & (means == means.max(axis=1, keepdims=True)), axis=1)
    else:
        best = jnp.argmax(means, axis=1)
    first = jnp.arange(num_sequences // num_samples, dtype=jnp.int32) * num_samples
    return first + best.astype(jnp.int32)


def _count_votes(
    result: Generation, num_samples: int, answers: jax.Array | None
) -> jax.Array:
    """Return how many samples of its prompt have each one's answer, i32[Q, S]."""
    given = jnp.asarray(result.tokens if answers is None else answers)
    expect("answers", given, "N | N A", {"N": result.lengths.shape[0]}, jnp.integer)
    given = given.reshape(-1, num_samples, given.size // given.shape[0])
    is_same = jnp.all(given[:, :, None] == given[:, None, :], axis=3)
    has_answer = given[:, :, 0] >= 0
    votes = jnp.sum(is_same & has_answer[:, None], axis=2, dtype=jnp.int32)
    return jnp.where(has_answer, votes, 0)
