"""Paged cache for google-tunix's models (0.1).

This is the model alone, for `generate`, `score` and `Engine`; trainers use
`jkv.integrations.tunix.JkvRollout`.
"""

from typing import Any

import jax
from flax import nnx
from tunix.models.qwen3 import model as qwen3

import jkv


def paged(module: qwen3.Qwen3) -> tuple[jkv.Model, nnx.State[Any, Any]]:
    """Wrap Tunix's Qwen 3 as a `jkv.Model`; also return its weights."""
    graph, params = nnx.split(module)

    def forward(params, tokens, positions, step: jkv.Step) -> jax.Array:
        def replace(layer: Any) -> Any:
            def attend(
                hidden: jax.Array, positions: jax.Array, *_: Any, **__: Any
            ) -> Any:
                queries, keys = (
                    qwen3.apply_rope(each, positions, head_dim=layer.head_dim)
                    for each in (
                        layer.q_norm(layer.q_proj(hidden)),
                        layer.k_norm(layer.k_proj(hidden)),
                    )
                )
                values = layer.v_proj(hidden)
                return None, layer.o_proj(
                    step.attend(queries, keys, values, scale=layer.scale)
                )

            return attend

        model = nnx.merge(graph, params)
        for layer in model.layers:
            layer.attn = replace(layer.attn)
        return model(tokens, positions, None, None)[0]

    return jkv.model_of(forward), params
