"""Draft vocabularies, subsets of the target's vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp


def spread_logits(
    params: dict[str, Any], logits: jax.Array, vocab_size: int
) -> jax.Array:
    """Return logits over the target's vocabulary, f32[R, V], -inf for undrafted tokens.

    Args:
        params: with "draft_tokens", i32[D], if there is a draft vocabulary.
        logits: f32[R, D]; f32[R, V] without a draft vocabulary.
        vocab_size: V.
    """
    if "draft_tokens" not in params:
        return logits
    every = jnp.full((logits.shape[0], vocab_size), -jnp.inf, jnp.float32)
    return every.at[:, params["draft_tokens"]].set(logits)
