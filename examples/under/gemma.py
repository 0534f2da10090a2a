"""Paged cache for google-deepmind/gemma's transformers (4.0).

The modules are Flax Linen's: an interceptor replaces the call of each attention module.
The transformer jits its own call, hence `step.traced()`.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
from gemma.gm.math import _positional_embeddings
from gemma.gm.nn import _modules

import jkv


def paged(transformer: nn.Module) -> jkv.Model:
    """Wrap a `gm.nn.Transformer` as a `jkv.Model`; `params` are its parameters."""

    def forward(params, tokens, positions, step: jkv.Step) -> jax.Array:
        def attend(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            layer = context.module
            if (
                not isinstance(layer, _modules.Attention)
                or context.method_name != "__call__"
            ):
                return call(*args, **kwargs)
            hidden, positions, *_ = args
            if layer.use_qkv_einsum:
                queries, keys, values = layer.qkv_einsum("BTD,SNDH->SBTNH", hidden)
            else:
                queries = layer.q_einsum("BTD,NDH->BTNH", hidden)
                keys, values = layer.kv_einsum("BSD,CKDH->CBSKH", hidden)
            if layer.use_qk_norm:
                queries, keys = layer._query_norm(queries), layer._key_norm(keys)
            rotate = functools.partial(
                _positional_embeddings.apply_rope,
                positions=positions,
                base_frequency=layer.rope_base_frequency,
                scale_factor=layer.rope_scale_factor,
            )
            is_local = layer.attn_type == _modules.AttentionType.LOCAL_SLIDING
            heads = step.attend(
                rotate(queries),
                rotate(keys),
                values,
                scale=layer.query_pre_attn_scalar,
                window=layer.sliding_window_size if is_local else None,
                soft_cap=layer.attn_logits_soft_cap,
            )
            return None, layer.attn_vec_einsum("BTNH,NHD->BTD", heads)

        with step.traced(), nn.intercept_methods(attend):
            given = dict(positions=positions)
            return transformer.apply({"params": params}, tokens, **given).logits

    return jkv.model_of(forward)
