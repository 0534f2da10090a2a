"""Configurations from models' config.json."""

import json
import logging

import jax.numpy as jnp
import pytest
from support.checkpoints.config_json import LLAMA, folder
from support.paths import EXAMPLES

import jkv
from jkv.config.counts import count_windows
from jkv.config.huggingface import read_sizes

pytestmark = pytest.mark.one_end
PYDOC = EXAMPLES / "models" / "pydoc"
SIZES = dict(num_layers=2, num_kv_heads=2, head_dim=8)


def test_a_model_by_hand(tmp_path):
    config = jkv.CacheConfig.from_model(folder(tmp_path, **LLAMA), budget_bytes="16GiB")
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.dtype == jnp.bfloat16 and config.max_context_length == 131_072
    # Keys and values, 32 layers, 8 heads of 128, 2 bytes each: 128 KiB.
    assert config.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    # 16 GiB hold 131,072 such tokens, minus the tables: 256 rows of 8,192 ids.
    assert 0.99 * 131_072 < config.capacity_tokens < 131_072
    assert config.bytes <= 16 * 2**30
    assert config.max_sequences == 256


def test_overrides_take_precedence(tmp_path):
    config = jkv.CacheConfig.from_model(
        folder(tmp_path, **LLAMA),
        budget_bytes=2**30,
        max_context_length=1000,
        max_sequences=3,
        dtype="float32",
        block_size=32,
        num_layers=2,
    )
    assert config.max_context_length == 1000 and config.max_sequences == 3
    assert config.dtype == jnp.float32 and config.block_size == 32
    assert config.num_layers == 2


def test_blocks_instead_of_a_budget(tmp_path):
    path = folder(tmp_path, **LLAMA)
    assert jkv.CacheConfig.from_model(path, num_blocks=7).num_blocks == 7
    for wrong in (dict(), dict(num_blocks=7, budget_bytes="1GB")):
        with pytest.raises(ValueError, match="budget_bytes or num_blocks"):
            jkv.CacheConfig.from_model(path, **wrong)


def test_the_bundled_model_and_its_cache():
    config = jkv.CacheConfig.from_model(PYDOC, budget_bytes="2MB", max_sequences=4)
    cache = jkv.init(config)
    assert cache.nbytes == config.bytes <= 2 * 10**6
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (4, 2, 32)
    assert cache.dtype == jnp.float16


@pytest.mark.parametrize(
    "settings, expected",
    [
        # No kv heads, older key names, no dtype: GPT-2.
        (
            dict(n_layer=12, n_head=12, n_embd=768, n_positions=1024),
            (12, 12, 64, 1024, "float32"),
        ),
        # No learned positions, so no maximum context: Bloom 560M.
        (
            dict(model_type="bloom", n_layer=24, n_head=16, hidden_size=1024),
            (24, 16, 64, 2048, "float32"),
        ),
        # One kv head for all: Falcon 7B.
        (
            dict(
                num_hidden_layers=32,
                num_attention_heads=71,
                hidden_size=4544,
                multi_query=True,
                max_position_embeddings=2048,
                torch_dtype="bfloat16",
            ),
            (32, 1, 64, 2048, "bfloat16"),
        ),
        # A nested text configuration, its dtype outside: Gemma 3.
        (
            dict(
                model_type="gemma3",
                torch_dtype="bfloat16",
                hidden_size=1,
                text_config=dict(
                    num_hidden_layers=34,
                    num_attention_heads=8,
                    num_key_value_heads=4,
                    head_dim=256,
                    hidden_size=2560,
                    max_position_embeddings=131_072,
                ),
            ),
            (34, 4, 256, 131_072, "bfloat16"),
        ),
        # Sizes omitted, as they are a Llama's: LLaVA 1.5 7B.
        (
            dict(
                model_type="llava",
                torch_dtype="float16",
                hidden_size=1,
                text_config=dict(model_type="llama", max_position_embeddings=4096),
            ),
            (32, 32, 128, 4096, "float16"),
        ),
        # Nested twice, the dtype at the top: Qwen2.5-Omni.
        (
            dict(
                model_type="qwen2_5_omni",
                dtype="bfloat16",
                thinker_config=dict(
                    num_hidden_layers=99,
                    text_config=dict(LLAMA, torch_dtype=None),
                ),
            ),
            (32, 8, 128, 131_072, "bfloat16"),
        ),
        # Another name of the nested configuration: InternVL.
        (dict(llm_config=LLAMA), (32, 8, 128, 131_072, "bfloat16")),
        # Keys omitted, with transformers' defaults: Mistral 7B.
        (
            dict(
                model_type="mistral",
                num_hidden_layers=32,
                num_attention_heads=32,
                hidden_size=4096,
                max_position_embeddings=32_768,
                dtype="float16",
            ),
            (32, 8, 128, 32_768, "float16"),
        ),
        # Heads times head dim differ from the hidden size: gpt-oss 20B.
        (
            dict(
                model_type="gpt_oss",
                num_hidden_layers=24,
                num_attention_heads=64,
                hidden_size=2880,
                max_position_embeddings=131_072,
                torch_dtype="bfloat16",
            ),
            (24, 8, 64, 131_072, "bfloat16"),
        ),
        # Latent, without the vector's sizes: DeepSeek-V3.
        (
            dict(
                model_type="deepseek_v3",
                num_hidden_layers=61,
                num_attention_heads=128,
                hidden_size=7168,
                max_position_embeddings=163_840,
                torch_dtype="bfloat16",
            ),
            (61, 1, 576, 163_840, "bfloat16"),
        ),
        # Three of four layers have no keys: Qwen3-Next.
        (
            LLAMA
            | dict(layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12),
            (12, 8, 128, 131_072, "bfloat16"),
        ),
        # The last layers read the keys of earlier ones: Gemma 3n.
        (LLAMA | dict(num_kv_shared_layers=10), (22, 8, 128, 131_072, "bfloat16")),
    ],
)
def test_settings_by_many_names(tmp_path, settings, expected):
    path = folder(tmp_path, **settings)
    config = jkv.CacheConfig.from_model(path, num_blocks=1)
    assert expected == (
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        config.max_context_length,
        config.dtype.name,
    )


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(sliding_window=4096), (32, 4096)),
        (dict(sliding_window=4096, use_sliding_window=False), None),
        (dict(sliding_window="4096", use_sliding_window=False), None),
        (dict(sliding_window=False), None),
        (dict(sliding_window=None, attention_chunk_size=8), (32, 8)),
        (dict(sliding_window=-1), None),
        (dict(sliding_window=0), None),
        (dict(sliding_window=4096, max_window_layers=28), (4, 4096)),
        (dict(sliding_window=512, sliding_window_pattern=6), (27, 512)),
        (dict(sliding_window=512, model_type="gemma2", head_dim=128), (16, 512)),
        (dict(sliding_window=128, model_type="gpt_oss"), (16, 128)),
        (dict(sliding_window=4096, model_type="qwen3"), None),
        (dict(sliding_window=8, layer_types=["full_attention"] * 32), None),
        (
            dict(
                attention_chunk_size=8192,
                layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * 8,
            ),
            (24, 8192),
        ),
        # The last layers keep no keys of their own.
        (
            dict(
                sliding_window=512,
                num_kv_shared_layers=16,
                layer_types=["sliding_attention", "full_attention"] * 16,
            ),
            (8, 512),
        ),
    ],
)
def test_windows_by_many_names(tmp_path, settings, expected):
    layers = read_sizes(folder(tmp_path, **LLAMA | settings), {}).layer_windows
    assert count_windows(layers) == expected


@pytest.mark.parametrize(
    "settings, expected",
    [
        # Of four layers: all but the last; only the first; the second and fourth; and
        # one of three attention layers.
        (dict(sliding_window=8, sliding_window_pattern=4), (8, 8, 8, None)),
        (dict(sliding_window=8, max_window_layers=1), (None, 8, 8, 8)),
        (dict(sliding_window=8, model_type="gemma2", head_dim=128), (8, None, 8, None)),
        (
            dict(
                sliding_window=8,
                layer_types=["mamba", "full_attention", "sliding_attention", "mamba"],
            ),
            (None, 8),
        ),
        (dict(), (None,) * 4),
    ],
)
def test_windowed_layers_are_recognized(tmp_path, settings, expected):
    path = folder(tmp_path, **LLAMA | dict(num_hidden_layers=4) | settings)
    assert read_sizes(path, {}).layer_windows == expected


def test_an_assumed_context_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jkv")
    settings = LLAMA | dict(max_position_embeddings=None)
    jkv.CacheConfig.from_model(folder(tmp_path, **settings), num_blocks=1)
    assert "no context length, 2,048 is assumed; give max_context_length" in caplog.text


def test_a_sliding_window_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jkv")
    path = folder(tmp_path, **LLAMA, sliding_window=4096)
    jkv.CacheConfig.from_model(path, num_blocks=1)
    assert "sliding window of 4096 tokens is ignored" in caplog.text
    caplog.clear()
    settings = LLAMA | dict(sliding_window=4096, use_sliding_window=False)
    jkv.CacheConfig.from_model(folder(tmp_path, **settings), num_blocks=1)
    assert not caplog.records


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(is_encoder_decoder=True), "second cache"),
        (dict(num_hidden_layers=None), "num_hidden_layers.*give num_layers"),
        (
            dict(num_key_value_heads=[8, 4]),
            "num_key_value_heads.*give num_kv_heads",
        ),
        (dict(num_attention_heads=33), "multiple of 33 heads; give head_dim"),
        (
            dict(torch_dtype="float8_e4m3fn"),
            "weights are float8_e4m3fn.*give dtype",
        ),
        (dict(layer_types=["full_attention", "psychic"]), "psychic"),
        (dict(layer_types="full_attention"), "layer_types must be of type list"),
        (dict(layers_block_type=dict(a=1)), "layers_block_type must be of type list"),
        (dict(full_attn_idxs="0"), "full_attn_idxs must be of type list"),
        (
            dict(sliding_window=8, max_window_layers="28"),
            "max_window_layers must be of type int",
        ),
        (dict(sliding_window="4096"), "sliding_window must be.* got '4096'"),
        (dict(sliding_window=4096.0), "sliding_window must be.* got 4096.0"),
        (dict(sliding_window=-2), "sliding_window must be.* got -2"),
        (dict(sliding_window=True), "sliding_window must be.* got True"),
        (dict(attention_chunk_size=[8]), r"attention_chunk_size must be.* got \[8\]"),
        (dict(hybrid_override_pattern="M*M*"), "hybrid_override_pattern"),
        (dict(global_head_dim=512), "give num_kv_heads and head_dim"),
    ],
)
def test_missing_or_unknown_settings_are_refused_by_name(tmp_path, changes, message):
    path = folder(tmp_path, **LLAMA | changes)
    with pytest.raises(ValueError, match=message):
        jkv.CacheConfig.from_model(path, budget_bytes="1GB", max_sequences=2)


def test_a_latent_model_stores_values_in_keys(tmp_path):
    latent = LLAMA | dict(kv_lora_rank=512, qk_rope_head_dim=64)
    config = jkv.CacheConfig.from_model(folder(tmp_path, **latent), num_blocks=4)
    assert (config.num_kv_heads, config.head_dim) == (1, 576)
    assert (config.value_head_dim, config.values_in_keys) == (512, True)
    assert config.bytes_per_token == 32 * 576 * 2


def test_given_sizes_are_not_read(tmp_path):
    latent = LLAMA | dict(kv_lora_rank=512, qk_rope_head_dim=64)
    config = jkv.CacheConfig.from_model(
        folder(tmp_path, **latent),
        num_blocks=4,
        num_kv_heads=1,
        head_dim=576,
        value_head_dim=512,
    )
    assert config.bytes_per_token == 32 * (576 + 512) * 2


def test_invalid_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        jkv.CacheConfig.from_model(tmp_path, budget_bytes="1GB")
    with pytest.raises(FileNotFoundError, match="m.gguf does not exist"):
        jkv.CacheConfig.from_model(tmp_path / "m.gguf", budget_bytes="1GB")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        jkv.CacheConfig.from_model(tmp_path, budget_bytes="1GB")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        jkv.CacheConfig.from_model(tmp_path, budget_bytes="1GB")
    given = {"num_hidden_layers": 1, "layer_types": [["a"]]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match="layers of unknown kind"):
        jkv.CacheConfig.from_model(tmp_path, budget_bytes="1GB")
