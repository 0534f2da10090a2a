"""Per-layer embeddings of Gemma 4's small models.

Each token has an embedding per layer. These tables are much larger than the other
weights, but a step reads only a few rows. A projection of the usual embedding is added
(https://ai.google.dev/gemma/docs/gemma-3n: per-layer embeddings).
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
    """Return the input of each layer and row, [L, R, P].

    Args:
        config: the model's configuration.
        params: parameters of the model, outside its layers.
        tokens: i32[R].
        valid: bool[R].
        hidden: [R, E], inputs of the first layer.
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
    """Return the term that a layer adds to its rows [R, E] for its input, [R, P]."""
    gated = bend(config, linear(hidden, weights, "layer_input_gate")) * layer_inputs
    return norm(
        config,
        linear(gated, weights, "layer_input_output"),
        weights,
        "layer_input_norm",
    )
