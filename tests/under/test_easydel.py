"""EasyDeL: Llama, beside a whole pass for every token, and its own logits."""

import easydel
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support.models.adapted_models import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    assert_serves,
    assert_short,
    continue_by,
    shake,
)
from under import easydel as adapter

CONTEXT = 32
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    max_position_embeddings=CONTEXT,
    attn_mechanism="vanilla",
    attn_dtype=jnp.float32,
)


def test_generation_equals_the_librarys():
    config = easydel.LlamaConfig(**SIZES)
    with config.mesh:
        causal_lm = easydel.LlamaForCausalLM(
            config=config,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
    nnx.update(causal_lm, shake(nnx.state(causal_lm, nnx.Param), 0.3))

    @jax.jit
    def read(tokens):
        with config.mesh:
            return causal_lm(input_ids=tokens).logits

    def step(seen, tokens, start):
        del start
        seen = tokens if seen is None else np.concatenate([seen, tokens], axis=1)
        # Attention is causal, so whole passes of one length compile once.
        padded = np.pad(seen, ((0, 0), (0, CONTEXT - seen.shape[1])))
        return seen, read(padded)[0, seen.shape[1] - 1]

    assert_serves(*adapter.paged(causal_lm), continue_by(step))
    assert_short("easydel")
