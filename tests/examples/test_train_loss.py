"""The loss of an EAGLE-3 head: rows that no draft reaches are excluded."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pretrained
import pytest
import tokenizers
from training import model_texts
from training.eagle3_head import Frozen, Texts, find_loss, init_head, save_head
from training.model_texts import write_texts

pytestmark = pytest.mark.one_end

LENGTH, WIDTH, VOCABULARY = 8, 8, 11
CONFIG = pretrained.parse_config(
    dict(
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_theta=5000.0,
    )
)


@functools.cache
def loss_of(num_runs):
    return jax.jit(functools.partial(find_loss, config=CONFIG, num_runs=num_runs))


def measure(num_runs, rows, end=LENGTH, seed=0):
    """Return the loss of trained `rows`; the seed draws the texts from `end` on."""
    drawn, other = np.random.default_rng(3), np.random.default_rng(seed)
    matrix = drawn.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    frozen = Frozen(matrix, matrix, np.arange(VOCABULARY, dtype=np.int32))
    params = init_head(CONFIG, 2, frozen, np.ones(WIDTH, np.float32))
    tokens = drawn.integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)
    hidden = drawn.normal(size=(2, LENGTH, 3, WIDTH)).astype(np.float32)
    tokens[:, end:] = other.integers(0, VOCABULARY, (2, LENGTH - end))
    hidden[:, end:] = other.normal(size=(2, LENGTH - end, 3, WIDTH))
    trained = np.broadcast_to(np.isin(np.arange(LENGTH), rows), tokens.shape)
    texts = Texts(tokens, tokens, hidden, trained, trained)
    with jax.numpy_dtype_promotion("standard"):  # as in the script
        return float(loss_of(num_runs)(params, frozen=frozen, texts=texts)[0])


def test_later_rows_do_not_change_the_loss():
    """No row attends to later rows, in any pass."""
    rows = np.arange(5)
    losses = [measure(3, rows, end=5, seed=seed) for seed in range(2)]
    assert losses[0] == losses[1]
    # Earlier rows do change it.
    changed = [measure(3, rows, end=3, seed=seed) for seed in range(2)]
    assert abs(changed[0] - changed[1]) > 1e-3


def test_each_pass_begins_a_row_later():
    """Pass s drafts rows from s + 1 on, as a draft starts after the first row."""
    losses = [[measure(count, [row]) for count in (1, 2, 3)] for row in range(4)]
    np.testing.assert_array_equal(np.diff(losses, axis=1) > 0.1, np.tri(4, 2, -2) > 0)
    np.testing.assert_array_equal(np.array(losses)[:, 0] > 0, [False, True, True, True])


def test_a_target_without_rope_in_its_first_layer(tmp_path):
    """The head has RoPE with the base of a later layer, or else the usual one."""
    rope = CONFIG.ropes[0]
    for ropes, theta in (((None, rope), rope.theta), ((None, None), 10_000.0)):
        config = dataclasses.replace(CONFIG, ropes=ropes)
        frozen = Frozen(None, np.ones((VOCABULARY, WIDTH)), np.arange(VOCABULARY))
        save_head(tmp_path, config, {}, frozen, [1])
        assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == theta


@pytest.mark.parametrize(
    "template, begin",
    [
        (None, None),
        ("{{ messages[0].content }} a", None),
        ("a {{ messages[0].content }}", [0]),
    ],
)
def test_prompts_begin_with_a_template_or_a_stop_token(
    tmp_path, monkeypatch, template, begin
):
    """A template that begins with the user's message has no text to begin with."""
    model = tokenizers.models.WordLevel(dict(a=0, unknown=1), "unknown")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    begun = []

    def roll_out(*given):
        begun.extend(prompts := given[2])
        return [[0]] * len(prompts)

    monkeypatch.setattr(model_texts, "_roll_out", roll_out)

    def write(stop_tokens, least=1):
        config = dataclasses.replace(CONFIG, stop_tokens=stop_tokens)
        model = pretrained.Decoder(config)
        return write_texts(model, {}, str(tmp_path), 2, 4, least)

    if begin is None:
        with pytest.raises(ValueError, match=r"template with text.*, or a stop token"):
            write(())
    write((7, 8))
    assert begun[:2] == [begin or [7]] * 2
    with pytest.raises(ValueError, match=r"of 2 .* needs 3; raise num_texts \(--text"):
        write((7,), least=3)
