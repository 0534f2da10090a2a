"""Training an EAGLE-3 head: the loss falls, and its draft tokens are accepted."""

import argparse
import importlib
import json
import sys

import jax
import numpy as np
import pretrained
import pytest
from served import loading

import jkv

pytestmark = pytest.mark.one_end

NEW = 16


@pytest.fixture
def written(monkeypatch):
    """Shrink the script's texts, and record them."""
    texts = importlib.import_module("training.model_texts")
    monkeypatch.setattr(texts, "RUNNING", 8)
    monkeypatch.setattr(texts, "PROMPT_TOKENS", 8)
    found, write_texts = [], texts.write_texts

    def record(*given):
        found.append(write_texts(*given))
        return found[0]

    script = importlib.import_module("train_drafter")
    monkeypatch.setattr(script, "write_texts", record)
    return found


@pytest.mark.further
def test_a_head_learns_to_draft_the_models_text(written, tmp_path, monkeypatch):
    """The head overfits its texts; greedy completions stay the model's own."""
    script = importlib.import_module("train_drafter")
    begun, init_head = [], script.init_head

    def record(config, num_aux, frozen, *given):
        params = init_head(config, num_aux, frozen, *given)
        begun.append((np.array(params["norm.weight"]), np.asarray(frozen.head)))
        return params

    monkeypatch.setattr(script, "init_head", record)
    folder = script.__file__.replace("train_drafter.py", "models/pydoc")
    options = f"--texts 16 --length {NEW} --steps 40 --drafts 2"
    arguments = [folder, "--output", str(tmp_path), *options.split()]
    monkeypatch.setattr(sys, "argv", ["train_drafter.py", *arguments])
    monkeypatch.setattr(jkv, "keep_compiled_programs", lambda: None)
    with jax.numpy_dtype_promotion("standard"):  # optax requires it
        script.main()
    curve = json.loads((tmp_path / "curve.json").read_text())
    steps, _, losses, made, _, _ = zip(*curve, strict=True)
    assert steps == (20, 40)
    assert losses[1] < 0.7 * losses[0] and made[1] > 2
    # It began with about a uniform guess, not with random certainty.
    ((norm, head),) = begun
    rows = np.random.default_rng(0).normal(size=(64, len(norm)))
    assert 0.4 < np.std((rows * norm) @ head.T) < 0.8

    (tokens, ends), count = written[0], 8
    greedy = slice(2, 2 + 2 * count, 2)  # of the training texts
    prompts = [row[:end] for row, end in zip(tokens, ends[:, 0], strict=True)][greedy]
    # Loaded as by the server; an engine would compile more than the loop.
    parser, engines = argparse.ArgumentParser(), []
    loading.add_options(parser)
    options = f"--drafter {tmp_path} --context 32 --max-running {count}"
    monkeypatch.setattr(pretrained, "keep_programs", lambda _: None)
    monkeypatch.setattr(loading, "Engine", lambda *a, **b: engines.append((a, b)))
    loading.load(parser.parse_args(options.split()))
    ((model, params, cache), fields) = engines[0]
    _, result = jkv.jitted.generate(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=NEW,
        max_running=count,
        stop_tokens=fields["stop_tokens"],
        speculate=fields["speculate"],
    )
    given = zip(tokens[greedy], ends[greedy], result.tokens, strict=True)
    for row, (start, end), found in given:
        assert found[: end - start].tolist() == row[start:end].tolist()
    counts = result.statistics
    drafted, accepted = int(counts.draft_tokens), int(counts.accepted_tokens)
    assert drafted > 30 and accepted > 0.4 * drafted
