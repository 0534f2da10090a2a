"""google-tunix: Qwen 3, compared with its own cache."""

import jax.numpy as jnp
from support.models.adapted_models import (
    assert_serves,
    assert_short,
    continue_by,
)
from support.models.tunix_models import make_model
from under import tunix as adapter

CONTEXT = 32


def test_generation_equals_the_librarys():
    module = make_model("qwen3", seed=5)

    def step(cache, tokens, start):
        if cache is None:
            cache = module.init_cache(1, CONTEXT, jnp.float32)
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        mask = jnp.arange(CONTEXT)[None, None] <= positions[..., None]
        logits, cache = module(jnp.asarray(tokens), positions, cache, mask)
        return cache, logits[0, -1]

    assert_serves(*adapter.paged(module), continue_by(step))
    assert_short("tunix")
