"""Phi-3 and PhiMoE: sequences around the original context length.

Compared with `transformers.generate`, which recomputes a sequence that exceeds it.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures
from test_pretrained_parity import HAS_TRANSFORMERS

import jkv

pytestmark = pytest.mark.one_end
FOLDER = fixtures.FIXTURES / "phi3"
ORIGINAL, LONGEST = 16, 128
PROMPT, LONG_PROMPT = 2, 1

generate = jax.jit(
    jkv.generate,
    static_argnames=("model", "max_new_tokens", "row_counts"),
    donate_argnames="cache",
)


@pytest.fixture(scope="module")
def prompts():
    expected = np.load(FOLDER / "expected.npz")
    found = np.split(expected["prompts"], expected["prompt_lengths"].cumsum()[:-1])
    return found, expected["generated"]


def load(longest, folder=FOLDER):
    return pretrained.load(folder, max_context_length=longest, scan_layers=True)


def load_oracle(folder):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )


def generate_whole(oracle, prompt, num_tokens):
    """Return a prompt and its completion by `transformers.generate`."""
    import torch

    rows = torch.tensor(prompt)[None].long()
    return oracle.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].numpy()


def continue_prompt(model, params, prompt, num_tokens):
    """Return the greedy tokens of one sequence, computed in chunks of four."""
    sizes = dict(num_blocks=24, block_size=4, max_sequences=1, max_context_length=96)
    config = jkv.CacheConfig(**model.cache_fields, **sizes, dtype="float32")
    padded = np.full((1, 40), -1, np.int32)
    padded[0, : len(prompt)] = prompt
    _, found = generate(
        model,
        params,
        jkv.init(config),
        padded,
        max_new_tokens=50,
        limits=np.asarray([num_tokens], np.int32),
        row_counts=(4,),
    )
    return np.asarray(found.tokens[0, :num_tokens])


def test_long_factors_do_not_depend_on_chunking(prompts):
    loaded, generated = prompts
    found = continue_prompt(*load(LONGEST), loaded[LONG_PROMPT], 50)
    np.testing.assert_array_equal(found, generated[LONG_PROMPT][:50])


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
def test_a_sequence_in_two_calls_equals_transformers(prompts):
    prompt = prompts[0][PROMPT]
    whole = generate_whole(load_oracle(FOLDER), prompt, 40)
    short = continue_in_two_calls(FOLDER, prompt, whole)
    # One call, which rotates each key once, differs from there on.
    once = prompts[1][PROMPT][:40]
    assert np.array_equal(once[: len(short)], short) and not np.array_equal(
        once, whole[len(prompt) :]
    )


def continue_in_two_calls(folder, prompt, whole):
    """Compare a sequence that exceeds the length; return the tokens up to it."""
    num_short = ORIGINAL + 1 - len(prompt)
    short = continue_prompt(*load(ORIGINAL, folder), prompt, num_short)
    np.testing.assert_array_equal(short, whole[len(prompt) :][:num_short])
    crossed = np.concatenate([prompt, short])
    long = continue_prompt(*load(LONGEST, folder), crossed, len(whole) - len(crossed))
    np.testing.assert_array_equal(long, whole[len(crossed) :])
    return short


@pytest.mark.further
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
def test_phimoe_equals_transformers_with_the_length(prompts, tmp_path):
    """transformers 5.24 uses PhiMoE's short factors for any length.

    Its rotary class does not pass on the length that selects the factors, unlike
    transformers 4; with the length, tokens are equal.
    """
    folder = Path(shutil.copytree(fixtures.FIXTURES / "phimoe", tmp_path / "phimoe"))
    settings = json.loads((folder / "config.json").read_text())
    length = dict(original_max_position_embeddings=ORIGINAL)
    settings |= length | dict(rope_parameters=settings["rope_parameters"] | length)
    (folder / "config.json").write_text(json.dumps(settings))
    oracle = load_oracle(folder)
    rotary = oracle.model.rotary_emb
    start, lengths = rotary.rope_init_fn, []

    def note_length(_, args, given):
        positions = given["position_ids"] if "position_ids" in given else args[1]
        lengths.append(int(positions.max()) + 1)

    prompt, long_prompt = prompts[0][PROMPT], prompts[0][LONG_PROMPT]
    plain = generate_whole(oracle, long_prompt, 40)
    rotary.register_forward_pre_hook(note_length, with_kwargs=True)
    rotary.rope_init_fn = lambda config: start(config, seq_len=lengths[-1])
    warned = generate_whole(oracle, long_prompt, 40)
    assert max(lengths) > ORIGINAL and not np.array_equal(warned, plain)
    found = continue_prompt(*load(LONGEST, folder), long_prompt, 40)
    np.testing.assert_array_equal(found, warned[len(long_prompt) :])
    continue_in_two_calls(folder, prompt, generate_whole(oracle, prompt, 40))


def test_lengths_select_the_factors():
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
    # Other scalings are unchanged.
    llama = fixtures.FIXTURES / "llama_dynamic"
    shorter = pretrained.load(llama, max_context_length=8)[0].config
    assert shorter.ropes == pretrained.read_config(llama).ropes
    with pytest.raises(ValueError, match="from 1 to 128"):
        load(LONGEST + 1)
