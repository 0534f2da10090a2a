"""Published config.json files: sizes of the model and of the cache.

Numbers are from the named models; unused keys are left out.
"""

import pretrained
import pytest
from support.checkpoints.config_json import folder

import jkv
from jkv.config.huggingface import read_sizes

pytestmark = pytest.mark.one_end

MISTRAL_YARN = dict(
    rope_type="yarn",
    type="yarn",
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)

OLMO_3_7B = dict(
    model_type="olmo3",
    architectures=["Olmo3ForCausalLM"],
    hidden_size=4096,
    intermediate_size=11_008,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
    max_position_embeddings=65_536,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    rms_norm_eps=1e-6,
    rope_theta=500_000,
    rope_scaling=dict(
        rope_type="yarn",
        attention_factor=1.2079441541679836,
        beta_fast=32.0,
        beta_slow=1.0,
        factor=8.0,
        original_max_position_embeddings=8192,
    ),
    sliding_window=4096,
    torch_dtype="bfloat16",
    vocab_size=100_278,
)

COMMAND_R7B = dict(
    model_type="cohere2",
    architectures=["Cohere2ForCausalLM"],
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14_336,
    layer_norm_eps=1e-5,
    logit_scale=0.25,
    max_position_embeddings=132_096,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    rope_scaling=None,
    rope_theta=50_000,
    sliding_window=4096,
    sliding_window_pattern=4,
    torch_dtype="bfloat16",
    use_parallel_block=True,
    vocab_size=256_000,
)

COMMAND_R_PLUS = dict(
    model_type="cohere",
    architectures=["CohereForCausalLM"],
    hidden_size=12_288,
    intermediate_size=33_792,
    layer_norm_eps=1e-5,
    logit_scale=0.8333333333333334,
    max_position_embeddings=8192,
    num_attention_heads=96,
    num_hidden_layers=64,
    num_key_value_heads=8,
    rope_theta=75_000_000.0,
    torch_dtype="float16",
    use_qk_norm=True,
    vocab_size=256_000,
)

SEED_OSS_36B = dict(
    model_type="seed_oss",
    architectures=["SeedOssForCausalLM"],
    attention_bias=True,
    attention_out_bias=False,
    head_dim=128,
    hidden_size=5120,
    intermediate_size=27_648,
    max_position_embeddings=524_288,
    mlp_bias=False,
    num_attention_heads=80,
    num_hidden_layers=64,
    num_key_value_heads=8,
    rope_scaling=dict(rope_type="default"),
    rope_theta=10_000_000.0,
    torch_dtype="bfloat16",
    vocab_size=155_136,
)


GEMMA_7B = dict(
    model_type="gemma",
    architectures=["GemmaForCausalLM"],
    head_dim=256,
    hidden_act="gelu",
    hidden_activation=None,
    hidden_size=3072,
    intermediate_size=24_576,
    max_position_embeddings=8192,
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=16,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=10_000.0,
    torch_dtype="bfloat16",
    vocab_size=256_000,
)


def with_eyes(**text):
    """Return the outer settings of Mistral's vision-language models."""
    return dict(
        model_type="mistral3",
        architectures=["Mistral3ForConditionalGeneration"],
        dtype="bfloat16",
        quantization_config=dict(
            activation_scheme="static", quant_method="fp8", weight_block_size=None
        ),
        text_config=text,
        tie_word_embeddings=False,
        vision_config=dict(model_type="pixtral", hidden_size=1024),
    )


MINISTRAL_3_8B = with_eyes(
    model_type="ministral3",
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14_336,
    max_position_embeddings=262_144,
    num_attention_heads=32,
    num_hidden_layers=34,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_parameters=MISTRAL_YARN
    | dict(rope_theta=1e6, factor=16.0, original_max_position_embeddings=16_384),
    sliding_window=None,
    vocab_size=131_072,
)

MISTRAL_SMALL_4 = with_eyes(
    model_type="mistral4",
    first_k_dense_replace=0,
    hidden_size=4096,
    intermediate_size=12_288,
    kv_lora_rank=256,
    max_position_embeddings=1_048_576,
    moe_intermediate_size=2048,
    n_group=1,
    n_routed_experts=128,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts_per_tok=4,
    num_hidden_layers=36,
    num_key_value_heads=32,
    q_lora_rank=1024,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    rope_parameters=MISTRAL_YARN
    | dict(
        rope_theta=10_000.0,
        factor=128.0,
        original_max_position_embeddings=8192,
        partial_rotary_factor=0.5,
    ),
    topk_group=1,
    v_head_dim=128,
    vocab_size=131_072,
)


def gemma_4(num_layers, full_every, **text):
    """Return the text configuration of a vision-language folder."""
    kinds = [
        "full_attention" if (i + 1) % full_every == 0 else "sliding_attention"
        for i in range(num_layers)
    ]
    return dict(
        model_type="gemma4",
        architectures=["Gemma4ForConditionalGeneration"],
        dtype="bfloat16",
        eos_token_id=[1, 106],
        text_config=dict(
            model_type="gemma4_text",
            attention_bias=False,
            final_logit_softcapping=30.0,
            global_head_dim=512,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            layer_types=kinds,
            num_hidden_layers=num_layers,
            rms_norm_eps=1e-6,
            rope_parameters=dict(
                full_attention=dict(
                    partial_rotary_factor=0.25,
                    rope_theta=1_000_000.0,
                    rope_type="proportional",
                ),
                sliding_attention=dict(rope_theta=10_000.0, rope_type="default"),
            ),
            tie_word_embeddings=True,
            vocab_size=262_144,
            vocab_size_per_layer_input=262_144,
            **text,
        ),
        tie_word_embeddings=True,
    )


GEMMA_4_E2B = gemma_4(
    35,
    full_every=5,
    attention_k_eq_v=False,
    enable_moe_block=False,
    hidden_size=1536,
    hidden_size_per_layer_input=256,
    intermediate_size=6144,
    max_position_embeddings=131_072,
    num_attention_heads=8,
    num_global_key_value_heads=None,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    sliding_window=512,
    use_bidirectional_attention=None,
    use_double_wide_mlp=True,
)

GEMMA_4_26B = gemma_4(
    30,
    full_every=6,
    attention_k_eq_v=True,
    enable_moe_block=True,
    hidden_size=2816,
    hidden_size_per_layer_input=0,
    intermediate_size=2112,
    max_position_embeddings=262_144,
    moe_intermediate_size=704,
    num_attention_heads=16,
    num_experts=128,
    num_global_key_value_heads=2,
    num_key_value_heads=8,
    num_kv_shared_layers=0,
    sliding_window=1024,
    top_k_experts=8,
    use_bidirectional_attention="vision",
    use_double_wide_mlp=False,
)

ALL = dict(
    olmo_3_7b=OLMO_3_7B,
    gemma_7b=GEMMA_7B,
    command_r7b=COMMAND_R7B,
    command_r_plus=COMMAND_R_PLUS,
    seed_oss_36b=SEED_OSS_36B,
    ministral_3_8b=MINISTRAL_3_8B,
    mistral_small_4=MISTRAL_SMALL_4,
)


@pytest.mark.parametrize("name", ALL)
def test_the_cache_config_equals_the_models(tmp_path, name):
    """jkv's own parsing gives the sizes and windows that the model needs."""
    path, model = folder(tmp_path, **ALL[name]), pretrained.parse_config(ALL[name])
    sizes = read_sizes(path, dict(dtype="bfloat16"))
    assert sizes.layer_windows == model.windows
    built = jkv.CacheConfig.from_model(path, num_blocks=1, dtype="bfloat16")
    fields = pretrained.Decoder(model).cache_fields
    assert {field: getattr(built, field) for field in fields} == fields
    assert built.max_context_length == model.max_context_length


def test_olmo_3_scales_rope_of_full_layers():
    config = pretrained.parse_config(OLMO_3_7B)
    windowed, full = config.ropes[2:4]
    assert (windowed.scaling, full.scaling) == ("default", "yarn")
    assert windowed.theta == full.theta == 500_000
    assert full.magnitude == pytest.approx(1.2079, abs=1e-4)
    assert [config.ropes[i] is full for i in range(8)] == [False] * 3 + [True] + (
        [False] * 3 + [True]
    )


def test_command_rotates_only_windowed_layers():
    config = pretrained.parse_config(COMMAND_R7B)
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 8
    assert config.is_parallel and config.tied and config.logit_scale == 0.25
    older = pretrained.parse_config(COMMAND_R_PLUS)
    assert older.qk_norm == "heads" and None not in older.ropes


def test_the_first_gemma_has_the_approximate_gelu():
    """Its released files name the exact one, as transformers' class knows."""
    config = pretrained.parse_config(GEMMA_7B)
    assert config.activation == "gelu_pytorch_tanh" and config.tied
    with pytest.raises(ValueError, match="hidden_act 'gelu' is not supported"):
        pretrained.parse_config(SEED_OSS_36B | dict(hidden_act="gelu"))


def test_seed_has_biases_of_queries_keys_and_values():
    config = pretrained.parse_config(SEED_OSS_36B)
    assert (config.has_qkv_bias, config.has_output_bias) == (True, False)


def test_mistrals_queries_are_scaled_by_position():
    config = pretrained.parse_config(MINISTRAL_3_8B)
    assert config.query_growth == (0.1, 16_384)
    assert (config.ropes[0].scaling, config.ropes[0].magnitude) == ("yarn", 1.0)
    config = pretrained.parse_config(MISTRAL_SMALL_4)
    assert config.query_growth == (0.1, 8192)
    assert (config.ropes[0].dim, config.ropes[0].is_interleaved) == (64, True)
    assert config.experts.count == 128 and all(config.expert_layers)


@pytest.mark.parametrize("settings", [GEMMA_4_E2B, GEMMA_4_26B], ids=["e2b", "26b"])
def test_gemma_4_has_a_group_per_kind_of_layer(tmp_path, settings):
    path, model = folder(tmp_path, **settings), pretrained.parse_config(settings)
    sizes, kept = read_sizes(path, {}), model.num_cached_layers
    assert sizes.layer_windows == model.windows[:kept]
    heads = [(each.num_kv_heads, each.head_dim) for each in sizes.layer_heads]
    assert heads == [*model.layer_heads[:kept]]
    built = jkv.GroupedConfig.from_model(path, max_sequences=1)
    made = pretrained.Decoder(model).cache_config(
        model.max_context_length, max_sequences=1, step_tokens=512, dtype="bfloat16"
    )
    assert built == made
    with pytest.raises(ValueError, match="a group for each kind"):
        _ = pretrained.Decoder(model).cache_fields


def test_gemma_4_shares_keys():
    config = pretrained.parse_config(GEMMA_4_E2B)
    # The last layers attend to the keys of layers 13 and 14.
    assert config.key_layers == (*range(15), *([13] * 4 + [14]) * 4)
    assert config.inner_sizes == (6144,) * 15 + (12_288,) * 20
    assert (config.layer_inputs.dim, config.stop_tokens) == (256, (1, 106))
    turned, whole = config.ropes[:1][0], config.ropes[4]
    assert (turned.dim, whole.dim, whole.part) == (256, 512, 0.25)
    # Settings outside the two kinds of layers are unused, as in `transformers`.
    text = GEMMA_4_E2B["text_config"]
    ropes = text["rope_parameters"] | dict(rope_theta=5.0, rope_type="linear")
    raw = GEMMA_4_E2B | dict(text_config=text | dict(rope_parameters=ropes))
    assert pretrained.parse_config(raw).ropes == config.ropes


def test_gemma_4_has_experts_beside_its_mlp():
    config = pretrained.parse_config(GEMMA_4_26B)
    assert config.experts.has_own_norms and config.experts.shared_inner == 2112
    assert config.layer_heads[4:6] == ((8, 256), (2, 512))
    assert config.values_of_keys == ((False,) * 5 + (True,)) * 5


def test_gemma_4_without_bidirectional_attention():
    """Gemma 3's form, false, equals null."""
    found = [
        pretrained.parse_config(
            GEMMA_4_26B["text_config"] | dict(use_bidirectional_attention=given)
        ).span_layers
        for given in (None, False, "vision")
    ]
    assert not any(found[0]) and found[0] == found[1] and any(found[2])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(use_bidirectional_attention="all"), "'vision', got 'all'"),
        (dict(use_bidirectional_attention=True), "'vision', got True"),
        (dict(num_kv_shared_layers=32), "leaves a kind of layer_types without"),
        (dict(per_layer_config={"3": dict(sliding_window=4)}), "of single layers"),
        (
            dict(rope_parameters=dict(rope_theta=1e4)),
            "must have those of full_attention",
        ),
        (dict(enable_moe_block=True), "use_double_wide_mlp beside experts"),
    ],
)
def test_unsupported_gemma_4_settings_are_refused(changes, message):
    text = GEMMA_4_E2B["text_config"] | changes
    with pytest.raises(ValueError, match=message):
        pretrained.parse_config(dict(model_type="gemma4", text_config=text))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_group=4), "n_group above 1"),
        (
            dict(rope_parameters=dict(partial_rotary_factor=0.25)),
            "no.* qk_rope_head_dim",
        ),
        (
            dict(rope_parameters=dict(llama_4_scaling_beta=0.1)),
            "after so many positions",
        ),
    ],
)
def test_unsupported_mistral_4_settings_are_refused(changes, message):
    text = MISTRAL_SMALL_4["text_config"]
    with pytest.raises(ValueError, match=message):
        pretrained.parse_config(
            dict(text_config=text | changes) | dict(model_type="mistral3")
        )
