"""Prompt look-up: what followed the newest tokens earlier in the text.

Symbols: W texts, L most tokens of one, K guesses.
"""

import jax
import jax.numpy as jnp

from jkv.decoding.speculation.options import PromptLookup


def find_guesses(
    # i32[W, L], prompts and what was generated; -1 past each one's end
    texts: jax.Array,
    lengths: jax.Array,  # i32[W]
    options: PromptLookup,
) -> tuple[jax.Array, jax.Array]:
    """Guess how texts go on.

    Returns:
      i32[W, K], the guesses, and i32[W], how many there are of each.
    """
    width = texts.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)[None]
    last = lengths[:, None] - 1
    agrees = jnp.ones(texts.shape, bool)
    matched = jnp.zeros(texts.shape, jnp.int32)
    for back in range(options.max_ngram):
        # Tokens before a column, compared with those before the last one.
        moved = jnp.pad(texts, ((0, 0), (back, 0)), constant_values=-1)[:, :width]
        newest = jnp.take_along_axis(texts, jnp.maximum(last - back, 0), axis=1)
        agrees &= (moved == newest) & (moved >= 0)
        matched += agrees.astype(jnp.int32)
    # The longest match counts, and of those the latest.
    is_match = (matched >= options.min_ngram) & (column < last)
    best = jnp.max(jnp.where(is_match, matched * width + column, -1), axis=1)
    found = best >= 0
    start = jnp.where(found, best % width + 1, 0)
    # Past the end of the text its guesses follow: what repeats goes on repeating.
    period = jnp.maximum(lengths - start, 1)[:, None]
    ahead = jnp.arange(options.num_tokens, dtype=jnp.int32)[None]
    guesses = jnp.take_along_axis(texts, start[:, None] + ahead % period, axis=1)
    return jnp.maximum(guesses, 0), jnp.where(found, options.num_tokens, 0)
