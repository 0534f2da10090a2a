"""Draft vocabularies: logits of some of the target's tokens."""

from typing import Any

import jax
import jax.numpy as jnp


def spread_logits(
    params: dict[str, Any], logits: jax.Array, vocab_size: int
) -> jax.Array:
    """Return logits of the target's tokens, f32[R, V], -inf for the others.

    Args:
        params: with "draft_tokens", i32[D], if there is a draft vocabulary.
        logits: f32[R, D], or f32[R, V] without one.
        vocab_size: V.
    """
    if "draft_tokens" not in params:
        return logits
    every = jnp.full((logits.shape[0], vocab_size), -jnp.inf, jnp.float32)
    return every.at[:, params["draft_tokens"]].set(logits)
