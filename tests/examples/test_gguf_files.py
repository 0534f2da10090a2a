"""GGUF files give the model, weights and tokenizer that they were written from."""

import contextlib
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
import safetensors.numpy
from pretrained.gguf_reading import stored
from pretrained.rope import frequencies
from support.checkpoints import checkpoint_fixtures as fixtures
from support.checkpoints import gguf_writing as writing

from jkv.commands.capacity import make_plan
from jkv.config import gguf_file
from jkv.config.gguf_file import read_file

pytestmark = pytest.mark.one_end
FULL = dict(use_sliding_window=False, layer_types=None)
# Settings that a GGUF file of the architecture cannot change.
CASES = {
    "llama2": {},
    "llama_linear": {},
    "qwen2": FULL,
    "qwen3": FULL,
    "gemma2": dict(query_pre_attn_scalar=16, tie_word_embeddings=True),
    "gemma3": dict(query_pre_attn_scalar=16, layer_types=["sliding_attention"] * 3),
    "mixtral": dict(sliding_window=None, tie_word_embeddings=True),
    "qwen2_moe": FULL | dict(mlp_only_layers=[]),
    "qwen3_moe": FULL | dict(mlp_only_layers=[], norm_topk_prob=True),
    "phi3": {},
    "olmo2": {},
    "smollm3": FULL | dict(no_rope_layers=None, no_rope_layer_interval=4),
    "granite": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "glm4_moe": {},
}
TEXTS = (
    "def area(radius):\r\n\treturn 3.14159 * radius ** 2\n\n\n  # done",
    "Grüße, naïve café; 日本語のテキスト, Привет 12345, مرحبا, नमस्ते, 한국어",
    "emoji 😀👩‍👩‍👧 and   spaces ",
    "",
)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    """Derived folders are written to the test's temporary directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "cache"))


def comparable(config):
    return dataclasses.replace(config, dtype_name="float32", stop_tokens=())


def read_all_keys_of_a_file(name):
    """Return a checkpoint's configuration and tensors, with experts in all layers."""
    raw, tensors = writing.read_checkpoint(fixtures.FIXTURES / name)
    raw |= CASES[name]
    if raw["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    if name in ("qwen2_moe", "qwen3_moe"):
        layers = [f"model.layers.{i}.mlp." for i in range(raw["num_hidden_layers"])]
        with_experts = next(each for each in layers if f"{each}gate.weight" in tensors)
        for layer in layers:
            if f"{layer}gate.weight" not in tensors:
                dense = [each for each in tensors if each.startswith(layer)]
                for each in dense:
                    del tensors[each]
                tensors |= {
                    each.replace(with_experts, layer): 1 - array
                    for each, array in tensors.items()
                    if each.startswith(with_experts)
                }
    return raw, tensors


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_settings_and_weights_of_its_checkpoint(name, tmp_path):
    raw, tensors = read_all_keys_of_a_file(name)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    path = writing.write(tmp_path / "model.gguf", raw, tensors)
    expected = pretrained.read_config(folder)
    assert comparable(pretrained.read_config(path)) == comparable(expected)
    params = pretrained.read_params(path, expected, jnp.dtype("float32"))
    wanted = pretrained.read_params(folder, expected, jnp.dtype("float32"))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_a_file_equals_that_for_its_checkpoint(name, tmp_path):
    raw, tensors = read_all_keys_of_a_file(name)
    path = writing.write(tmp_path / "model.gguf", raw, tensors)
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps(raw | dict(dtype="bfloat16")))
    found, weights = make_plan(path, "16MB"), sum(a.size for a in tensors.values())
    assert 0 <= found.weights - 2 * weights <= 2 * 12  # also RoPE factors of phi3
    expected = make_plan(settings, "16MB", weights=found.weights)
    assert dataclasses.replace(found, notes=[]) == dataclasses.replace(
        expected, notes=[]
    )
    (note,) = (each for each in found.notes if each not in expected.notes)
    assert note.startswith("weights of model.gguf dequantized to bfloat16: ")
    settings.unlink()
    assert make_plan(tmp_path, "16MB") == found


def test_a_matrix_of_one_row_may_be_a_vector(tmp_path):
    """Older converters write it as a vector."""
    raw, tensors = read_all_keys_of_a_file("qwen2_moe")
    path = writing.write(tmp_path / "model.gguf", raw, tensors)
    config = pretrained.read_config(path)
    wanted = pretrained.read_params(path, config, jnp.dtype("float32"))
    for name in tensors:
        if name.endswith("shared_expert_gate.weight"):
            tensors[name] = tensors[name].ravel()
    path = writing.write(tmp_path / "older.gguf", raw, tensors)
    params = pretrained.read_params(path, config, jnp.dtype("float32"))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_llama_3_factors_equal_the_rope_settings(tmp_path):
    folder = fixtures.FIXTURES / "llama3"
    raw, tensors = writing.read_checkpoint(folder)
    rope = raw["rope_parameters"]
    turns = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, 16, 2) / 16)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    tensors["rope_freqs.weight"] = np.float32(factors)
    path = writing.write(tmp_path / "model.gguf", raw, tensors)
    found, expected = (pretrained.read_config(each).ropes[0] for each in (path, folder))
    np.testing.assert_allclose(frequencies(found), frequencies(expected), rtol=1e-6)
    assert found.magnitude == expected.magnitude


def test_tokenization_equals_the_original_tokenizer(tmp_path):
    written = json.loads((fixtures.PYDOC / "tokenizer.json").read_text())
    raw, tensors = writing.read_checkpoint(fixtures.FIXTURES / "qwen3")
    numbered = written["model"]["vocab"] | {
        token["content"]: token["id"] for token in written["added_tokens"]
    }
    tokens = sorted(numbered, key=numbered.get)
    special = {token["content"] for token in written["added_tokens"]}
    merges = written["model"]["merges"]
    vocabulary = dict(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_type=[3 if token in special else 1 for token in tokens],
        merges=[m if isinstance(m, str) else " ".join(m) for m in merges],
        eos_token_id=numbered[written["added_tokens"][0]["content"]],
    )
    path = writing.write(tmp_path / "model.gguf", raw, tensors, vocabulary=vocabulary)
    found, expected = map(pretrained.load_tokenizer, (path, fixtures.PYDOC))
    for text in (*TEXTS, *special):
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids
        assert found.decode(ids) == expected.decode(ids)
    assert pretrained.read_config(path).stop_tokens == (vocabulary["eos_token_id"],)
    assert not pretrained.has_chat_template(path)


class TestRefused:
    """Refused by name before any weight is read, with the fix."""

    def model(self):
        return writing.read_checkpoint(fixtures.FIXTURES / "qwen3")

    def test_an_architecture(self, tmp_path):
        path = writing.write(tmp_path / "a.gguf", *self.model(), architecture="rwkv7")
        with pytest.raises(ValueError, match="'rwkv7'.*llama, qwen2.*safetensors"):
            pretrained.load(path)

    def test_olmo_3_windows_and_an_unknown_pretokenizer(self, tmp_path):
        raw, tensors = writing.read_checkpoint(fixtures.FIXTURES / "olmo2")
        path = tmp_path / "a.gguf"
        writing.write(path, raw | dict(sliding_window=8), tensors)
        for read in (pretrained.load, lambda path: make_plan(path, "1GB")):
            with pytest.raises(ValueError, match="olmo2.*window is 8.*safetensors"):
                read(path)
        vocabulary = writing.VOCABULARY | dict(pre="tekken")
        writing.write(path, raw, tensors, vocabulary=vocabulary)
        assert make_plan(path, "1GB")
        with pytest.raises(ValueError, match="'tekken'.*tokenizer.json"):
            pretrained.load(path)

    def test_an_unsupported_tensor_type(self, tmp_path, monkeypatch):
        path = writing.write(tmp_path / "a.gguf", *self.model(), kind="BF16")
        assert pretrained.load(path)
        path = path.rename(tmp_path / "b.gguf")
        monkeypatch.setattr(stored, "KINDS", ("F32",))
        with pytest.raises(ValueError, match="types.*'BF16'.*another quantization"):
            pretrained.load(path)

    def test_an_unused_tensor(self, tmp_path):
        raw, tensors = self.model()
        tensors["blk.0.attn_gate.weight"] = np.ones((32, 32), np.float32)
        path = writing.write(tmp_path / "a.gguf", raw, tensors)
        with pytest.raises(ValueError, match="attn_gate"):
            pretrained.load(path)

    def test_damaged_and_foreign_files(self, tmp_path):
        path = writing.write(tmp_path / "a.gguf", *self.model())
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="damaged or cut off"):
            pretrained.load(path)
        rng = np.random.default_rng(0)
        head = whole.index(b"output_norm") + 100
        for place in rng.integers(4, head, 200):
            path.write_bytes(whole[:place])
            with pytest.raises(ValueError, match="damaged or cut off"):
                read_file(path)
            changed = bytearray(whole)
            changed[place : place + 4] = rng.bytes(4)
            path.write_bytes(changed)
            with contextlib.suppress(ValueError):  # a changed number may be valid
                read_file(path)
        many = len(whole).to_bytes(8, "little")  # more fields than bytes
        path.write_bytes(whole[:16] + many + whole[24:])
        with pytest.raises(ValueError, match="ends before its metadata"):
            read_file(path)
        path.write_bytes(whole[:4] + whole[4:8][::-1] + whole[8:])
        with pytest.raises(ValueError, match="big-endian"):
            read_file(path)
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
        with pytest.raises(ValueError, match="is not a GGUF file: it begins with"):
            pretrained.load(path)
        with pytest.raises(ValueError, match="pickle.*safetensors"):
            pretrained.load(tmp_path / "pytorch_model.bin")
        with pytest.raises(FileNotFoundError, match="or a GGUF file"):
            pretrained.load(tmp_path / "cache")

    @pytest.mark.parametrize(
        "key, value, words",
        [
            ("qwen3.attention.head_count", 0, "an int of 1 or more"),
            ("qwen3.attention.head_count", "two", "an int of 1 or more"),
            ("qwen3.attention.head_count_kv", [[1], [1]], "an int of 1 or more"),
            ("qwen3.attention.head_count_kv", [], "an int of 1 or more"),
            ("qwen3.block_count", -1, "an int of 1 or more"),
            ("qwen3.block_count", 2.0, "an int of 1 or more"),
            ("qwen3.embedding_length", True, "an int of 1 or more"),
            ("qwen3.feed_forward_length", [64, 64], "an int of 1 or more"),
            ("qwen3.context_length", "long", "an int of 1 or more"),
            ("qwen3.rope.freq_base", 0.0, "a number above 0"),
            ("qwen3.rope.freq_base", float("nan"), "a number above 0"),
            ("qwen3.attention.layer_norm_rms_epsilon", "small", "a number above 0"),
            ("qwen3.rope.dimension_count", 0, "an int of 1 or more"),
            ("qwen3.rope.scale_linear", "2", "a number of 0 or more"),
            ("qwen3.rope.scaling.factor", -2.0, "a number of 0 or more"),
            ("qwen3.attention.sliding_window_pattern", 0, "an int of 1 or more"),
            ("qwen3.attention.sliding_window_pattern", [1, 0], "a list with true or"),
            ("tokenizer.ggml.fim_pad_token_id", "<pad>", "an int of 0 or more"),
            ("tokenizer.ggml.tokens", 5, "a list of texts"),
            ("tokenizer.ggml.tokens", [["a"], ["b"]], "a list of texts"),
            ("tokenizer.ggml.tokens", [1, 2], "a list of texts"),
            ("tokenizer.ggml.merges", "a b", "a list of texts"),
            ("tokenizer.ggml.scores", ["a"], "a list of numbers"),
            (
                "tokenizer.ggml.token_type",
                [1, 1],
                "must have 128 entries, one for each token, got 2",
            ),
            (
                "tokenizer.ggml.eos_token_id",
                128,
                "must be below 128, the number of tokens",
            ),
            ("tokenizer.ggml.bos_token_id", [1], "an int of 0 or more"),
            ("tokenizer.ggml.add_bos_token", "yes", "true or false"),
            ("tokenizer.chat_template", 7, "a text"),
        ],
    )
    def test_metadata_of_wrong_types(self, tmp_path, monkeypatch, key, value, words):
        """Errors name the file and the key."""
        path = writing.write(tmp_path / "a.gguf", *self.model())
        read = gguf_file._Reader.read_head

        def read_wrongly(reader):
            metadata, tensors = read(reader)
            return metadata | {key: value}, tensors

        monkeypatch.setattr(gguf_file._Reader, "read_head", read_wrongly)
        with pytest.raises(ValueError, match=f"a.gguf: {key} .*{words}"):
            read_file(path)

    def test_ernie_without_a_router(self, tmp_path):
        raw, tensors = writing.read_checkpoint(fixtures.FIXTURES / "ernie4_5_moe")
        dense = {
            name: each for name, each in tensors.items() if "mlp.gate." not in name
        }
        path = writing.write(tmp_path / "a.gguf", raw, dense)
        with pytest.raises(ValueError, match=r"blk\.N\.ffn_gate_inp\.weight"):
            pretrained.load(path)

    def test_deeply_nested_arrays(self, tmp_path):
        def number(value, size):
            return value.to_bytes(size, "little")

        path = tmp_path / "a.gguf"
        nested = (number(9, 4) + number(1, 8)) * 100_000
        path.write_bytes(
            b"GGUF"
            + number(3, 4)
            + number(0, 8)
            + number(1, 8)
            + number(1, 8)
            + b"a"
            + number(9, 4)
            + nested
        )
        with pytest.raises(ValueError, match="a.gguf is damaged"):
            read_file(path)

    def test_a_missing_part_and_an_ambiguous_choice(self, tmp_path):
        name = "model-{:05d}-of-00002.gguf"
        writing.write(tmp_path / name.format(1), *self.model())
        with pytest.raises(FileNotFoundError, match="lacks the parts.*00002-of-00002"):
            pretrained.load(tmp_path)
        (tmp_path / "other.gguf").touch()
        with pytest.raises(ValueError, match="several GGUF models: name one of"):
            pretrained.load(tmp_path)

    def test_without_the_package(self, tmp_path, monkeypatch):
        path = writing.write(tmp_path / "a.gguf", *self.model())
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ModuleNotFoundError, match="pip install"):
            pretrained.load(path)


def test_a_changed_file_is_read_again(tmp_path):
    raw, tensors = writing.read_checkpoint(fixtures.FIXTURES / "qwen3")
    path = writing.write(tmp_path / "model.gguf", raw, tensors)
    first = pretrained.find_folder(path)
    assert pretrained.find_folder(tmp_path) == first
    path.unlink()
    smaller = raw | dict(max_position_embeddings=64)
    writing.write(path, smaller, tensors)
    assert pretrained.find_folder(path) != first
    assert pretrained.read_config(path).max_context_length == 64
