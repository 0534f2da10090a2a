"""Best of n: select a sample of each prompt by likelihood or majority vote.

Symbols: Q prompts of S samples, N = Q * S sequences, A numbers of an answer.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jkv.arguments import expect, explains_arguments
from jkv.decoding.sequences.results import Generation


@explains_arguments
def select_best(
    result: Generation,
    num_samples: int,
    *,
    by: Literal["mean_logprob", "majority"] = "mean_logprob",
    answers: jax.Array | None = None,  # i32[N] or i32[N, A]
) -> jax.Array:
    """Select one sample of each prompt.

    "mean_logprob" selects the highest mean log-probability per token, which unlike the
    sum does not prefer short samples. "majority" selects the most frequent answer:
    self-consistency (Wang et al., arXiv 2203.11171). Ties, between answers and among
    the samples of one, go to the highest mean log-probability, then to the first.
    Samples without a token, or with a NaN likelihood, come last.

    Args:
      result: returned by `generate` with these samples.
      num_samples: samples of each prompt, S; static.
      by: "mean_logprob" or "majority"; static.
      answers: a number for each sequence, or the tokens of its answer, for "majority".
        None is all new tokens. A sequence with a negative first number has no vote.

    Returns:
      i32[Q], the selected sequence of each prompt, a row of `result`.

    Raises:
      ValueError: for `num_samples` or `answers` that do not match the result.

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
            f"num_samples must divide the {num_sequences} sequences of the result, got "
            f"{num_samples}; pass the num_samples of generate"
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
        # If every likelihood is NaN, the votes alone decide.
        best = jnp.argmax(is_most & (means == means.max(axis=1, keepdims=True)), axis=1)
    else:
        best = jnp.argmax(means, axis=1)
    first = jnp.arange(num_sequences // num_samples, dtype=jnp.int32) * num_samples
    return first + best.astype(jnp.int32)


def _count_votes(
    result: Generation, num_samples: int, answers: jax.Array | None
) -> jax.Array:
    """Return the samples of the same prompt with the same answer, i32[Q, S]."""
    given = jnp.asarray(result.tokens if answers is None else answers)
    expect("answers", given, "N | N A", {"N": result.lengths.shape[0]}, jnp.integer)
    given = given.reshape(-1, num_samples, given.size // given.shape[0])
    is_same = jnp.all(given[:, :, None] == given[:, None, :], axis=3)
    has_answer = given[:, :, 0] >= 0
    votes = jnp.sum(is_same & has_answer[:, None], axis=2, dtype=jnp.int32)
    return jnp.where(has_answer, votes, 0)
