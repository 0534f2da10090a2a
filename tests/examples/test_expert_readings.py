"""Published config.json files of GLM, Hunyuan, ERNIE and others."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pretrained
import pretrained.rope as rope
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.checkpoints import published_models as published
from support.paths import FIXTURES

pytestmark = pytest.mark.one_end


def parse(name, **changes):
    return pretrained.parse_config({**getattr(published, name), **changes})


def test_glm():
    config = parse("GLM4_9B")
    assert (config.norms, config.qk_norm) == ("both", None)
    assert config.has_qkv_bias and not config.has_output_bias
    (turned,) = set(config.ropes)
    assert (turned.dim, turned.is_interleaved) == (64, True)
    assert not parse("GLM4_9B", attention_bias=False).has_qkv_bias
    older = parse("GLM4_9B", model_type="glm", architectures=["GlmForCausalLM"])
    assert older == dataclasses.replace(config, architecture="glm", norms="before")


def test_experts_of_glm():
    air = parse("GLM4_5_AIR")
    assert air.experts == pretrained.parts.Experts(
        count=128,
        per_token=8,
        inner=1408,
        shared_inner=1408,
        has_sigmoid=True,
        has_choice_bias=True,
        is_normalised=True,
    )
    assert air.expert_layers == (False, *[True] * 45)
    assert air.has_qkv_bias and not air.has_output_bias
    assert air.qk_norm is None and parse("GLM4_5_AIR", use_qk_norm=True).qk_norm
    assert air.num_guessing_layers == 1
    (turned,) = set(air.ropes)
    assert (turned.dim, turned.is_interleaved) == (64, False)
    flash = parse("GLM4_7_FLASH")
    assert (flash.latent.rank, flash.latent.query_rank) == (512, 768)
    assert flash.experts.scale == 1.8 and flash.experts.per_token == 4
    (turned,) = set(flash.ropes)
    assert (turned.dim, turned.is_interleaved) == (64, True)


def test_hunyuan():
    dense, moe = parse("HUNYUAN_1_8B"), parse("HUNYUAN_A13B")
    (turned,) = set(dense.ropes)
    assert turned.scaling == "default"
    assert turned.theta == pytest.approx(10_000 * 1000 ** (128 / 126))
    assert dense.qk_norm == moe.qk_norm == "turned"
    experts = moe.experts
    assert (experts.count, experts.per_token, experts.inner) == (64, 8, 3072)
    assert experts.shared_inner == 3072 and experts.is_normalised
    assert all(moe.expert_layers)
    # Without alpha it is plain dynamic scaling.
    rope_scaling = dict(type="dynamic", factor=2.0)
    assert parse("HUNYUAN_1_8B", rope_scaling=rope_scaling).ropes[0].scaling == (
        "dynamic"
    )


def test_ernie():
    dense, moe = parse("ERNIE_0_3B"), parse("ERNIE_21B")
    assert dense.head_dim == moe.head_dim == 128
    assert dense.tied and not dense.has_qkv_bias and not dense.has_mlp_bias
    assert dense.ropes[0].is_interleaved and dense.ropes[0].theta == 500_000
    experts = moe.experts
    assert (experts.count, experts.per_token, experts.inner) == (64, 6, 1536)
    assert experts.shared_inner == 3072 and experts.has_choice_bias
    assert moe.expert_layers == (False, *[True] * 27) and not moe.has_head_bias
    # ERNIE-4.5-300B-A47B has no shared experts.
    assert parse("ERNIE_21B", moe_num_shared_experts=0).experts.shared_inner == 0
    biased = parse("ERNIE_21B", use_bias=True)
    assert biased.has_qkv_bias and biased.has_output_bias and biased.has_mlp_bias
    assert biased.has_head_bias


def test_qwen2_moe():
    config = parse("QWEN2_57B")
    experts = config.experts
    assert (experts.count, experts.per_token, experts.inner) == (64, 8, 2560)
    assert experts.shared_inner == 20_480 and experts.has_shared_gate
    assert not experts.is_normalised and all(config.expert_layers)
    assert config.has_qkv_bias and not config.has_output_bias
    assert set(config.windows) == {None}
    windowed = dict(use_sliding_window=True, max_window_layers=3)
    windows = parse("QWEN2_57B", **windowed).windows
    assert windows == (65_536, None, 65_536, *[None] * 25)


def test_minimax_m2():
    config = parse("MINIMAX_M2")
    experts = config.experts
    assert (experts.count, experts.per_token, experts.inner) == (256, 8, 1536)
    assert experts.has_sigmoid and experts.is_normalised and not experts.shared_inner
    assert config.qk_norm == "all" and config.ropes[0].dim == 64
    assert config.quantization.block == (128, 128)
    # In the newer form of config.json.
    newer = dict(rope_theta=5e6, rope_type="default", partial_rotary_factor=0.5)
    again = parse("MINIMAX_M2", rope_parameters=newer, rotary_dim=None, rope_theta=None)
    assert again.ropes == config.ropes


def test_phimoe():
    config = parse("PHI_3_5_MOE")
    assert config.has_centred_norms and config.has_norm_bias and config.has_head_bias
    assert config.has_qkv_bias and config.has_output_bias
    assert config.experts.jitter == 0.01 and config.experts.per_token == 2
    (turned,) = set(config.ropes)
    assert turned.magnitude == turned.long_magnitude == 1.243163121016122
    assert turned.original_context == 4096
    plain = parse("PHI_3_5_MOE", rope_scaling=None)
    assert plain.ropes[0] == pretrained.Rope(dim=128)


def test_longrope_magnitudes():
    """For sequences around the original length, and for a fixed length."""
    turned = pretrained.Rope(
        dim=4,
        scaling="longrope",
        original_context=8,
        short_factors=(1.0, 1.0),
        long_factors=(2.0, 4.0),
        magnitude=1.5,
        long_magnitude=2.5,
    )
    positions, lengths = np.asarray([3, 3], np.int32), np.asarray([8, 9], np.int32)
    lengths_of = np.hypot(*rope.turns(turned, 4, positions, lengths))[:, 0]
    np.testing.assert_allclose(lengths_of, [[1.5, 1.5], [2.5, 2.5]], rtol=1e-6)
    for longest, magnitude in (8, 1.5), (9, 2.5):
        fixed = rope.fix_length(turned, longest)
        assert (fixed.magnitude, fixed.long_magnitude) == (magnitude, None)


@pytest.mark.parametrize(
    ("name", "settings", "guesses", "other"),
    [
        (
            "glm4_moe",
            {},
            "model.layers.2.eh_proj.weight",
            "model.layers.3.eh_proj.weight",
        ),
        (
            "minimax_m2",
            dict(num_mtp_modules=3),
            "model.layers.4.e_proj.weight",
            "model.layers.5.e_proj.weight",
        ),
        (
            "ernie4_5_moe",
            {},
            "model.mtp_linear_proj.0.weight",
            "model.layers.0.mlp.experts.6.up_proj.weight",
        ),
    ],
)
def test_multi_token_prediction_layers_are_skipped(
    name, settings, guesses, other, tmp_path
):
    folder = Path(shutil.copytree(FIXTURES / "checkpoints" / name, tmp_path / name))
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | settings))
    path = folder / "extra.safetensors"
    whole = folder / "model.safetensors"
    with safe_open(whole, "numpy") as file:
        shards = dict.fromkeys(file.keys(), "whole.safetensors")
    whole.rename(folder / "whole.safetensors")

    def add(*names):
        save_file({name: np.zeros((2, 2), np.float32) for name in names}, path)
        weight_map = shards | dict.fromkeys(names, path.name)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps(dict(weight_map=weight_map)))

    add(guesses)
    pretrained.load(folder)
    add(guesses, other)
    with pytest.raises(ValueError, match=f"1 tensors.*{re.escape(other)}"):
        pretrained.load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("HUNYUAN_1_8B", dict(use_cla=True), "use_cla True"),
        ("HUNYUAN_1_8B", dict(use_qk_norm=False), "use_qk_norm False"),
        (
            "HUNYUAN_1_8B",
            dict(rope_scaling=published.HUNYUAN_ROPE | dict(alpha="x")),
            "'alpha' must be a number above 0, got 'x'",
        ),
        ("HUNYUAN_A13B", dict(moe_topk=[8, 4]), "'moe_topk'.*same for all layers"),
        ("HUNYUAN_A13B", dict(moe_intermediate_size=16), "experts of 16 units"),
        ("HUNYUAN_A13B", dict(moe_layer_num_skipped=2), "moe_layer_num_skipped 2"),
        ("HUNYUAN_A13B", dict(use_mixed_mlp_moe=False), "use_mixed_mlp_moe False"),
        # ERNIE's vision-language models have two kinds of experts.
        (
            "ERNIE_21B",
            dict(moe_num_experts=[64, 64]),
            "'moe_num_experts' must be an int",
        ),
        ("MINIMAX_M2", dict(attn_type_list=[0] * 62), "lightning attention"),
        ("MINIMAX_M2", dict(qk_norm_type="per_head"), "qk_norm_type 'per_head'"),
        ("MINIMAX_M2", dict(scoring_func="softmax"), "scoring_func 'softmax'"),
        ("MINIMAX_M2", dict(use_routing_bias=False), "use_routing_bias False"),
        ("MINIMAX_M2", dict(shared_intermediate_size=8), "shared_intermediate_size 8"),
        (
            "PHI_3_5_MOE",
            dict(rope_scaling=dict(type="linear", factor=2.0)),
            "longrope, with a short_mscale",
        ),
        ("PHI_3_5_MOE", dict(num_experts_per_tok=3), "num_experts_per_tok 3"),
        ("GLM4_5_AIR", dict(topk_method="greedy"), "topk_method 'greedy'"),
        ("GLM4_9B", dict(model_type="chatglm"), "architecture 'chatglm'"),
    ],
)
def test_unsupported_expert_settings_are_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(name, **changes)
