"""lalamo: a layer with a window and one without, compared with its static state."""

import jax
import jax.numpy as jnp
from lalamo.initializer import RandomInitializer
from lalamo.module import Keychain
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
from lalamo.utils.sharding import ShardingConfig
from support.models.adapted_models import (
    DIM,
    HEADS,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    WINDOW,
    assert_serves,
    assert_short,
    continue_by,
    shake,
)
from under import lalamo as adapter

CONTEXT = 32
NORM = NormalizationConfig(1e-6, None, UpcastMode.FULL_LAYER, False)


def layer(window):
    attention = AttentionConfig(
        LinearConfig(),
        LinearConfig(),
        NORM,
        NORM,
        num_heads=HEADS,
        num_groups=KV_HEADS,
        head_dim=DIM,
        is_causal=True,
        scale=None,
        sliding_window_size=window,
        logit_soft_cap=None,
        has_sinks=False,
        has_qkvg_biases=False,
        has_out_biases=False,
    )
    rope = UnscaledRoPEConfig(base=1e4, max_sequence_length=64, head_dim=DIM)
    return TransformerLayerConfig(
        pre_mixer_norm_config=NORM,
        mixer_config=attention,
        post_mixer_norm_config=None,
        pre_mlp_norm_config=NORM,
        mlp_config=DenseMLPConfig(LinearConfig(), SiLU(), False, False, None, None),
        post_mlp_norm_config=None,
        rope_config=rope,
    )


def test_generation_equals_the_librarys():
    sharding = ShardingConfig.replicated()
    transformer = TransformerConfig((layer(WINDOW), layer(None)), NORM, WIDTH, 48)
    config = DecoderConfig(TiedEmbeddingConfig(None, None), transformer, VOCABULARY)
    key = jax.random.key(0)
    fresh = RandomInitializer(jnp.float32, sharding, key=key)
    decoder = shake(config.init(fresh), 0.3)
    embedding = EmbeddingForwardPassConfig(activation_dtype=jnp.float32)
    options = DecoderForwardPassConfig(embedding_forward_pass_config=embedding)
    keychain = Keychain.init(0, sharding_config=sharding)

    def step(state, tokens, start):
        if state is None:
            state = decoder.init_static_state(1, CONTEXT, jnp.float32)
        found = decoder(
            jnp.asarray(tokens),
            start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None],
            state=state,
            return_updated_state=True,
            forward_pass_config=options,
            keychain=keychain,
        )
        return found.updated_state, found.logits[0, -1]

    paged = adapter.paged(decoder, forward_pass_config=options)
    assert_serves(*paged, continue_by(step))
    assert_short("lalamo")
