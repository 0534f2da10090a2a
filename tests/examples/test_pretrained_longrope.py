"""Phi-3: texts around the length before scaling, beside `transformers.generate`."""

import jax
import numpy as np
import pretrained
import pytest
from support import checkpoint_fixtures as fixtures
from test_pretrained_parity import HAS_TRANSFORMERS

import jkv

pytestmark = pytest.mark.one_end
FOLDER = fixtures.FIXTURES / "phi3"
ORIGINAL, LONGEST = 16, 128
PROMPT, LONG_PROMPT = 2, 1

generate = jax.jit(
    jkv.generate,
    static_argnames=("model", "max_new_tokens", "chunk_size"),
    donate_argnames="cache",
)


@pytest.fixture(scope="module")
def prompts():
    expected = np.load(FOLDER / "expected.npz")
    found = np.split(expected["prompts"], expected["prompt_lengths"].cumsum()[:-1])
    return found, expected["generated"]


def load(longest):
    return pretrained.load(FOLDER, max_context_length=longest, scan_layers=True)


def continue_text(model, params, text, num_tokens):
    """Return the greedy tokens of one text, fed in chunks of four."""
    sizes = dict(num_blocks=24, block_size=4, max_sequences=1, max_context_length=96)
    config = jkv.CacheConfig(**model.cache_fields, **sizes, dtype="float32")
    padded = np.full((1, 40), -1, np.int32)
    padded[0, : len(text)] = text
    _, found = generate(
        model,
        params,
        jkv.init(config),
        padded,
        max_new_tokens=50,
        limits=np.asarray([num_tokens], np.int32),
        chunk_size=4,
    )
    return np.asarray(found.tokens[0, :num_tokens])


def test_long_factors_do_not_depend_on_how_a_prompt_comes(prompts):
    texts, generated = prompts
    found = continue_text(*load(LONGEST), texts[LONG_PROMPT], 50)
    np.testing.assert_array_equal(found, generated[LONG_PROMPT][:50])


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
def test_a_text_in_two_calls_is_that_of_transformers(prompts):
    import torch
    import transformers

    prompt = prompts[0][PROMPT]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32
    )
    whole = model.generate(
        torch.tensor(prompt)[None].long(), max_new_tokens=40, do_sample=False
    )[0].numpy()
    num_short = ORIGINAL + 1 - len(prompt)
    short = continue_text(*load(ORIGINAL), prompt, num_short)
    np.testing.assert_array_equal(short, whole[len(prompt) :][:num_short])
    crossed = np.concatenate([prompt, short])
    long = continue_text(*load(LONGEST), crossed, 40 - num_short)
    np.testing.assert_array_equal(long, whole[len(crossed) :])
    # One call, which turns each key once, goes another way from there on.
    once = prompts[1][PROMPT][:40]
    assert np.array_equal(once[:num_short], short) and not np.array_equal(
        once, whole[len(prompt) :]
    )


def test_lengths_choose_the_factors():
    config = pretrained.read_config(FOLDER)
    (rope, *_) = set(config.ropes)
    for longest, factors in [
        (ORIGINAL, rope.short_factors),
        (ORIGINAL + 1, rope.long_factors),
    ]:
        fixed = pretrained.load(FOLDER, max_context_length=longest)[0].config
        assert fixed.max_context_length == longest
        (chosen,) = set(fixed.ropes)
        assert chosen.short_factors == chosen.long_factors == factors
    # Other scalings are what they were.
    llama = fixtures.FIXTURES / "llama_dynamic"
    shorter = pretrained.load(llama, max_context_length=8)[0].config
    assert shorter.ropes == pretrained.read_config(llama).ropes
    with pytest.raises(ValueError, match="from 1 to 128"):
        load(LONGEST + 1)
