"""Per-layer inputs of Gemma 4's small models.

A token has an embedding for each layer. Together these are much larger than the weights
that the layers compute with, and a step reads a few rows of them. A part of the token's
usual embedding is added (https://ai.google.dev/gemma/docs/gemma-3n: per-layer
embeddings).
"""

import jax
import jax.numpy as jnp

from .config import DecoderConfig
from .layers import Weights, bend, embed, linear, norm


def embed_layer_inputs(
    config: DecoderConfig,
    params: Weights,
    tokens: jax.Array,
    valid: jax.Array,
    hidden: jax.Array,
) -> jax.Array:
    """Return each layer's input about each row, [L, R, P].

    Args:
        config: the model's settings.
        params: of the model, outside its layers.
        tokens: i32[R].
        valid: bool[R].
        hidden: [R, E], embeddings as the first layer takes them.
    """
    shape = (tokens.shape[0], config.num_layers, config.layer_inputs.dim)
    own = embed(params["layer_embedding"], tokens, valid).reshape(shape)
    shared = linear(hidden, params, "layer_projection").reshape(shape)
    shared = norm(
        config, shared * config.hidden_size**-0.5, params, "layer_projection_norm"
    )
    layer_inputs = (shared + own * config.layer_inputs.dim**0.5) * 2**-0.5
    return jnp.swapaxes(layer_inputs, 0, 1)


def apply_layer_input(
    config: DecoderConfig, weights: Weights, hidden: jax.Array, layer_inputs: jax.Array
) -> jax.Array:
    """Return a layer's addition to its rows [R, E] for its input, [R, P]."""
    gated = bend(config, linear(hidden, weights, "layer_input_gate")) * layer_inputs
    return norm(
        config,
        linear(gated, weights, "layer_input_output"),
        weights,
        "layer_input_norm",
    )
