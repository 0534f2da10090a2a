"""Configurations of lalamo's decoders, for its adapter's test and benchmark."""

import jax.numpy as jnp
from lalamo.modules.activations import SiLU
from lalamo.modules.decoder import DecoderConfig, DecoderForwardPassConfig
from lalamo.modules.embedding import EmbeddingForwardPassConfig, TiedEmbeddingConfig
from lalamo.modules.linear import LinearConfig
from lalamo.modules.mlp import DenseMLPConfig
from lalamo.modules.normalization import NormalizationConfig, UpcastMode
from lalamo.modules.rope import UnscaledRoPEConfig
from lalamo.modules.token_mixers.attention import AttentionConfig
from lalamo.modules.transformer import TransformerConfig
from lalamo.modules.transformer_layer import TransformerLayerConfig

NORM = NormalizationConfig(1e-6, None, UpcastMode.FULL_LAYER, False)
FLOAT32 = EmbeddingForwardPassConfig(activation_dtype=jnp.float32)
OPTIONS = DecoderForwardPassConfig(embedding_forward_pass_config=FLOAT32)


def make_config(
    windows, *, vocabulary, width, inner, heads, kv_heads, dim, context
) -> DecoderConfig:
    """Return a decoder with norms of queries and keys, and a layer for each window."""
    rope = UnscaledRoPEConfig(base=1e4, max_sequence_length=context, head_dim=dim)
    attentions = (
        AttentionConfig(
            LinearConfig(),
            LinearConfig(),
            NORM,
            NORM,
            num_heads=heads,
            num_groups=kv_heads,
            head_dim=dim,
            is_causal=True,
            scale=None,
            sliding_window_size=window,
            logit_soft_cap=None,
            has_sinks=False,
            has_qkvg_biases=False,
            has_out_biases=False,
        )
        for window in windows
    )
    layers = tuple(
        TransformerLayerConfig(
            pre_mixer_norm_config=NORM,
            mixer_config=attention,
            post_mixer_norm_config=None,
            pre_mlp_norm_config=NORM,
            mlp_config=DenseMLPConfig(LinearConfig(), SiLU(), False, False, None, None),
            post_mlp_norm_config=None,
            rope_config=rope,
        )
        for attention in attentions
    )
    transformer = TransformerConfig(layers, NORM, width, inner)
    return DecoderConfig(TiedEmbeddingConfig(None, None), transformer, vocabulary)
