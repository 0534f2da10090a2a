"""MLP routers with a state that is passed from layer to layer.

The last class is no expert: its rows get zeros.
"""

import jax
import jax.numpy as jnp

from .config import DecoderConfig
from .layers import Weights, linear, norm


def route_by_perceptron(
    config: DecoderConfig, weights: Weights, x: jax.Array, previous: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Select each row's top-k experts with an MLP.

    Args:
        config: the model's configuration.
        weights: the layer's parameters.
        x: [R, E].
        previous: [R, N], the router's state in the previous layer; None in the first.

    Returns:
        The experts, i32[R, C], with the number of experts for no expert; their
        weights, f32[R, C]; and the state, [R, N].
    """
    state = linear(x, weights, "router_down")
    if previous is not None:
        state = state + previous * weights["router_state_scale"][None, :]
    hidden = norm(config, state, weights, "router_norm")
    for name in ("router_first", "router_second"):
        hidden = jax.nn.gelu(linear(hidden, weights, name), approximate=False)
    logits = linear(hidden, weights, "router").astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1)
    ranking = scores + weights["choice_bias"].astype(jnp.float32)[None, :]
    chosen = jax.lax.top_k(ranking, config.experts.per_token)[1]
    return chosen, jnp.take_along_axis(scores, chosen, axis=-1), state
