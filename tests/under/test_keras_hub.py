"""KerasHub: Llama, and Gemma 2 with windows and caps, compared with its `generate`."""

import keras
import keras_hub
import numpy as np
import pytest
from support.models.adapted_models import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    NEW_TOKENS,
    PROMPTS,
    VOCABULARY,
    WIDTH,
    WINDOW,
    Continuation,
    assert_serves,
    assert_short,
    shake,
)
from under import keras_hub as adapter

SIZES = dict(
    vocabulary_size=VOCABULARY,
    num_layers=LAYERS,
    num_query_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    hidden_dim=WIDTH,
    intermediate_dim=48,
)


def make_llama():
    backbone = keras_hub.models.LlamaBackbone(**SIZES)
    return keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)


def make_gemma2():
    backbone = keras_hub.models.GemmaBackbone(
        **SIZES,
        head_dim=DIM,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=2.0,
        final_logit_soft_cap=5.0,
        use_sliding_window_attention=True,
        sliding_window_size=WINDOW,
    )
    return keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)


def continue_own(causal_lm):
    """Return the library's own loop over both prompts, padded right, and its logits."""
    length = max(map(len, PROMPTS)) + NEW_TOKENS
    tokens = np.zeros((len(PROMPTS), length), np.int32)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    causal_lm.compile(sampler="greedy")
    inputs = {"token_ids": tokens, "padding_mask": mask}
    found = np.asarray(causal_lm.generate(inputs, stop_token_ids=None)["token_ids"])
    logits = causal_lm(dict(token_ids=found, padding_mask=np.ones_like(found)))
    starts = [len(prompt) for prompt in PROMPTS]
    new = [found[i, start:][:NEW_TOKENS] for i, start in enumerate(starts)]
    own = [logits[i, start - 1 :][:NEW_TOKENS] for i, start in enumerate(starts)]
    return Continuation([row.tolist() for row in new], [*map(np.asarray, own)])


@pytest.mark.parametrize("make", [make_llama, make_gemma2])
def test_generation_equals_the_librarys(make):
    keras.utils.set_random_seed(0)
    causal_lm = make()
    values = shake([each.value for each in causal_lm.variables], 0.3)
    for variable, value in zip(causal_lm.variables, values, strict=True):
        variable.assign(value)
    wanted = continue_own(causal_lm)
    assert_serves(*adapter.paged(causal_lm), wanted)
    assert_short("keras_hub")
