"""The bundled checkpoint, its corpus and its training script.

`test_llama_parity.py` compares its logits with transformers. Here: the files match the
model card, the held-out documents are not in the training set, and the model has
learnt.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pretrained
import pytest
from bundled import corpus, training
from bundled import model as pydoc_model
from safetensors.numpy import load_file
from support.paths import EXAMPLES
from training import draft_windows

FOLDER = pydoc_model.FOLDER
HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("transformers", "torch")))


@pytest.fixture(scope="module")
def split():
    return corpus.split()


@pytest.fixture(scope="module")
def loaded():
    return pydoc_model.load(FOLDER)


@pytest.fixture(scope="module")
def windows(split, loaded):
    """The first 257 tokens of a third of the held-out documents, i32[B, 257]."""
    documents = pydoc_model.encode(loaded[1], split[1])
    return np.stack([tokens[:257] for tokens in documents if len(tokens) >= 257][::3])


@pytest.mark.one_end
def test_files_are_small_and_readable():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes["model.safetensors"] < 8 * 2**20
    assert sum(sizes.values()) < 10 * 2**20
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        json.loads((FOLDER / name).read_text())
    card = (FOLDER / "README.md").read_text()
    assert "Python Software Foundation License" in card
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (
        (FOLDER / "LICENSE-PYTHON.txt").read_text()
    )
    # The script writes the measured part after training.
    assert "perplexity per token" in card.partition(pydoc_model.MARKER)[2]


@pytest.mark.one_end
def test_bundled_weights_match_the_config():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == pydoc_model.CONFIG
    assert config["max_position_embeddings"] >= 2048

    weights = load_file(FOLDER / "model.safetensors")
    shapes = jax.eval_shape(pydoc_model.init_params, jax.random.key(0))
    assert {k: w.shape for k, w in weights.items()} == {
        k: s.shape for k, s in shapes.items()
    }
    for weight in weights.values():
        assert weight.dtype == np.float16
        assert np.isfinite(weight).all() and weight.std() > 0


@pytest.mark.one_end
def test_the_tokenizer_round_trips_any_text(loaded):
    _, tokenizer = loaded
    assert tokenizer.get_vocab_size() == pydoc_model.CONFIG["vocab_size"]
    assert tokenizer.token_to_id(pydoc_model.END_OF_TEXT) == 0
    for text in (
        "Return a list of the words in the string.",
        "class A(B):\n    def f(self, *, x=1):\n\n\treturn x  # \r\n",
        "naïve café, ‘quoted’, 東京, 🐍",
        "".join(map(chr, range(256))),
    ):
        # No token is added to a prompt, and a byte is at most one token.
        ids = tokenizer.encode(text).ids
        assert 0 not in ids and len(ids) <= len(text.encode())
        assert tokenizer.decode(ids) == text


@pytest.mark.one_end
def test_held_out_text_is_not_in_the_training_set(split):
    trained, held_out = split
    subjects = [{document.subject for document in side} for side in split]
    # A topic and a module of one name are in the same split.
    assert not subjects[0] & subjects[1]

    def long_paragraphs(documents):
        paragraphs = (p for d in documents for p in corpus.paragraphs(d.text))
        words = (" ".join(p.split()) for p in paragraphs)
        return [w for w in words if len(w) >= corpus.MIN_REPEATED]

    kept_apart = long_paragraphs(held_out)
    assert len(kept_apart) > 500
    assert not set(kept_apart) & set(long_paragraphs(trained))
    size, total = (
        sum(len(d.text) for d in docs) for docs in (held_out, sum(split, []))
    )
    assert 0.05 < size / total < 0.15


@pytest.mark.further
@pytest.mark.one_end
def test_the_corpus_is_equal_in_another_process(split):
    # A fresh interpreter, without pytest's imports and with other string hashes.
    program = (
        "import hashlib\nfrom bundled import corpus\n"
        "text = repr(corpus.split()).encode()\n"
        "print(hashlib.sha256(text).hexdigest())"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = hashlib.sha256(repr(split).encode()).hexdigest()
    assert fresh.stdout.strip() == here


@pytest.mark.one_end
def test_the_model_has_learnt(loaded, windows):
    params, _ = loaded
    losses = jax.jit(pydoc_model.token_losses)
    mean = float(losses(params, windows).mean())
    # 4.05 with Python 3.11; uniform guessing gives 8.0, token frequencies 6.6.
    assert mean < 4.5
    # Shuffled tokens have a higher loss.
    shuffled = np.random.default_rng(0).permuted(windows, axis=1)
    assert float(losses(params, shuffled).mean()) > 8


if HAS_TRANSFORMERS:

    def test_transformers_computes_the_same_losses(loaded, windows):
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
        text = 'The "with" statement is used\n    to wrap'
        assert tokenizer(text)["input_ids"] == loaded[1].encode(text).ids
        assert tokenizer.eos_token_id == model.config.eos_token_id == 0

        rows = torch.tensor(windows[:4]).long()
        with torch.no_grad():
            logits = model.eval()(rows[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), rows[:, 1:], reduction="none"
        )
        losses = jax.jit(pydoc_model.token_losses)(loaded[0], windows[:4])
        np.testing.assert_allclose(losses, expected.numpy(), atol=1e-3, rtol=0)

    @pytest.mark.one_end
    def test_chats_are_rendered_like_transformers(tmp_path):
        import transformers

        template = (
            "{{ bos_token }}{% for m in messages %}\n"
            "  {%- if not loop.first %}{% continue %}{% endif %}\n"
            "[{{ m.role }}] {{ m['content'] | trim }} {{ m | tojson }}\n"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
        settings["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        shutil.copy(FOLDER / "tokenizer.json", tmp_path)
        messages = [
            {"role": "user", "content": " Why <é>?\n"},
            {"role": "assistant", "content": "So."},
        ]
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert pretrained.render_chat(tmp_path, messages) == expected


@pytest.mark.slow
@pytest.mark.one_end
def test_training_learns_and_writes_a_checkpoint(split, loaded, tmp_path, monkeypatch):
    small = dict(TOKENS_PER_STEP=128, SHORT_CONTEXT=16, FULL_CONTEXT=32)
    for name, value in small.items():
        monkeypatch.setattr(training, name, value)
    # One narrow layer compiles and learns faster.
    sizes = dict(num_hidden_layers=1, hidden_size=96, intermediate_size=128)
    for name, value in (sizes | {"num_attention_heads": 4}).items():
        monkeypatch.setitem(pydoc_model.CONFIG, name, value)
    documents = pydoc_model.encode(loaded[1], split[0][:1])
    with jax.numpy_dtype_promotion("standard"):  # optax requires it
        params = training.train(documents, 20, None, tmp_path)

    start = documents[0][None, :129]
    losses = jax.jit(pydoc_model.token_losses)
    assert float(losses(params, start).mean()) < 7  # 8.0 before training
    saved = load_file(tmp_path / "model.safetensors")
    for name, param in params.items():
        np.testing.assert_array_equal(saved[name], np.asarray(param, np.float16))


@pytest.fixture
def train_draft(monkeypatch):
    """The training script of the draft model, on windows of a few tokens."""
    module = importlib.import_module("train_draft")
    small = dict(WINDOW=32, START=16, WINDOWS_PER_STEP=4)
    for name, value in small.items():
        monkeypatch.setattr(draft_windows, name, value)
    return module


@pytest.mark.one_end
def test_the_bundled_draft_model_agrees_with_the_model(loaded, windows, train_draft):
    """They are compared on held-out documents, after 16 to 32 tokens of each."""
    folder = train_draft.DRAFT_FOLDER
    config = json.loads((folder / "config.json").read_text())
    assert config == train_draft.DRAFT_CONFIG
    assert sum(path.stat().st_size for path in folder.iterdir()) < 700_000
    saved = load_file(folder / "model.safetensors")
    draft = {name: weight.astype(np.float32) for name, weight in saved.items()}
    shapes = jax.eval_shape(
        lambda key: pydoc_model.init_params(key, config), jax.random.key(0)
    )
    assert {k: x.shape for k, x in draft.items()} == {
        k: s.shape for k, s in shapes.items()
    }
    tokens = windows[: len(windows) // 4 * 4, :32]
    agrees = draft_windows.measure(draft, loaded[0], tokens)[:, 16:]
    assert agrees.mean() > 0.35
    card = (folder / "README.md").read_text()
    assert "Python Software Foundation License" in card


@pytest.mark.further  # the committed one is tested above
@pytest.mark.slow
@pytest.mark.one_end
def test_draft_training_learns_and_writes_a_checkpoint(
    split, tmp_path, monkeypatch, train_draft, capsys
):
    """The run has one document per split, one layer, and stubbed completions."""
    monkeypatch.setitem(train_draft.DRAFT_CONFIG, "num_hidden_layers", 1)
    seen = []

    def go_on(windows):
        seen.append(windows)
        return windows[::-1]

    monkeypatch.setattr(draft_windows, "go_on", go_on)
    monkeypatch.setattr(corpus, "split", lambda: (split[0][:1], split[1][:1]))
    arguments = "--steps 20 --continued 4 --output".split()
    monkeypatch.setattr(sys, "argv", ["train_draft.py", *arguments, str(tmp_path)])
    with jax.numpy_dtype_promotion("standard"):  # optax requires it
        train_draft.main()
    output = capsys.readouterr().out
    assert "20 " in output and "on held-out documents the draft agrees in" in output
    assert len(seen) == 2 and seen[0].shape == (4, 32)
    _, params = pretrained.load(tmp_path)
    assert params["embedding"].shape == (3072, 64)
