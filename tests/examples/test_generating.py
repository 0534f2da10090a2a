"""`generate.py`: prompts, options, errors, streamed text and exits."""

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
import types

import numpy as np
import pretrained
import pytest
from generating import command, exiting, output, prompts
from generating.options import BUNDLED, SAMPLING, parse_arguments
from support.paths import EXAMPLES, FIXTURES
from tokenizers import Tokenizer, decoders, models

import jkv
from jkv.serving import Completion

pytestmark = pytest.mark.one_end

# Byte fallback as in Llama 2.
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


@pytest.fixture(scope="module")
def byte_tokenizer():
    model = models.BPE(BYTES | {"a": 256, "▁b": 257}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def pieces(tokenizer, prompt, tokens, **options):
    """Return the text shown after each token, and at the end."""
    stream = output.TextStream(tokenizer, prompt, is_chat=False, **options)
    shown = [stream.advance(tokens[:count]) for count in range(len(tokens) + 1)]
    return [*shown, stream.advance(tokens, has_ended=True)]


def test_byte_fallback_characters_are_shown_once(byte_tokenizer):
    tokens = [*"日本".encode(), 256, 257, *"é".encode()]
    shown = pieces(byte_tokenizer, [256], tokens)
    assert "".join(shown) == "a日本a bé"
    assert shown[0] == "a" and "日本a" in shown and shown[-1] == "é"


@pytest.mark.parametrize("left_over", [1, 2])
def test_an_incomplete_character_at_the_end_is_dropped(byte_tokenizer, left_over):
    tokens = [*"日".encode(), *"日".encode()[:left_over]]
    assert "".join(pieces(byte_tokenizer, [256], tokens)) == "a日"


def test_invalid_bytes_repeat_nothing(byte_tokenizer):
    tokens = [256, *"日".encode(), 0xE6, 257, 256]
    shown = "".join(pieces(byte_tokenizer, [256], tokens))
    assert shown == byte_tokenizer.decode([256, *tokens]) == "aa" + "\ufffd" * 4 + " ba"


def test_partial_characters_are_held_back():
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    tokens = tokenizer.encode("東京 is 🐍").ids
    shown = pieces(tokenizer, tokens[:1], tokens[1:])
    assert "".join(shown) == "東京 is 🐍" and "\ufffd" not in "".join(shown)


def test_only_the_answer_of_a_chat_is_shown():
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    tokens = tokenizer.encode("Question Answer").ids
    num_asked = len(tokenizer.encode("Question").ids)
    stream = output.TextStream(tokenizer, tokens[:num_asked], is_chat=True)
    assert stream.advance(tokens[num_asked:], has_ended=True) == " Answer"


def test_the_tokenizer_neither_pads_nor_truncates(tmp_path):
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = pretrained.load_tokenizer(tmp_path).encode_batch(["one two three", "four"])
    expected = pretrained.load_tokenizer(BUNDLED).encode_batch(
        ["one two three", "four"]
    )
    assert [each.ids for each in found] == [each.ids for each in expected]


def test_prompts_are_read_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\n  \nzwölf\n".encode())
    assert prompts.read_texts(["zero"], str(path)) == ["zero", "one", "zwölf"]
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="prompts.txt has no prompt"):
        prompts.read_texts([], str(path))
    path.write_bytes(b"one\nzw\xf6lf\n")
    with pytest.raises(ValueError, match="line 2 of .*prompts.txt is not UTF-8"):
        prompts.read_texts([], str(path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ValueError, match="standard input has no prompt"):
        prompts.read_texts([], "-")
    with pytest.raises(ValueError, match="prompt 1 is not UTF-8"):
        prompts.read_texts([os.fsdecode(b"\xff")], None)


def test_tokens_unknown_to_the_model_are_refused():
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    options = dict(context=64, has_special_tokens=False)
    ids = prompts.encode(tokenizer, ["The with"], vocabulary=3072, **options)
    with pytest.raises(ValueError, match=rf"prompt 1 has token {max(ids[0])} .* of 5:"):
        prompts.encode(tokenizer, ["The with"], vocabulary=5, **options)


def test_prompt_lengths_are_padded_to_buckets():
    assert prompts.pad([[1] * 3], 2048).shape == prompts.pad([[1] * 64], 2048).shape
    padded = prompts.pad([[1, 2], [3]], 100)
    assert padded.shape == (2, 64) and padded[1].tolist() == [3] + [-1] * 63
    assert prompts.pad([[1] * 65], 100).shape == (1, 100)  # never past the context


def parsed(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    return parse_arguments("a test")


def test_new_tokens_are_limited_by_the_context(monkeypatch):
    options = parsed(monkeypatch, "The with", "--max-new-tokens", str(10**12))
    task = command.prepare(options)
    context = task.model.config.max_context_length
    assert task.max_new_tokens == context - len(task.prompts[0]) + 2
    assert task.config.max_context_length == context


def test_windowed_layers_have_their_own_pool(monkeypatch, tmp_path):
    """Two of three layers have a window of eight; an engine accepts cache and prompts.

    `test_pretrained_parity.py` compares the tokens with transformers.
    """
    folder = FIXTURES / "checkpoints" / "gemma3"
    for file in [*folder.iterdir(), BUNDLED / "tokenizer.json"]:
        (tmp_path / file.name).symlink_to(file)
    expected = np.load(folder / "expected.npz")
    tokens = np.split(expected["prompts"], np.cumsum(expected["prompt_lengths"]))
    rows = [each.tolist() for each in tokens[:-1]]
    monkeypatch.setattr(command.prompts, "encode", lambda *_, **__: rows)
    greedy = ["--temperature", "0", "--repetition-penalty", "1"]
    arguments = ["x", "--model", str(tmp_path), "--max-new-tokens", "51", *greedy]
    options = parsed(monkeypatch, *arguments)
    task = command.prepare(options)
    assert [group.sliding_window for group in task.config.groups] == [None, 8]
    assert task.config.layer_groups == (1, 1, 0)
    engine = command.make_engine(task, 1)
    numbers = command.submit(task, engine, options)
    assert engine.stats().waiting == len(numbers) == 3 and not engine.is_idle


def test_a_window_as_long_as_the_sequences_needs_no_groups():
    model, _ = pretrained.load(FIXTURES / "checkpoints" / "gemma3")
    sizes = dict(step_tokens=8, max_sequences=1)
    assert len(model.cache_config(8, **sizes).groups) == 1
    assert len(model.cache_config(9, **sizes).groups) == 2


@pytest.mark.parametrize(
    "settings, arguments, expected",
    [
        ({}, [], {}),
        ({"eos_token_id": 2}, [], {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            ["--top-p", "0.5"],
            dict(temperature=0.6, top_p=0.5, top_k=50, repetition_penalty=1.0),
        ),
        (
            {"do_sample": False, "temperature": 0.6},
            [],
            dict(temperature=0.0, top_k=50, top_p=1.0, repetition_penalty=1.0),
        ),
        ({"do_sample": False}, ["--temperature", "0.3"], dict(temperature=0.3)),
    ],
)
def test_generation_config_sets_sampling_defaults(
    monkeypatch, tmp_path, settings, arguments, expected
):
    """The command line precedes generation_config.json, which precedes our defaults."""
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    options = parsed(monkeypatch, "--model", str(tmp_path), *arguments)
    sampling = command.choose_sampling(options)
    found = {name: getattr(sampling, name) for name in SAMPLING}
    defaults = SAMPLING if not expected else found
    assert found == defaults | expected


def test_sampling_settings_are_validated(monkeypatch, tmp_path):
    path = tmp_path / "generation_config.json"
    for settings in (
        {"top_k": "many"},
        {"top_k": 1.5},
        {"top_p": 1.5},
        {"temperature": -1},
        {"repetition_penalty": 0},
        {"do_sample": "yes"},
    ):
        path.write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=next(iter(settings))):
            pretrained.read_sampling(tmp_path)
    path.write_text(json.dumps({"top_k": -1, "do_sample": True}))
    assert pretrained.read_sampling(tmp_path)["top_k"] == 0
    options = parsed(monkeypatch, "--top-p", "2")
    with pytest.raises(ValueError, match="Sampling.top_p must be from 0 to 1"):
        command.choose_sampling(options)


CHATML = (
    "{% for m in messages %}\n"
    "    {%- if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}\n"
    "{{ bos_token }}<{{ m.role }}>{{ m.content | tojson }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("place", ["text", "list", "file"])
def test_a_chat_uses_the_checkpoints_template(tmp_path, place):
    settings = {"bos_token": {"content": "<s>"}}
    if place == "text":
        settings["chat_template"] = CHATML
    elif place == "list":
        named = [("tool_use", "no"), ("default", CHATML)]
        settings["chat_template"] = [dict(name=n, template=t) for n, t in named]
    else:
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert pretrained.render_chat(tmp_path, "it's <é>") == (
        '<s><user>"it\'s <é>"\n<assistant>'
    )
    with pytest.raises(ValueError, match="no aliens"):
        pretrained.render_chat(tmp_path, [{"role": "alien", "content": ""}])


def test_a_model_without_a_chat_template_is_reported():
    with pytest.raises(ValueError, match="pydoc has no chat template"):
        pretrained.render_chat(BUNDLED, "hello")


def test_samples_are_printed_as_json(capsys):
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    options = argparse.Namespace(chat=False, json=True, stop=[])
    shown, reason = output.Shown(tokenizer, [[4]], options), jkv.FinishReason
    shown.show(0, Completion(7, 0, [5, 6], [-1.0, -0.5], reason.STOP, "x"))
    shown.show(0, Completion(7, 1, [7], [-2.0], reason.LENGTH, "y"))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "prompt": tokenizer.decode([4]),
        "sample": 0,
        "text": tokenizer.decode([5, 6]),
        "tokens": [5, 6],
        "logprob": -1.5,
        "finish_reason": "STOP",
    }
    assert (second["sample"], second["finish_reason"]) == (1, "LENGTH")
    # Without the stop string, the text equals the engine's.
    options.stop = ["e"]
    shown.show(0, Completion(7, 0, [5, 6], [-1.0, -0.5], reason.STOP, "x"))
    assert json.loads(capsys.readouterr().out)["text"] == "x"


@pytest.mark.parametrize(
    "error, status, message",
    [(KeyboardInterrupt, 130, "interrupted"), (BrokenPipeError, 141, "was closed")],
)
def test_interrupts_exit_with_one_line(tmp_path, monkeypatch, error, status, message):
    errors = io.StringIO()
    with open(tmp_path / "out", "w") as out, contextlib.redirect_stderr(errors):
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended, exiting.errors_in_one_line():
            raise error
    assert ended.value.code == status
    assert len(errors.getvalue().split("\n")) == 3 and message in errors.getvalue()


def test_ctrl_c_while_jax_is_imported(monkeypatch, capsys):
    class Interrupted(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    module = Interrupted("generating.command")
    monkeypatch.setitem(sys.modules, "generating.command", module)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "generate.py"), run_name="__main__")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    "key, value",
    [
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 0),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", []),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, True]),
        ("eos_token_id", -1),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [None]),
        ("model_type", ["llama"]),
        ("dtype", 16),
        ("vocab_size", "many"),
        ("vocab_size", True),
        ("mlp_bias", "no"),
        ("hidden_act", 3),
        ("rope_scaling", {"rope_theta": "10000"}),
        ("rope_scaling", [1]),
        ("use_sliding_window", "true"),
        ("max_window_layers", None),
        ("layer_types", "full_attention"),
        ("sliding_window", 0.5),
        ("sliding_window_pattern", "6"),
        ("no_rope_layers", [1, "0"]),
    ],
)
def test_every_key_of_a_config_is_checked_by_type(key, value):
    windowed = key.startswith("sliding_window_") or key == "no_rope_layers"
    kind = "qwen2" if "window" in key or key == "layer_types" else "llama3"
    kind = "smollm3" if windowed else kind
    raw = json.loads((FIXTURES / "checkpoints" / kind / "config.json").read_text())
    if kind == "qwen2":
        raw |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    pretrained.parse_config(raw)
    with pytest.raises(ValueError, match="config.json"):
        pretrained.parse_config(raw | {key: value})


def test_counting_options_start_at_one():
    for name in ("max_new_tokens", "num_samples"):
        counts = {"max_new_tokens": 1, "num_samples": 1, name: 0}
        options = argparse.Namespace(**counts)
        flag = f"--{name.replace('_', '-')} must be at least 1"
        with pytest.raises(ValueError, match=flag):
            command.prepare(options)
