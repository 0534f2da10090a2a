"""Dequantization at loading, its memory, and expert layers."""

import dataclasses
import json
import re
import shutil
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pretrained
import pytest
from pretrained import checkpoint, experts, files, quantized
from safetensors.numpy import load_file, save_file
from support.checkpoints import checkpoint_fixtures
from support.paths import FIXTURES, ROOT

import jkv

pytestmark = pytest.mark.one_end
CHECKPOINTS = FIXTURES / "checkpoints"


# Quantized matrices


def test_mxfp4_by_hand():
    """Two groups of 32, with scales of 1/2 and 8."""
    codes = np.arange(32, dtype=np.uint8) % 16
    stored = codes[::2] | codes[1::2] << 4
    decoded = quantized.decode_mxfp4(
        np.stack([stored, stored])[None], np.asarray([[126, 130]], np.uint8)
    )
    written = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    expected = np.concatenate([np.divide(written, 2), np.multiply(written, 8)])
    np.testing.assert_array_equal(decoded, expected[None])


def test_fp8_blocks_at_the_edge_are_cropped():
    matrix = np.ones((3, 5), ml_dtypes.float8_e4m3fn)
    scales = np.asarray([[0.1, 2, 3], [4, 5, 6]], np.float32)
    np.testing.assert_array_equal(
        quantized.scale_blocks(matrix, scales, (2, 2)),
        np.float32([[0.1, 0.1, 2, 2, 3], [0.1, 0.1, 2, 2, 3], [4, 4, 5, 5, 6]]),
    )
    with pytest.raises(
        ValueError, match=r"needs scales of shape \(2, 3\), got \(2, 2\)"
    ):
        quantized.scale_blocks(matrix, scales[:, :2], (2, 2))


def test_fp8_with_a_scale_per_matrix(tmp_path):
    """Mistral's form: experts in one tensor have one scale each, [N, 1, 1]."""
    folder = shutil.copytree(CHECKPOINTS / "mistral4", tmp_path / "checkpoint")
    plain, plain_params = pretrained.load(folder)

    def store(name, tensor):
        if "proj" not in name:
            return {name: tensor}
        whole = tuple(range(tensor.ndim))[-2:]
        scales = np.abs(tensor).max(whole, keepdims=tensor.ndim > 2) / np.float32(448)
        stored = (tensor / scales).astype(ml_dtypes.float8_e4m3fn)
        beside = name.removesuffix(".weight") + (
            "_activation_scale" if "experts." in name else ".activation_scale"
        )
        return {
            name: stored,
            f"{name}_scale_inv": np.asarray(scales, ml_dtypes.bfloat16),
            beside: np.float32(1),
        }

    quantization = dict(quant_method="fp8", activation_scheme="static")
    checkpoint_fixtures._rewrite_tensors(folder, store, quantization)
    model, params = pretrained.load(folder)
    assert model.config == plain.config
    for layer, expected in zip(params["layers"], plain_params["layers"], strict=True):
        for name in expected:
            largest = np.abs(expected[name]).max()
            np.testing.assert_allclose(layer[name], expected[name], atol=largest / 20)
    experts = params["layers"][1]["expert_up"]
    assert not np.array_equal(experts, plain_params["layers"][1]["expert_up"])
    with pytest.raises(ValueError, match="needs one scale, got 2"):
        quantized.scale_blocks(np.ones((2, 2), np.float32), np.ones(2), None)


@pytest.mark.parametrize("name, method", [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")])
def test_quantized_checkpoints_need_their_settings(tmp_path, name, method):
    folder = shutil.copytree(CHECKPOINTS / name, tmp_path / name)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    assert settings.pop("quantization_config")["quant_method"] == method
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="would not use"):
        pretrained.load(folder)


def test_a_missing_scale_is_named(tmp_path):
    folder = shutil.copytree(CHECKPOINTS / "deepseek_v3", tmp_path / "checkpoint")
    # numpy has no type for the stored dtype: bytes suffice here.
    path = folder / "model.safetensors"
    header, first = files._read_header(path)
    name = next(name for name in header if name.endswith("q_a_proj.weight_scale_inv"))
    del header[name]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[first:])
    with pytest.raises(ValueError):
        pretrained.load(folder)


# Memory


def write_large(folder, dtype):
    """Write a checkpoint of 7 MB and return the size of its largest tensor in bytes."""
    settings = dict(
        model_type="llama",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    (folder / "config.json").write_text(json.dumps(settings))
    config = pretrained.read_config(folder)
    sources = dict(checkpoint.model_tensors(config))
    for i, run in enumerate(config.runs):
        for name, source in checkpoint.layer_tensors(config, run).items():
            full = f"model.layers.{i}.{source.name}"
            sources[f"{i} {name}"] = source._replace(name=full)
    tensors = {s.name: np.ones(s.stored, dtype) for s in sources.values()}
    save_file(tensors, folder / "model.safetensors")
    return max(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loading_needs_the_weights_and_one_tensor(tmp_path, monkeypatch, dtype):
    largest = write_large(tmp_path, np.float16)
    put, copies = jax.device_put, []

    def put_and_compare(array):
        result = put(array)
        if result.unsafe_buffer_pointer() != array.ctypes.data:
            copies.append(array.nbytes)
        return result

    monkeypatch.setattr(checkpoint.jax, "device_put", put_and_compare)
    pretrained.load(tmp_path, dtype)  # imports and warm-up
    tracemalloc.start()
    _, params = pretrained.load(tmp_path, dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert not copies
    assert weights < peak < weights + 1.2 * largest
    # A copied parameter stack would exceed the limit.
    assert 4 * 768 * 256 * dtype.dtype.itemsize > 2 * largest


# Devices


@pytest.mark.parametrize(
    "name, whole",
    [
        # Keys and queries of Mamba 2 are grouped, shared by heads.
        ("bamba", {f"mamba_{n}{s}" for n in "bc" for s in ("", "_taps", "_taps_bias")}),
        ("lfm2_moe", {"short_output_bias"}),
    ],
)
def test_devices_shard_the_heads_of_states(name, whole):
    model, params = pretrained.load(CHECKPOINTS / name)
    kept = {
        parameter
        for run in params["layers"]
        for parameter, array in run.items()
        if parameter.startswith(("mamba_", "short_"))
        and not pretrained.find_divided_axis(model.config, parameter, array.shape, 2)
    }
    assert kept == whole


# The page


def test_the_page_shows_the_tested_code():
    page = (ROOT / "docs/how-to/architectures.md").read_text()
    rows = (ROOT / "examples/pretrained/architectures.py").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown in rows
    counted = f"{len(pretrained.ARCHITECTURES)} architectures"
    assert counted in (ROOT / "README.md").read_text()
    assert f"[{counted}]" in (ROOT / "docs/coming-from.md").read_text()
    for name in pretrained.ARCHITECTURES:
        assert f"`{name}`" in page, name


# Expert layers


def tiny_experts(num_rows, **changes):
    """Return settings, expert weights of two layers, rows, and their choices."""
    config = pretrained.read_config(CHECKPOINTS / "gpt_oss")
    sizes = dataclasses.replace(config.experts, **changes)
    config = dataclasses.replace(config, experts=sizes)
    draw = np.random.default_rng(0).normal
    shapes = dict(gate=(32, 32), up=(32, 32), down=(32, 32))
    weights = {f"expert_{n}": draw(size=(2, 4, *s)) for n, s in shapes.items()}
    weights |= {f"expert_{n}_bias": draw(size=(2, 4, s[1])) for n, s in shapes.items()}
    weights = jax.tree.map(jnp.float32, weights)
    rows = jnp.float32(draw(size=(num_rows, 32)))
    return config, weights, rows


apply = jax.jit(experts.apply_experts, static_argnums=0)


def test_no_row_is_dropped_if_all_choose_one_expert():
    """More rows than a tile, all for the third expert; equals a dense computation."""
    config, weights, rows = tiny_experts(num_rows=50)
    chosen = np.stack([np.full(50, 2), np.arange(50) % 2 + np.arange(50) // 25], axis=1)
    chosen = np.where(chosen[:, 1:] == 2, [[2, 3]], chosen).astype(np.int32)
    gates = np.random.default_rng(1).uniform(size=(50, 2)).astype(np.float32)
    valid = np.arange(50) != 7
    got = apply(config, weights, jnp.int32(1), rows, chosen, gates, valid)

    every = []
    for expert in range(4):
        one = {n: w[1, expert] for n, w in weights.items()}
        up, gate = (
            rows @ one[f"expert_{n}"] + one[f"expert_{n}_bias"][None]
            for n in ("up", "gate")
        )
        gated = experts.activate(config, gate, up)
        every.append(gated @ one["expert_down"] + one["expert_down_bias"][None])
    expected = sum(
        gates[:, [i]] * np.stack(every, 1)[np.arange(50), chosen[:, i]]
        for i in range(2)
    )
    expected[7] = 0
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    assert np.abs(expected).max() > 10

    # A NaN row does not affect the expert's other rows.
    spoilt = apply(
        config, weights, jnp.int32(1), rows.at[3].set(jnp.nan), chosen, gates, valid
    )
    assert np.isnan(spoilt[3]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(got, 3, 0))


def test_only_used_experts_are_computed():
    """Work is proportional to the rows: tiles, counted by the loop's trips."""
    config, weights, rows = tiny_experts(num_rows=40)
    gates = np.ones((40, 2), np.float32)
    trips = []

    def count(first, last, _, total):
        trips.append(int(last - first))
        return total

    def tiles(chosen, valid=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts.jax.lax, "fori_loop", count)
            experts.apply_experts(
                config, weights, 0, rows, jnp.int32(chosen), gates, np.full(40, valid)
            )
        return trips.pop()

    everyone = np.tile([0, 3], (40, 1))
    assert tiles(everyone) == 6  # of 16 rows: three for each of two experts
    assert tiles(np.stack([np.arange(40) % 2, np.full(40, 2)], 1)) == 2 + 2 + 3
    assert tiles(everyone, valid=False) == 0


def test_invalid_expert_groups_are_refused():
    for changes, message in (
        (dict(groups=3), "cannot be split into 3 groups"),
        (dict(groups=2, groups_per_token=3), "into 2 groups .* 3 per token"),
        (
            dict(groups=4, groups_per_token=2, has_sigmoid=True),
            "4 groups of 4 experts have one each",
        ),
        (dict(per_token=5), "cannot use 5 of 4 experts"),
        (dict(per_token=3, groups=2), "cannot use 3 of 4 experts in 1 of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_experts(1, **changes)


@pytest.mark.parametrize(
    "name", ["gemma2", "phi3", "gpt_oss", "qwen3_moe", "deepseek_v3"]
)
def test_random_params_are_structured_as_loaded_ones(name):
    model, params = pretrained.load(CHECKPOINTS / name)
    draw = partial(pretrained.random_params, model.config, dtype=jnp.float16)
    drawn = jax.eval_shape(draw, jax.random.key(0))
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize(
    "name", ["gemma2", "phi3", "granite", "gpt_oss", "deepseek_v3"]
)
def test_activations_have_the_dtype_of_the_parameters(name):
    """Traced in bfloat16: strict promotion rejects mixed dtypes."""
    model = pretrained.Decoder(pretrained.read_config(CHECKPOINTS / name))
    draw = partial(pretrained.random_params, model.config, dtype=jnp.bfloat16)
    params = jax.eval_shape(draw, jax.random.key(0))
    sizes = dict(num_blocks=4, max_sequences=2, max_context_length=16)
    cache = jkv.init(jkv.CacheConfig(**model.cache_fields, **sizes, dtype=jnp.bfloat16))
    cache, opened = jkv.allocate(cache, [0])
    cache, batch = jkv.append(cache, opened.seq_ids, 3, capacity=4)
    tokens = jnp.zeros(4, jnp.int32)
    logits, after = jax.eval_shape(model, params, tokens, cache, batch)
    assert (logits.shape, logits.dtype) == ((1, model.config.vocab_size), jnp.float32)
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    assert kinds == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]


def stack_experts(tensors):
    """Stack the matrices of experts in two tensors of each layer."""
    kept = {n: tensor for n, tensor in tensors.items() if ".experts." not in n}
    for layer in {n.partition(".experts.")[0] for n in tensors.keys() - kept}:
        count = sum(n.startswith(f"{layer}.experts.") for n in tensors) // 3
        gate, up, down = (
            np.stack(
                [tensors[f"{layer}.experts.{i}.{p}_proj.weight"] for i in range(count)]
            )
            for p in ("gate", "up", "down")
        )
        kept[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        kept[f"{layer}.experts.down_proj"] = down
    return kept


@pytest.mark.parametrize("name", ["qwen3_5_moe", "ernie4_5_moe"])
def test_experts_may_be_stacked(tmp_path, name):
    """As in Qwen3.5-35B-A3B, and as transformers 5 can save all."""
    folder = shutil.copytree(CHECKPOINTS / name, tmp_path / "checkpoint")
    stacked = stack_experts(load_file(folder / "model.safetensors"))
    assert not any(".experts.0." in each for each in stacked)
    save_file(stacked, folder / "model.safetensors")
    model, params = pretrained.load(folder)
    expected, expected_params = pretrained.load(CHECKPOINTS / name)
    assert model.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


def test_extra_prediction_layers_are_skipped(tmp_path):
    folder = shutil.copytree(CHECKPOINTS / "qwen3_moe", tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.3.input_layernorm.weight"
    tensors[name] = np.ones(32, np.float16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"would not use.*layers\.3"):
        pretrained.load(folder)
    config = pretrained.read_config(folder)
    config = dataclasses.replace(config, num_guessing_layers=1)
    assert len(pretrained.read_params(folder, config)["layers"]) == 3
