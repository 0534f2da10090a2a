"""Short causal convolution per channel, with the previous inputs as the state.

A token's output is a weighted sum of its own input and the `K - 1` previous ones.
Symbols: `K` kernel size, `C` tokens of a chunk, `...` axes of channels.
"""

import jax
import jax.numpy as jnp


def convolve_token(
    past: jax.Array, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolve one token.

    Args:
        past: [K - 1, ...], previous inputs, oldest first.
        x: [...], the token's input.
        weight: [..., K]; the last entry multiplies the token itself.

    Returns:
        The previous inputs of the next token, and the sum, f32[...].
    """
    window = jnp.concatenate([past, x[None].astype(past.dtype)])
    wide, taps = window.astype(jnp.float32), jnp.moveaxis(weight, -1, 0)
    return window[1:], (wide * taps.astype(jnp.float32)).sum(0)


def convolve_piece(
    past: jax.Array, x: jax.Array, weight: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolve the first tokens of a chunk.

    Args:
        past: [K - 1, ...], previous inputs, oldest first.
        x: [C, ...], zeros from `count` on.
        weight: [..., K].
        count: i32[], number of valid tokens.

    Returns:
        The previous inputs of the token after them, and the sums, f32[C, ...].
    """
    width, size = weight.shape[-1], x.shape[0]
    window = jnp.concatenate([past, x.astype(past.dtype)])
    wide, taps = window.astype(jnp.float32), weight.astype(jnp.float32)
    sums = sum(wide[i : i + size] * taps[None, ..., i] for i in range(width))
    past = jax.lax.dynamic_slice_in_dim(window, count, width - 1, axis=0)
    return past, sums
