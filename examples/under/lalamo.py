"""Paged cache for lalamo's decoders (0.17).

The modules are Equinox's. Layers are vmapped over a batch of one sequence and jitted
inside the model, hence `step.traced()`.
"""

from unittest import mock

import equinox as eqx
import jax
from lalamo.module import Keychain
from lalamo.modules.decoder import Decoder
from lalamo.modules.token_mixers import attention

import jkv


def paged(decoder: Decoder, **options: object) -> tuple[jkv.Model, Decoder]:
    """Wrap a decoder, called with `options`, as a `jkv.Model`; return its arrays."""
    arrays, static = eqx.partition(decoder, eqx.is_array)
    windows = [
        layer.mixer.config.sliding_window_size for layer in decoder.transformer.layers
    ]
    keychain = Keychain.init(0, sharding_config=decoder.sharding_config)

    def forward(params, tokens, positions, step: jkv.Step) -> jax.Array:
        window = iter(windows)

        def attend(queries, keys, values, *, scale, logit_soft_cap, **_) -> jax.Array:
            of_layer = dict(scale=scale, window=next(window), soft_cap=logit_soft_cap)
            return step.attend(queries, keys, values, **of_layer)

        with step.traced(), mock.patch.object(attention, "_attention_kernel", attend):
            model = eqx.combine(params, static)
            return model(tokens, positions, keychain=keychain, **options).logits

    return jkv.model_of(forward), arrays
