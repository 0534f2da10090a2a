"""Texts that pass the length before scaling, beside `transformers.generate`.

The parity tests show that greedy steps on the cache give the committed tokens; here
`generate` of transformers gives the same, for each kind of scaling. Longrope, which it
switches within a text, is in `test_pretrained_longrope.py`.
"""

import numpy as np
import pretrained
import pytest
from support import checkpoint_fixtures as fixtures
from support.jax_versions import with_further
from test_pretrained_parity import HAS_TRANSFORMERS

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers"),
]

# A checkpoint for each, and the length that its frequencies are scaled from, if there
# is one. "Alpha" is Hunyuan's: called dynamic, but stretched once.
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


def read_texts(name):
    """Return the prompts, and the tokens that follow each."""
    expected = np.load(fixtures.FIXTURES / name / "expected.npz")
    ends = expected["prompt_lengths"].cumsum()
    return np.split(expected["prompts"], ends[:-1]), expected["generated"]


def continue_text(model, prompt, num_tokens):
    """Return the continuation of a prompt by `transformers.generate`."""
    import torch

    rows = torch.tensor(np.asarray(prompt))[None].long()
    text = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return text[0].numpy()[len(prompt) :]


def test_every_scaling_is_listed():
    scalings = {
        rope.scaling
        for name, _ in LENGTHS.values()
        for rope in pretrained.read_config(fixtures.FIXTURES / name).ropes
    }
    assert scalings | {"longrope"} == set(pretrained.rope.SCALINGS)


# Kinds with parts that another one has.
OTHERS = [kind for kind in LENGTHS if "," in kind]


@pytest.mark.parametrize("kind", with_further(LENGTHS, *OTHERS))
def test_generate_gives_the_same_past_that_length(kind):
    name, length = LENGTHS[kind]
    model, texts = load_oracle(name), list(zip(*read_texts(name), strict=True))
    if length is not None:
        (turned,) = set(pretrained.read_config(fixtures.FIXTURES / name).ropes)
        assert turned.original_context == length
        assert sum(len(p) <= length < len(p) + len(g) for p, g in texts) >= 2
    for prompt, generated in texts:
        found = continue_text(model, prompt, len(generated))
        np.testing.assert_array_equal(found, generated)
        # Of dynamic scaling its class keeps the longest text's until a short one comes.
        continue_text(model, prompt[:1], 1)


def test_dynamic_scaling_of_transformers_remembers_longer_texts():
    """Its next text is turned as the longer one was; on a cache each has its own."""
    import torch

    (_, prompt, _), (_, generated, _) = read_texts("llama_dynamic")
    model = load_oracle("llama_dynamic")
    rows = torch.tensor(prompt)[None].long()
    with torch.no_grad():
        fresh = model(rows).logits.numpy()
        continue_text(model, prompt, 50)
        after = model(rows).logits.numpy()
        continue_text(model, prompt[:1], 1)
        again = model(rows).logits.numpy()
    assert np.abs(after - fresh).max() > 0.1
    np.testing.assert_array_equal(again, fresh)
    found = continue_text(model, prompt, 50)
    np.testing.assert_array_equal(found, generated[:50])
