"""Sequences longer than the original context, compared with `transformers.generate`.

The parity tests compare greedy steps on the cache with the committed tokens; here
`transformers.generate` gives the same tokens for each kind of RoPE scaling. Longrope,
which it switches within a sequence, is in `test_pretrained_longrope.py`.
"""

import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures
from support.jax_versions import with_further
from test_pretrained_parity import HAS_TRANSFORMERS

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers"),
]

# A checkpoint for each kind, and its original context length, if any. "Alpha" is
# Hunyuan's: named dynamic, but scaled once.
LENGTHS = {
    "linear": ("llama_linear", None),
    "llama3": ("llama3", 32),
    "proportional": ("gemma4", None),
    "yarn": ("qwen3_yarn", 32),
    "yarn, bounds between pairs": ("gpt_oss", 32),
    "yarn, scores scaled too": ("deepseek_v3", 32),
    "dynamic": ("llama_dynamic", 16),
    "dynamic, alpha": ("hunyuan_moe", None),
}


def load_oracle(name):
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        fixtures.FIXTURES / name, dtype=torch.float32, attn_implementation="eager"
    )


def read_sequences(name):
    """Return the prompts, and the tokens that follow each."""
    expected = np.load(fixtures.FIXTURES / name / "expected.npz")
    ends = expected["prompt_lengths"].cumsum()
    return np.split(expected["prompts"], ends[:-1]), expected["generated"]


def continue_prompt(model, prompt, num_tokens):
    """Return the continuation of a prompt by `transformers.generate`."""
    import torch

    rows = torch.tensor(np.asarray(prompt))[None].long()
    output = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0].numpy()[len(prompt) :]


def test_every_scaling_is_listed():
    scalings = {
        rope.scaling
        for name, _ in LENGTHS.values()
        for rope in pretrained.read_config(fixtures.FIXTURES / name).ropes
    }
    assert scalings | {"longrope"} == set(pretrained.rope.SCALINGS)


# Kinds whose parts another kind covers.
OTHERS = [kind for kind in LENGTHS if "," in kind]


@pytest.mark.parametrize("kind", with_further(LENGTHS, *OTHERS))
def test_generate_is_equal_past_that_length(kind):
    name, length = LENGTHS[kind]
    model, sequences = load_oracle(name), list(zip(*read_sequences(name), strict=True))
    if length is not None:
        (turned,) = set(pretrained.read_config(fixtures.FIXTURES / name).ropes)
        assert turned.original_context == length
        assert sum(len(p) <= length < len(p) + len(g) for p, g in sequences) >= 2
    for prompt, generated in sequences:
        found = continue_prompt(model, prompt, len(generated))
        np.testing.assert_array_equal(found, generated)
        # Dynamic scaling keeps the longest sequence's factors until a short one resets
        # them.
        continue_prompt(model, prompt[:1], 1)


def test_dynamic_scaling_of_transformers_remembers_longer_sequences():
    """Its next sequence is rotated like the longer one; jkv's are independent."""
    import torch

    (_, prompt, _), (_, generated, _) = read_sequences("llama_dynamic")
    model = load_oracle("llama_dynamic")
    rows = torch.tensor(prompt)[None].long()
    with torch.no_grad():
        fresh = model(rows).logits.numpy()
        continue_prompt(model, prompt, 50)
        after = model(rows).logits.numpy()
        continue_prompt(model, prompt[:1], 1)
        again = model(rows).logits.numpy()
    assert np.abs(after - fresh).max() > 0.1
    np.testing.assert_array_equal(again, fresh)
    found = continue_prompt(model, prompt, 50)
    np.testing.assert_array_equal(found, generated[:50])
