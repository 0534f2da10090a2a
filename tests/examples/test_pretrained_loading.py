"""Reading config.json, safetensors and tokenizer.json, and refusing unknown values.

Settings that the model would compute wrongly are refused by name at loading.
"""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pretrained.rope as rope
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from support.paths import FIXTURES

import jkv
from jkv.config.huggingface import read_sizes

pytestmark = pytest.mark.one_end
CHECKPOINTS = FIXTURES / "checkpoints"

SMALLEST = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def parse(**changes):
    return pretrained.parse_config({**SMALLEST, **changes})


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder to damage: small, tied, in one file."""
    return Path(shutil.copytree(CHECKPOINTS / "llama3", tmp_path / "checkpoint"))


def rewrite_tensors(folder, change):
    """Apply `change` to the tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# config.json


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 100, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3},
        ),
        ({"rope_scaling": None}, None),
    ],
    ids=["default", "linear", "llama3", "none"],
)
def test_old_and_new_rope_settings_mean_the_same(old, new):
    assert parse(**old) == parse(rope_parameters=new)
    assert (parse(**old) == parse()) == (new is None)


def test_frequencies_of_each_scaling():
    base = np.asarray([1, 1e-1, 1e-2, 1e-3], np.float32)
    np.testing.assert_allclose(rope.frequencies(pretrained.Rope(dim=8)), base)
    linear = pretrained.Rope(dim=8, scaling="linear", factor=4.0)
    np.testing.assert_allclose(rope.frequencies(linear), base / 4)

    # 64 tokens hold 10.2 periods of the first frequency, 1.02 of the second, less of
    # the others: kept, almost fully scaled, scaled, scaled.
    settings = {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": 64}
    llama3 = parse(rope_parameters=settings, head_dim=8).ropes[0]
    kept = (64 * 0.1 / (2 * np.pi) - 1) / 3
    factors = [1, kept + (1 - kept) / 8, 1 / 8, 1 / 8]
    np.testing.assert_allclose(rope.frequencies(llama3), base * factors, rtol=1e-6)


def test_llama3_finds_its_context_like_transformers():
    settings = {"rope_type": "llama3", **LLAMA3}
    del settings["original_max_position_embeddings"]
    assert parse(rope_scaling=settings).ropes[0].original_context == 64
    beside = parse(rope_scaling=settings, original_max_position_embeddings=32)
    assert beside.ropes[0].original_context == 32


def test_windows_of_each_architecture():
    assert parse(sliding_window=4).windows == (None, None)  # Llama has none
    mistral = {"model_type": "mistral", "num_key_value_heads": 2}
    assert parse(**mistral, sliding_window=4).windows == (4, 4)
    assert parse(**mistral, sliding_window=None).windows == (None, None)
    assert parse(**mistral).windows == (4096, 4096)  # transformers' default

    qwen = {"model_type": "qwen2", "sliding_window": 4}
    assert parse(**qwen).windows == (None, None)
    assert parse(**qwen, use_sliding_window=True).windows == (None, None)
    mixed = parse(**qwen, use_sliding_window=True, max_window_layers=1)
    assert mixed.windows == (None, 4)
    kinds = ["sliding_attention", "full_attention"]
    named = parse(**qwen, use_sliding_window=True, layer_types=kinds)
    assert named.windows == (4, None)


def test_defaults_of_missing_config_keys():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.tied) == (2, 4, False)
    assert set(config.ropes) == {pretrained.Rope(dim=4, theta=10_000.0)}
    assert parse(model_type="qwen3").head_dim == 128
    assert parse(model_type="qwen2").has_qkv_bias
    assert not parse(model_type="qwen2").has_output_bias
    assert parse(attention_bias=True).has_output_bias
    assert parse(eos_token_id=[3, 4]).stop_tokens == (3, 4)
    assert parse(eos_token_id=None).stop_tokens == ()


def test_stop_tokens_come_from_generation_config(folder):
    assert pretrained.read_config(folder).stop_tokens == (2,)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert pretrained.read_config(folder).stop_tokens == (7, 8)
    # And the end-of-turn token that only the tokenizer names.
    ends = {"8": {"content": "</s>"}, "9": {"content": "<|im_end|>"}}
    for token in ("<|im_end|>", {"content": "<|im_end|>"}):
        settings = {"eos_token": token, "added_tokens_decoder": ends}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert pretrained.read_config(folder).stop_tokens == (7, 8, 9)
    # Older checkpoints name it in a separate file, and its id with the tokens.
    (folder / "tokenizer_config.json").write_text("{}")
    special = {"eos_token": {"content": "<|im_end|>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    added = [{"id": 8, "content": "</s>"}, {"id": 9, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert pretrained.read_config(folder).stop_tokens == (7, 8, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2'; supported are llama, mistral"),
        ({"model_type": None}, "architecture None"),
        ({"model_type": "llama4"}, "a window that differs by row"),
        ({"model_type": "olmoe"}, "architecture 'olmoe'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not predict"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq'"),
        (
            {"quantization_config": dict(quant_method="fp8", weight_block_size=[8])},
            "weight_block_size",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 3}, "2 query heads cannot share 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"hidden_size": 0}, "'hidden_size' must be an int >= 1, got 0"),
        ({"hidden_size": 2**31}, "'hidden_size' must be an int <= 2147483647"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 10000"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number above 0"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' must be a number above 0"),
        ({"hidden_size": None}, "'hidden_size' must be an int >= 1, got None"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2}},
            "'ntk'; supported are default",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "needs a positive 'factor', got None"),
        ({"rope_scaling": {"type": "linear"}}, "needs a positive 'factor', got None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'factor', got '2'"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}},
            "high_freq_factor above low_freq_factor",
        ),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "needs more than 2 rotated components",
        ),
        (
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}},
            "a rope_theta other than 1",
        ),
        (
            {
                "original_max_position_embeddings": 1,
                "rope_scaling": dict(
                    type="longrope", short_factor=[1, 1], long_factor=[1, 1]
                ),
            },
            "original_max_position_embeddings of 2 or more",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "per kind of layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        (
            {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": -1},
            "'sliding_window' must be",
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            "unknown .'chunked_attention'",
        ),
        (
            {
                "model_type": "mistral",
                "layer_types": ["sliding_attention", "full_attention"],
                "num_key_value_heads": 1,
            },
            "mixed layer_types",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


def test_damaged_json_names_its_file(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        pretrained.load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        pretrained.load(folder)


@pytest.mark.parametrize("path", sorted(CHECKPOINTS.glob("*/config.json")), ids=str)
def test_from_model_equals_the_decoder_cache(path):
    config = pretrained.read_config(path.parent)
    if config.has_states:
        given = dict(max_pending=3, step_tokens=16)
        return assert_layers_alike(pretrained.Decoder(config), path, **given)
    if config.layer_heads:
        return assert_layers_alike(pretrained.Decoder(config), path, step_tokens=16)
    found = jkv.CacheConfig.from_model(path, num_blocks=2)
    fields = pretrained.Decoder(config).cache_fields
    assert {name: getattr(found, name) for name in fields} == fields
    assert found.max_context_length == config.max_context_length
    assert read_sizes(path, {}).layer_windows == config.windows


def assert_layers_alike(model, path, **options):
    """Assert that the model's configuration and jkv's have equal layers."""
    sizes = dict(max_sequences=2, dtype="float32") | options
    expected = model.cache_config(64, **sizes)
    found = jkv.GroupedConfig.from_model(path, max_context_length=64, **sizes)
    assert list_layers(found) == list_layers(expected)


def list_layers(config):
    """Return each layer's cached data, in any order of the groups."""
    layers = []
    for numbers in config.groups_of_layers:
        groups = [config.groups[number] for number in numbers]
        kept = {}
        for group in groups:
            fields = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
            axes = fields.pop("heads_axes", None) or {}
            arrays = fields.get("arrays", {})
            axes = {name: axis for name, axis in axes.items() if name in arrays}
            kept[type(group)] = fields, axes
        layers.append(kept)
    return layers


def test_yarn_and_longrope_frequencies_and_lengths():
    """By hand: of four pairs one is kept, one is half blended, two are scaled."""
    yarn = pretrained.Rope(
        dim=8,
        scaling="yarn",
        factor=4.0,
        original_context=628,
        fast_turns=100.0,
        slow_turns=1.0,
        is_truncated=False,
    )
    # 628 tokens hold 100 periods of the first pair, 10 of the second, 1 of the third.
    expected = [1, 1e-1 * (1 + 1 / 4) / 2, 1e-2 / 4, 1e-3 / 4]
    np.testing.assert_allclose(rope.frequencies(yarn), expected, rtol=1e-3)
    longrope = pretrained.Rope(
        dim=4,
        scaling="longrope",
        original_context=16,
        short_factors=(1.0, 2.0),
        long_factors=(4.0, 5.0),
    )
    np.testing.assert_allclose(rope.frequencies(longrope, 16), [1, 1e-2 / 2])
    np.testing.assert_allclose(rope.frequencies(longrope, 17), [1 / 4, 1e-2 / 5])
    # At 3 times the length, theta is multiplied by (2 * 3 - 1) ** (4 / 2).
    dynamic = pretrained.Rope(dim=4, scaling="dynamic", factor=2.0, original_context=16)
    np.testing.assert_allclose(rope.frequencies(dynamic, 10), [1, 1e-2])
    np.testing.assert_allclose(rope.frequencies(dynamic, 48), [1, 1e-2 / 5])
    lengths = jnp.asarray([16, 48], jnp.int32)
    cos, sin = rope.turns(dynamic, 4, jnp.asarray([7, 7], jnp.int32), lengths)
    angles = np.arctan2(sin[:, 0, 1], cos[:, 0, 1])
    np.testing.assert_allclose(angles, [7e-2, 7e-2 / 5], rtol=1e-5)


# Weights


def test_sharded_and_single_checkpoints_are_equal(tmp_path):
    sharded = CHECKPOINTS / "llama2"
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 2
    shutil.copy(sharded / "config.json", tmp_path)
    tensors = {}
    for shard in shards:
        tensors |= load_file(shard)
    # Old checkpoints include this tensor; it is computed instead.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")

    (model, params), (other_model, other) = (
        pretrained.load(sharded),
        pretrained.load(tmp_path),
    )
    assert model == other_model and hash(model) == hash(other_model)
    jax.tree.map(np.testing.assert_array_equal, params, other)
    np.testing.assert_array_equal(
        params["layers"][1]["gate"][0],
        tensors["model.layers.1.mlp.gate_proj.weight"].astype(np.float32),
    )
    assert params["head"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_and_activations_have_the_given_dtype(dtype):
    model, params = pretrained.load(CHECKPOINTS / "qwen3", dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = np.load(CHECKPOINTS / "qwen3" / "expected.npz")
    tokens = jnp.asarray(expected["prompts"][1:17])  # start of the second prompt
    logits = np.asarray(last_logits(model, params, tokens, dtype))
    assert logits.dtype == np.float32
    # Relative to the largest logit: some roundings of 8 and 11 bits.
    limit = {jnp.bfloat16: 0.1, jnp.float16: 0.02}[dtype]
    error = np.abs(logits - expected["prefill"][16]).max() / np.abs(logits).max()
    assert error < limit


forward = jax.jit(lambda model, *args: model(*args), static_argnums=0)


def last_logits(model, params, tokens, dtype=jnp.float32):
    """Return the logits [V] after some tokens of one sequence."""
    config = jkv.CacheConfig(
        **model.cache_fields,
        num_blocks=8,
        block_size=4,
        max_sequences=2,
        max_context_length=32,
        dtype=dtype,
    )
    cache, opened = jkv.allocate(jkv.init(config), 0)
    cache, batch = jkv.append(cache, opened.seq_ids, len(tokens), capacity=len(tokens))
    logits, cache = forward(model, params, tokens, cache, batch)
    assert (cache.num_layers, cache.head_dim) == (config.num_layers, config.head_dim)
    return logits[0]


def test_ids_outside_the_vocabulary_give_nan_logits():
    model, params = pretrained.load(CHECKPOINTS / "llama3")
    good = jnp.asarray([3, 4, 5], jnp.int32)
    assert np.isfinite(last_logits(model, params, good)).all()
    for wrong in (-1, model.config.vocab_size):
        assert np.isnan(last_logits(model, params, good.at[2].set(wrong))).all()


def test_random_params_are_structured_as_loaded_ones():
    for name in ("llama2", "llama_linear", "qwen2", "qwen3"):
        model, params = pretrained.load(CHECKPOINTS / name)
        draw = partial(pretrained.random_params, model.config, dtype=jnp.float16)
        drawn = jax.eval_shape(draw, jax.random.key(0))
        assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, params)
        assert {leaf.dtype for leaf in jax.tree.leaves(drawn)} == {jnp.dtype("float16")}


def test_missing_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        pretrained.load(folder / "nowhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"convert \['pytorch_model.bin'\]"):
        pretrained.load(folder)
    shutil.copytree(CHECKPOINTS / "llama2", folder, dirs_exist_ok=True)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"\['model-00002-of-00003"):
        pretrained.load(folder)


def test_damaged_shard_indices_and_shards_are_named(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com")
    with pytest.raises(ValueError, match="not a readable safetensors file.*LFS"):
        pretrained.load(folder)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not a shard index"):
        pretrained.load(folder)

    for weight_map, words in (
        (None, "weight_map must be an object, got None"),
        (["a"], "weight_map must be an object"),
        ({"a": None}, "weight_map.a must be the name of a file"),
        ({"a": 3}, "weight_map.a must be the name of a file"),
        ({"a": ["b"]}, "weight_map.a must be the name of a file"),
        ({"a": "../b.safetensors"}, "weight_map.a must be the name of a file"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=words):
            pretrained.load(folder)

    # An index that maps a tensor to the wrong shard.
    shutil.copytree(CHECKPOINTS / "llama2", folder, dirs_exist_ok=True)
    contents = json.loads(index.read_text())
    contents["weight_map"]["lm_head.weight"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"does not hold 'lm_head\.weight'"):
        pretrained.load(folder)


def test_missing_misshapen_and_extra_tensors_are_named(folder):
    key = "model.layers.1.self_attn.k_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=f"lacks the tensor '{key}'"):
        pretrained.load(folder)
    wrong = {key: np.zeros((2, 2), np.float16)}
    rewrite_tensors(folder, lambda tensors: tensors.update(wrong))
    with pytest.raises(ValueError, match=rf"'{key}' has shape \(2, 2\), but"):
        pretrained.load(folder)
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float16)}
    rewrite_tensors(folder, lambda tensors: tensors.update(bias))
    with pytest.raises(ValueError, match=r"would not use.*q_proj\.bias"):
        pretrained.load(folder)


@pytest.mark.parametrize("dtype", [np.int8, jnp.float8_e4m3fn])
def test_quantized_tensors_are_refused(folder, dtype):
    key = "model.layers.0.mlp.up_proj.weight"

    def quantize(tensors):
        tensors[key] = tensors[key].astype(dtype)

    rewrite_tensors(folder, quantize)
    with pytest.raises(ValueError, match=f"'{key}' is stored as .*quantized"):
        pretrained.load(folder)


def test_tied_head_must_repeat_the_embedding(folder):
    def add_head(scale):
        def change(tensors):
            embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
            head = (scale * embedding).astype(jnp.bfloat16)
            tensors["lm_head.weight"] = head

        return change

    rewrite_tensors(folder, add_head(1))
    assert "head" not in pretrained.load(folder)[1]
    rewrite_tensors(folder, add_head(2))
    with pytest.raises(ValueError, match="tied to the embedding, but"):
        pretrained.load(folder)
    rewrite_config(folder, tie_word_embeddings=False)
    assert "head" in pretrained.load(folder)[1]
    rewrite_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="is tie_word_embeddings missing"):
        pretrained.load(folder)


def test_alternative_tensor_names(folder):
    """Saved without the prefix, or with only the head of a tied pair."""
    expected = pretrained.load(folder)[1]

    def shorten(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite_tensors(folder, shorten)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(folder)[1], expected)

    def keep_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")
        for name in [*tensors]:
            if name != "lm_head.weight":
                tensors[f"model.{name}"] = tensors.pop(name)

    rewrite_tensors(folder, keep_head)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(folder)[1], expected)


# tokenizer.json


def test_the_tokenizer_is_read(tmp_path):
    alphabet = {character: i for i, character in enumerate("abc ")}
    written = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    written.save(str(tmp_path / "tokenizer.json"))
    tokenizer = pretrained.load_tokenizer(tmp_path)
    assert tokenizer.encode("cab a").ids == [2, 0, 1, 3, 0]
    assert tokenizer.get_vocab_size() == 4


def test_missing_and_damaged_tokenizers_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        pretrained.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a readable tokenizer"):
        pretrained.load_tokenizer(tmp_path)


# The contract with the cache


def test_cache_fields_match_the_model():
    model, _ = pretrained.load(CHECKPOINTS / "qwen3")
    assert model.cache_fields == dict(num_layers=2, num_kv_heads=2, head_dim=16)
    changed = dataclasses.replace(model.config, num_layers=3)
    assert pretrained.Decoder(changed) != model
