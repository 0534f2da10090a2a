"""Settings of architectures of 2026: defaults of transformers, and what is refused."""

import json

import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures

pytestmark = pytest.mark.one_end


# What a config.json may leave out of layers without experts, windows, or both.
LEFT_OUT = [
    ("mellum", dict(sliding_window=8)),
    ("laguna", dict(num_hidden_layers=3)),
    ("laguna", dict(gating="per-element", num_attention_heads_per_layer=[48, 64] * 20)),
    ("cohere2_moe", dict(rms_norm_eps=1e-6, num_shared_experts=1)),
    (
        "cohere2_moe",
        dict(first_k_dense_replace=3, prefix_dense_sliding_window_pattern=2),
    ),
    ("muse_glimmer_text", dict(num_hidden_layers=7)),
    ("lfm3", {}),
    (
        "lfm3",
        dict(use_sandwich_norm=False, layer_types=["conv", "full_attention"] * 12),
    ),
    ("zaya", dict(moe_intermediate_size=64)),
    (
        "zaya",
        dict(layer_types=["hybrid", "hybrid_sliding"] * 20, sliding_window=8),
    ),
    ("bailing_hybrid", dict(head_dim=96, num_hidden_layers=9)),
    ("bailing_hybrid", dict(kda_safe_gate=False, q_lora_rank=64, layer_group_size=3)),
]


@pytest.mark.parametrize(("model_type", "given"), LEFT_OUT)
def test_settings_left_out_are_those_of_transformers(model_type, given):
    transformers = pytest.importorskip("transformers")
    written = transformers.CONFIG_MAPPING[model_type](**given, dtype="float32")
    raw = json.loads(written.to_json_string(use_diff=False))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    needed = (*sizes, "num_attention_heads", "eos_token_id")
    sparse = {name: raw[name] for name in needed if name in raw} | given
    found = pretrained.parse_config(dict(model_type=model_type, **sparse))
    assert found == pretrained.parse_config(raw)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("laguna", dict(gating="per-token"), "gating must be"),
        ("laguna", dict(num_attention_heads_per_layer=[4]), "2 multiples of 2"),
        (
            "laguna",
            dict(moe_apply_router_weight_on_input=True),
            "moe_apply_router_weight_on_input",
        ),
        (
            "mellum",
            dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
            "RoPE settings must have those of full_attention and sliding",
        ),
        ("cohere2_moe", dict(expert_selection_fn="relu"), "expert_selection_fn"),
        ("lfm3", dict(layer_types=["conv", "moe", "mamba2"]), "3 layers must be some"),
        (
            "lfm3",
            dict(rope_parameters=dict(full_attention={})),
            "RoPE settings must have those of sliding_attention and full_attention",
        ),
        ("zaya", dict(cca_time0=1, cca_time1=1), "must not both be 1"),
        ("zaya", dict(num_experts_per_tok=2), "num_experts_per_tok must be 1"),
        ("zaya", dict(layer_types=["hybrid", "mamba"]), "each hybrid or hybrid_slid"),
        ("bailing_hybrid", dict(kda_lower_bound=1.0), "kda_lower_bound must be"),
        (
            "muse_glimmer",
            dict(layer_rope_theta=[0, 5e5]),
            "layer_rope_theta must have 2 numbers, each 0 or the rope_theta 10000.0",
        ),
    ],
)
def test_settings_that_are_not_computed_are_refused(name, changes, message):
    settings = json.loads((fixtures.FIXTURES / name / "config.json").read_text())
    settings = settings.get("text_config", settings)
    with pytest.raises(ValueError, match=message):
        pretrained.parse_config(settings | changes)


def test_observed_queries_need_layers_with_equally_many_query_heads():
    model = pretrained.Decoder(pretrained.read_config(fixtures.FIXTURES / "laguna"))
    with pytest.raises(ValueError, match=r"equally many query heads.*\[4, 8\]"):
        model.cache_config(32, max_sequences=1, observed_queries=4)
