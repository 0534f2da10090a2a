"""Two published models as GGUF files: results equal `transformers`.

A separate suite, `real-models`: it downloads 350 MB (`tools/models.py`).
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from pretrained.checkpoint import list_names
from pretrained.files import Tensors, find_tensors
from support.checkpoints import checkpoint_fixtures as fixtures
from support.checkpoints import gguf_writing as writing

import jkv

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import models  # noqa: E402, a tool, which is not a package

NAMES = [*models.MODELS]
TEXTS = (
    "Hello world, it's 2026!\r\nA new line\n\n\n  indented, 3.14159 and 12345678",
    "def f(x):\n\treturn x**2  # ÷ {}[]<>|&^%$\n\n\nclass A:\n    pass\r\n",
    "Schöne Grüße aus Zürich: naïve café, Ærøskøbing",
    "日本語のテキストです。漢字とカナ、123。",
    "Привет, как дела? Ещё раз: №5",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "한국어 문장입니다. 안녕하세요!",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 \u200d, ▁▁ and \u2581x \t\t tabs   ",
    "<|im_start|>user\nhi<|im_end|>\n<start_of_turn>user\nhi<end_of_turn>\n<bos>",
    "",
    " ",
)
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def read_reference(path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def assert_equal_tensors(path, reference):
    """Assert that each tensor of the file is bit-identical to the reference."""
    expected = reference.state_dict()
    tensors = Tensors(find_tensors(pretrained.find_folder(path)), None)
    assert {*tensors.paths} <= list_names(pretrained.read_config(path))
    assert {*expected} - {*tensors.paths} <= {"lm_head.weight"}
    for name in tensors.paths:
        found = tensors.read(name, tuple(expected[name].shape))
        np.testing.assert_array_equal(np.float32(found), expected[name], name)


@pytest.mark.parametrize("name", NAMES)
def test_gguf_tokens_tensors_and_logits_equal_transformers(name):
    path = models.fetch(name)
    tokenizer = pretrained.load_tokenizer(path)
    other = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            assert ids == other(text, add_special_tokens=special)["input_ids"], text
    reference = read_reference(path)
    assert_equal_tensors(path, reference)

    text = "In a hole in the ground there lived a hobbit. " * 60
    tokens = np.array(tokenizer.encode(text).ids[:640], np.int32)
    model, params = pretrained.load(path, jnp.float32)
    config = model.cache_config(1024, max_sequences=1, dtype=jnp.float32)
    cache, opened = jkv.allocate(jkv.init(config), [0])
    cache, batch = jkv.append(cache, opened.seq_ids, [640], capacity=640)
    run = jax.jit(functools.partial(model, all_rows=True))
    found = np.asarray(run(params, tokens, cache, batch)[0])
    # In float64: float32 errors depend on the processor, for the worst of 168 million
    # logits (0.0008 to 0.004) more than on average.
    with torch.no_grad():
        expected = reference.double()(torch.tensor(tokens[None])).logits[0].numpy()
    assert np.sqrt(np.mean((found - expected) ** 2)) < 3e-4
    np.testing.assert_allclose(found, expected, atol=1e-2)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_two_commands_chat_with_smollm2_without_a_checkout(tmp_path):
    """The commands are a user's, with the template and end token of the file."""
    installed = tmp_path / "installed"
    # Their dependencies are already in this environment.
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--target", installed, ROOT, ROOT / "examples"]
    subprocess.run(install, check=True)
    command = [sys.executable, installed / "bin" / "jkv-generate"]
    command += ["--model", models.fetch("smollm2"), "--max-new-tokens", "40"]
    command += ["--temperature", "0", "--json"]
    command += ["--chat", "What is the capital of France?"]
    variables = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert "Paris" in json.dumps(answer)


@pytest.mark.parametrize("name", NAMES)
def test_format_costs_equal_the_documented_ones(name):
    """The command is a user's; int8 keys with int4 values cost nothing."""
    command = [sys.executable, ROOT / "examples" / "formats.py", "--max-tokens", "1000"]
    command += ["--model", models.fetch(name), "--text", ROOT / "docs" / "design.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.rsplit(maxsplit=5) for line in done.stdout.splitlines()[3:]]
    ratios = {name: float(ratio) for name, _, ratio, *_ in rows}
    assert [*ratios][0] == "float32" and ratios["float32"] == 1
    assert abs(ratios["bfloat16"] - 1) < 0.005 and abs(ratios["int8"] - 1) < 0.01
    assert abs(ratios["int8 keys, int4 values"] - 1) < 0.015
    assert ratios["int4"] > 1.015


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_types(kind, tmp_path):
    """For matrices with rows long enough for blocks of 32."""
    raw, tensors = writing.read_checkpoint(fixtures.FIXTURES / "qwen2")
    raw = raw | dict(hidden_size=64, intermediate_size=96)
    longer, rng = {16: 32, 32: 64, 48: 96}, np.random.default_rng(1)
    for name, array in tensors.items():
        shape = [longer.get(size, size) for size in array.shape]
        tensors[name] = rng.standard_normal(shape, np.float32)
    path = writing.write(tmp_path / f"{kind}.gguf", raw, tensors, kind=kind)
    assert_equal_tensors(path, read_reference(path))
