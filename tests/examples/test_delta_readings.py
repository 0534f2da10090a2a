"""Published config.json files of models with a gated delta rule."""

import importlib.util
import json

import pretrained
import pytest
from support.paths import FIXTURES

pytestmark = pytest.mark.one_end

QWEN3_NEXT = dict(
    model_type="qwen3_next",
    architectures=["Qwen3NextForCausalLM"],
    full_attention_interval=4,
    head_dim=256,
    hidden_size=2048,
    intermediate_size=5120,
    num_attention_heads=16,
    num_hidden_layers=48,
    num_key_value_heads=2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    num_experts=512,
    num_experts_per_tok=10,
    partial_rotary_factor=0.25,
    rope_theta=10_000_000,
    vocab_size=151_936,
)
KIMI = dict(
    model_type="kimi_linear",
    architectures=["KimiLinearForCausalLM"],
    first_k_dense_replace=1,
    head_dim=72,
    hidden_size=2304,
    intermediate_size=9216,
    kv_lora_rank=512,
    linear_attn_config=dict(
        full_attn_layers=[4, 8],
        kda_layers=[1, 2, 3, 5, 6, 7],
        head_dim=128,
        num_heads=32,
        short_conv_kernel_size=4,
    ),
    model_max_length=1_048_576,
    moe_renormalize=True,
    moe_router_activation_func="sigmoid",
    num_attention_heads=32,
    num_expert_group=1,
    num_experts=256,
    num_experts_per_token=8,
    num_hidden_layers=8,
    num_key_value_heads=32,
    num_shared_experts=1,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    routed_scaling_factor=2.446,
    v_head_dim=128,
    vocab_size=163_840,
)
DELTA, ATTENTION = ("delta_rule",), ("attention",)


def test_qwen3_next_80b():
    config = pretrained.parse_config(QWEN3_NEXT)
    assert config.mixers == 12 * (DELTA, DELTA, DELTA, ATTENTION)
    assert config.ropes[0].dim == 64 and config.expert_layers == (True,) * 48
    # 36 layers of 32 heads of 128 x 128 in float32 are 72 MiB.
    fields = dict(max_sequences=1, dtype="bfloat16")
    states, keys = pretrained.Decoder(config).cache_config(4096, **fields).groups
    assert 36 * 4 * 32 * 128 * 128 == 72 * 2**20
    past = 36 * 4 * 3 * 128 * (16 + 16 + 32)
    assert states.bytes_per_sequence == 72 * 2**20 + past + 36 * 4  # and the bases
    assert (states.num_layers, keys.num_layers) == (36, 12)


def test_kimi_linear():
    config = pretrained.parse_config(KIMI)
    assert config.mixers == 2 * (DELTA, DELTA, DELTA, ATTENTION)
    assert config.ropes == (None,) * 8
    assert config.expert_layers == (False, *(True,) * 7)
    assert config.max_context_length == 1_048_576
    assert config.experts.has_sigmoid and config.experts.per_token == 8
    assert config.delta_rule.gates == 128 and config.delta_rule.gate == "sigmoid"


def test_qwen3_5_is_a_text_part():
    text = {k: v for k, v in QWEN3_NEXT.items() if not k.startswith("num_experts")}
    text |= dict(model_type="qwen3_5_text", architectures=None)
    text["rope_parameters"] = dict(
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
        partial_rotary_factor=0.25,
        rope_theta=10_000_000,
        rope_type="default",
    )
    whole = dict(
        model_type="qwen3_5",
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=text,
        vision_config={},
        tie_word_embeddings=True,
    )
    config = pretrained.parse_config(whole)
    assert config.architecture == "qwen3_5_text" and config.tied
    assert config.experts is None and config.ropes[0].dim == 64
    assert not config.delta_rule.is_grouped


@pytest.mark.parametrize(
    "given, theta",
    [
        (dict(rope_parameters={"rope_theta": None, "rope_type": "default"}), None),
        (dict(rope_theta=None), None),
        (dict(rope_theta=None, rope_parameters=None), None),
        ({}, 1e4),
        (dict(rope_parameters=None), 1e4),
        (dict(rope_parameters={"rope_type": "default"}), 1e4),
        (dict(rope_theta=5e5), 5e5),
        (dict(rope_parameters={"rope_theta": 5e5}, rope_theta=None), 5e5),
    ],
)
def test_olmo_hybrid_has_rope_unless_its_base_is_null(given, theta):
    """Olmo-Hybrid-7B's is null; other files leave it out, as in its class."""
    path = FIXTURES / "checkpoints" / "olmo_hybrid" / "config.json"
    settings = json.loads(path.read_text())
    del settings["rope_parameters"]
    config = pretrained.parse_config(settings | given)
    assert [rope and rope.theta for rope in config.ropes] == [theta] * 2
    if importlib.util.find_spec("transformers"):
        theirs = importlib.import_module("transformers").AutoConfig
        found = theirs.for_model(**json.loads(json.dumps(settings | given)))
        assert found.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize(
    "settings, message",
    [
        (QWEN3_NEXT | dict(layer_types=["conv"] * 48), "full_attention or linear"),
        (QWEN3_NEXT | dict(layer_types=["linear_attention"]), "must name 48 layers"),
        (QWEN3_NEXT | dict(linear_num_value_heads=24), "cannot share 16 key heads"),
        (KIMI | dict(num_hidden_layers=9), "must name each of 9 layers once"),
        (KIMI | dict(mlp_layer_types=["dense"]), "mlp_layer_types must name 8 layers"),
        (KIMI | dict(linear_attn_config=4), "linear_attn_config"),
    ],
)
def test_inconsistent_delta_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        pretrained.parse_config(settings)
