"""Paged cache for KerasHub's causal language models (0.32).

Attention layers of Llama, Mistral, Qwen, Qwen 3, Gemma and Gemma 3 call the paged
attention of a serving context if one is set, so no layer is replaced.
"""

import jax
import keras
from keras_hub.src.vllm.context import vllm_context_scope

import jkv


def paged(causal_lm: keras.Model) -> tuple[jkv.Model, list[jax.Array]]:
    """Wrap a `CausalLM` as a `jkv.Model`; return its weights too."""
    variables, backbone = causal_lm.variables, causal_lm.backbone

    def forward(params, tokens, positions, step: jkv.Step) -> jax.Array:
        def attend(_, queries, keys, values, scale, head_dim, *_heads, **options):
            rows = (
                each.reshape(len(each), -1, head_dim)
                for each in (queries, keys, values)
            )
            window = options["sliding_window"]
            heads = step.attend(
                *rows, scale=scale, window=window, soft_cap=options["soft_cap"]
            )
            return None, heads.reshape(queries.shape)

        inputs = {"token_ids": tokens, "padding_mask": jax.numpy.ones_like(tokens)}
        values = zip(variables, params, strict=True)
        with keras.StatelessScope(values), vllm_context_scope(attend, positions):
            hidden = step.last(backbone(inputs))
            return backbone.token_embedding(hidden, reverse=True)

    return jkv.model_of(forward, rows="batch"), [each.value for each in variables]
