"""Logits of which some tokens are taken away.

Symbols: K rows, V tokens in the vocabulary, E tokens that are named.
"""

import jax
import jax.numpy as jnp


def find_columns(
    tokens: jax.Array,  # i32[K, E], -1 for none
    logits: jax.Array,  # f32[K, V]
) -> tuple[jax.Array, jax.Array]:
    """Return where the logits of tokens stand; those of -1 are out of range.

    Rows are i32[K, 1] and columns i32[K, E], for `logits.at` with mode="drop".
    """
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return row, jnp.where(tokens < 0, logits.shape[1], tokens)


def forbid(
    logits: jax.Array,  # f32[K, V]
    tokens: jax.Array,  # i32[K, E], -1 for none
) -> jax.Array:
    """Return logits, f32[K, V], with -inf at some tokens of each row.

    A mask is written, not the logits: those of the model are needed once more, and a
    copy of them has four times its bytes.
    """
    mask = jnp.zeros(logits.shape, bool)
    mask = mask.at[find_columns(tokens, logits)].set(True, mode="drop")
    return jnp.where(mask, -jnp.inf, logits)
