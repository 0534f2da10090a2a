"""Paged cache for EasyDeL's causal language models (0.3).

Attention layers pass rotated queries, keys and values to modules of one class, so its
method is replaced. The model needs the mesh of its configuration.
"""

from typing import Any
from unittest import mock

import jax
from easydel.layers.attention import FlexibleAttentionModule
from easydel.operations import AttentionOutput
from flax import nnx

import jkv


def paged(causal_lm: nnx.Module) -> tuple[jkv.Model, nnx.State[Any, Any]]:
    """Wrap a `...ForCausalLM` as a `jkv.Model`; return its weights too."""
    graph, params, others = nnx.split(causal_lm, nnx.Param, ...)

    def forward(params, tokens, positions, step: jkv.Step) -> jax.Array:
        def attend(
            layer: Any,
            query_states: jax.Array,
            key_states: jax.Array,
            value_states: jax.Array,
            **options: Any,
        ) -> AttentionOutput:
            heads = step.attend(
                query_states,
                key_states,
                value_states,
                scale=layer.softmax_scale,
                window=options.get("sliding_window"),
                soft_cap=options.get("logits_soft_cap"),
                sinks=options.get("softmax_aux"),
            )
            return AttentionOutput(attention_outputs=heads)

        replaced = mock.patch.object(FlexibleAttentionModule, "forward", attend)
        with causal_lm.config.mesh, step.traced(), replaced:
            model = nnx.merge(graph, params, others)
            return model(input_ids=tokens, position_ids=positions).logits

    return jkv.model_of(forward), params
