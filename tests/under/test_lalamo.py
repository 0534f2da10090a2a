"""lalamo: a layer with a window and one without, compared with its static state."""

import jax
import jax.numpy as jnp
from lalamo.initializer import RandomInitializer
from lalamo.module import Keychain
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
from support.models.lalamo_models import OPTIONS, make_config
from under import lalamo as adapter

CONTEXT = 32
SIZES = dict(heads=HEADS, kv_heads=KV_HEADS, dim=DIM, width=WIDTH, inner=48)


def test_generation_equals_the_librarys():
    sharding = ShardingConfig.replicated()
    config = make_config((WINDOW, None), **SIZES, vocabulary=VOCABULARY, context=64)
    key = jax.random.key(0)
    fresh = RandomInitializer(jnp.float32, sharding, key=key)
    decoder = shake(config.init(fresh), 0.3)
    keychain = Keychain.init(0, sharding_config=sharding)

    def step(state, tokens, start):
        if state is None:
            state = decoder.init_static_state(1, CONTEXT, jnp.float32)
        found = decoder(
            jnp.asarray(tokens),
            start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None],
            state=state,
            return_updated_state=True,
            forward_pass_config=OPTIONS,
            keychain=keychain,
        )
        return found.updated_state, found.logits[0, -1]

    paged = adapter.paged(decoder, forward_pass_config=OPTIONS)
    assert_serves(*paged, continue_by(step))
    assert_short("lalamo")
