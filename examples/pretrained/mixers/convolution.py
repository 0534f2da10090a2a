"""A short causal convolution of each channel: the start of a layer with a state.

A token's output is a weighted sum of its own input and of the `K - 1` before it, which
are the state. Symbols: `C` tokens of a piece, `...` axes of channels.
"""

import jax
import jax.numpy as jnp


def convolve_token(
    past: jax.Array, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read one token.

    Args:
        past: [K - 1, ...], the inputs before it, oldest first.
        x: [...], its input.
        weight: [..., K], the last for the token itself.

    Returns:
        The inputs before the next token, and the sum [...], in float32.
    """
    window = jnp.concatenate([past, x[None].astype(past.dtype)])
    wide, taps = window.astype(jnp.float32), jnp.moveaxis(weight, -1, 0)
    return window[1:], (wide * taps.astype(jnp.float32)).sum(0)


def convolve_piece(
    past: jax.Array, x: jax.Array, weight: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read the first tokens of a piece.

    Args:
        past: [K - 1, ...].
        x: [C, ...], zeros past the count.
        weight: [..., K].
        count: i32[], tokens that count.

    Returns:
        The inputs before the next token, and the sums [C, ...], in float32.
    """
    width, size = weight.shape[-1], x.shape[0]
    window = jnp.concatenate([past, x.astype(past.dtype)])
    wide, taps = window.astype(jnp.float32), weight.astype(jnp.float32)
    sums = sum(wide[i : i + size] * taps[None, ..., i] for i in range(width))
    past = jax.lax.dynamic_slice_in_dim(window, count, width - 1, axis=0)
    return past, sums
