"""Logits of which some tokens are taken away.

Symbols: K rows, V tokens in the vocabulary, E tokens that are named.
"""

import jax
import jax.numpy as jnp


def find_columns(tokens: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return where the logits of tokens stand; those of -1 are out of range.

    Args:
      tokens: i32[K, E], -1 for none.
      logits: f32[K, V].

    Returns:
      Rows i32[K, 1] and columns i32[K, E], for `logits.at` with mode="drop".
    """
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return row, jnp.where(tokens < 0, logits.shape[1], tokens)


def forbid(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return logits, f32[K, V], with -inf at some tokens of each row.

    Args:
      logits: f32[K, V].
      tokens: i32[K, E], -1 for none.
    """
    columns = find_columns(tokens, logits)
    return jnp.asarray(logits).at[columns].set(-jnp.inf, mode="drop")
