"""Configurations from models and budgets, and the command that says what fits."""

import dataclasses
import json
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from caches import small_config
from places import EXAMPLES, ROOT

import jkv
from jkv.commands.capacity import make_plan
from jkv.config.units import human_bytes, parse_bytes

PYDOC = EXAMPLES / "models" / "pydoc"
SIZES = dict(num_layers=2, num_kv_heads=2, head_dim=8)

# What the settings of well-known models come to, by hand.
LLAMA = dict(  # Llama 3.1 8B
    model_type="llama",
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    hidden_size=4096,
    max_position_embeddings=131_072,
    torch_dtype="bfloat16",
)


def folder(tmp_path, **settings):
    """A checkpoint's folder with nothing but these settings."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


class TestModels:
    def test_42_a_model_by_hand(self, tmp_path):
        config = jkv.CacheConfig.from_model(folder(tmp_path, **LLAMA), budget="16GiB")
        assert (config.num_layers, config.num_kv_heads, config.head_dim) == (32, 8, 128)
        assert config.dtype == jnp.bfloat16 and config.max_context_length == 131_072
        # Keys and values, 32 layers, 8 heads of 128, 2 bytes each: 128 KiB.
        assert config.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * 1024
        # 16 GiB hold 131,072 such tokens, less the tables: 256 rows of 8,192 ids.
        assert 0.99 * 131_072 < config.capacity_tokens < 131_072
        assert config.bytes <= 16 * 2**30
        assert config.max_sequences == 256

    def test_42_overrides_come_first(self, tmp_path):
        config = jkv.CacheConfig.from_model(
            folder(tmp_path, **LLAMA),
            budget=2**30,
            max_context_length=1000,
            max_sequences=3,
            dtype="float32",
            block_size=32,
            num_layers=2,
        )
        assert config.max_context_length == 1000 and config.max_sequences == 3
        assert config.dtype == jnp.float32 and config.block_size == 32
        assert config.num_layers == 2

    def test_42_blocks_instead_of_a_budget(self, tmp_path):
        path = folder(tmp_path, **LLAMA)
        assert jkv.CacheConfig.from_model(path, num_blocks=7).num_blocks == 7
        for wrong in (dict(), dict(num_blocks=7, budget="1GB")):
            with pytest.raises(ValueError, match="budget or num_blocks"):
                jkv.CacheConfig.from_model(path, **wrong)

    def test_42_the_bundled_model_and_its_cache(self):
        config = jkv.CacheConfig.from_model(PYDOC, budget="2MB", max_sequences=4)
        cache = jkv.init(config)
        assert cache.nbytes == config.bytes <= 2 * 10**6
        assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (4, 2, 32)
        assert cache.dtype == jnp.float16

    @pytest.mark.parametrize(
        "settings, expected",
        [
            # Every head its own keys, sizes by older names, no dtype: GPT-2.
            (
                dict(n_layer=12, n_head=12, n_embd=768, n_positions=1024),
                (12, 12, 64, 1024, "float32"),
            ),
            # One head for all: Falcon 7B.
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
            # A language model among others, its dtype outside: Gemma 3.
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
            # Left out in config.json, as transformers fills in: Mistral 7B.
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
            # Three of four layers without keys: Qwen3-Next.
            (
                LLAMA
                | dict(
                    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12
                ),
                (12, 8, 128, 131_072, "bfloat16"),
            ),
            # The last layers read what earlier ones stored: Gemma 3n.
            (LLAMA | dict(num_kv_shared_layers=10), (22, 8, 128, 131_072, "bfloat16")),
        ],
    )
    def test_42_settings_by_many_names(self, tmp_path, settings, expected):
        path = folder(tmp_path, **settings)
        config = jkv.CacheConfig.from_model(path, num_blocks=1)
        assert expected == (
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            config.max_context_length,
            config.dtype.name,
        )

    def test_42_a_sliding_window_is_noted(self, tmp_path, caplog):
        caplog.set_level(logging.INFO, logger="jkv")
        path = folder(tmp_path, **LLAMA, sliding_window=4096)
        jkv.CacheConfig.from_model(path, num_blocks=1)
        assert "sliding window of 4096 tokens is ignored" in caplog.text
        caplog.clear()
        settings = LLAMA | dict(sliding_window=4096, use_sliding_window=False)
        jkv.CacheConfig.from_model(folder(tmp_path, **settings), num_blocks=1)
        assert not caplog.records

    @pytest.mark.parametrize(
        "changes, says",
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
            (dict(hybrid_override_pattern="M*M*"), "hybrid_override_pattern"),
            (dict(global_head_dim=512), "give num_kv_heads and head_dim"),
        ],
    )
    def test_42_what_cannot_be_told_is_refused_by_name(self, tmp_path, changes, says):
        path = folder(tmp_path, **LLAMA | changes)
        with pytest.raises(ValueError, match=says):
            jkv.CacheConfig.from_model(path, budget="1GB", max_sequences=2)

    def test_42_a_latent_model_has_its_values_in_its_keys(self, tmp_path):
        latent = LLAMA | dict(kv_lora_rank=512, qk_rope_head_dim=64)
        config = jkv.CacheConfig.from_model(folder(tmp_path, **latent), num_blocks=4)
        assert (config.num_kv_heads, config.head_dim) == (1, 576)
        assert (config.value_head_dim, config.values_in_keys) == (512, True)
        assert config.bytes_per_token == 32 * 576 * 2

    def test_42_given_sizes_are_not_looked_for(self, tmp_path):
        latent = LLAMA | dict(kv_lora_rank=512, qk_rope_head_dim=64)
        config = jkv.CacheConfig.from_model(
            folder(tmp_path, **latent),
            num_blocks=4,
            num_kv_heads=1,
            head_dim=576,
            value_head_dim=512,
        )
        assert config.bytes_per_token == 32 * (576 + 512) * 2

    def test_42_files_that_are_none(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="config.json is missing"):
            jkv.CacheConfig.from_model(tmp_path, budget="1GB")
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match="no JSON"):
            jkv.CacheConfig.from_model(tmp_path, budget="1GB")
        (tmp_path / "config.json").write_text("[1]")
        with pytest.raises(ValueError, match="no object"):
            jkv.CacheConfig.from_model(tmp_path, budget="1GB")


class TestSizes:
    @pytest.mark.parametrize("prefix_caching", [False, True])
    @pytest.mark.parametrize("budget", [50_000, 50_001, 1_000_000])
    def test_42_as_many_sequences_as_fit(self, budget, prefix_caching):
        sizes = SIZES | dict(prefix_caching=prefix_caching)
        config = jkv.CacheConfig.for_context_length(30, budget=budget, **sizes)
        assert config.bytes <= budget
        more = jkv.CacheConfig.for_context_length(
            30, max_sequences=config.max_sequences + 1, **sizes
        )
        assert more.bytes > budget
        # All of them really reach that length, none shared.
        cache = jkv.init(config, storage=False)
        cache, opened = jkv.allocate(cache, [30] * config.max_sequences)
        assert not opened.status.any()

    def test_42_a_budget_or_a_number(self):
        for wrong in (dict(), dict(max_sequences=2, budget=10**6)):
            with pytest.raises(ValueError, match="max_sequences or budget"):
                jkv.CacheConfig.for_context_length(30, **SIZES, **wrong)
        with pytest.raises(ValueError, match="one sequence of 30 tokens takes"):
            jkv.CacheConfig.for_context_length(30, budget="1kB", **SIZES)

    def test_42_budgets_with_units(self):
        sizes = SIZES | dict(max_sequences=2, max_context_length=64)
        for text, count in (("1MiB", 2**20), ("1 MB", 10**6), ("0.5GB", 5 * 10**8)):
            config = jkv.CacheConfig.for_memory(text, **sizes)
            assert config == jkv.CacheConfig.for_memory(count, **sizes)

    def test_42_longest_context_and_most_sequences_are_true(self):
        config = small_config()  # 8 blocks of 4, 4 sequences of up to 14
        assert [config.longest_context(n) for n in range(6)] == [0, 14, 14, 8, 8, 0]
        found = [config.most_sequences(n) for n in (0, 4, 5, 9, 13, 14, 15)]
        assert found == [4, 4, 4, 2, 2, 2, 0]
        for num in (1, 2, 3, 4):
            cache = jkv.init(config, storage=False)
            length = config.longest_context(num)
            assert bool(jkv.can_allocate(cache, [length] * num).all())
            if length < 14:
                assert not bool(jkv.can_allocate(cache, [length + 1] * num).all())

    def test_42_bytes_by_hand(self):
        config = small_config(num_layers=3, num_kv_heads=2, value_head_dim=5)
        # 3 layers of 2 heads, 2 + 5 floats.
        assert config.bytes_per_token == 3 * 2 * 7 * 4
        assert config.storage_bytes == 32 * config.bytes_per_token
        cache = jkv.init(config)
        leaves = jax.tree.leaves(cache.metadata)
        assert config.metadata_bytes == sum(leaf.nbytes for leaf in leaves)

    def test_42_said_in_human_units(self):
        config = small_config(num_layers=3, value_head_dim=5, prefix_caching=True)
        lines = str(config).splitlines()
        assert lines[:3] == [
            "3 layers, 1 kv heads of 2 (values of 5), float32, prefix caching",
            "8 blocks of 4 = 32 tokens, 84 B each",
            "4 sequences of up to 14 tokens",
        ]
        assert lines[3].startswith(human_bytes(config.bytes))
        # `repr` still says what to write to get it.
        assert repr(config).startswith("CacheConfig(num_layers=3, ")

    def test_42_presets_fill_their_budgets(self):
        sizes = dict(num_layers=32, num_kv_heads=8, head_dim=128)
        for name, gigabytes, block_size in (
            ("small", 4, 16),
            ("medium", 12, 32),
            ("large", 40, 64),
        ):
            config = getattr(jkv.CacheConfig, name)(**sizes)
            assert config.block_size == block_size
            assert config.bytes <= gigabytes * 10**9
            more = dataclasses.replace(config, num_blocks=config.num_blocks + 1)
            assert more.bytes > gigabytes * 10**9

    def test_41_units(self):
        for text, count in (("192GiB", 192 * 2**30), ("80 gb", 80 * 10**9), ("7", 7)):
            assert parse_bytes(text) == count
        assert parse_bytes("9007199254740993 B") == 9007199254740993  # past 2**53
        for wrong in ("", "4X", "4G", "-3GB", "0", "GB", "1.2.3MB", "nan"):
            with pytest.raises(ValueError, match="byte"):
                parse_bytes(wrong)
        for count, text in ((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB")):
            assert human_bytes(count) == text


class TestPlan:
    def test_42_by_hand(self, tmp_path):
        path = folder(tmp_path, **LLAMA)
        found = make_plan(
            path, "192GiB", tensor_parallel=8, weights="16GiB", reserve=0.25
        )
        # 192 less a quarter and an eighth of 16 GiB; one of 8 heads on each device.
        assert found.budget == (192 - 48 - 2) * 2**30
        assert found.config.num_kv_heads == 1
        assert found.bytes_per_token == 8 * found.config.bytes_per_token == 128 * 1024
        assert found.config.bytes <= found.budget
        # 142 GiB of 16 KiB a token are 9,306,112 tokens: 71 times 131,072, less tables.
        assert found.sequences[131_072] == 70
        assert list(found.sequences) == [1024, 4096, 16_384, 65_536, 131_072]
        assert not found.notes

    def test_42_every_number_fits_and_no_more(self, tmp_path):
        found = make_plan(folder(tmp_path, **LLAMA), "24GB", weights="1GB")
        sizes = dict(num_layers=32, num_kv_heads=8, head_dim=128)
        for length, number in found.sequences.items():
            if number:
                exact = jkv.CacheConfig.for_context_length(
                    length, max_sequences=number, **sizes
                )
                assert exact.bytes <= found.budget
            more = jkv.CacheConfig.for_context_length(
                length, max_sequences=number + 1, **sizes
            )
            assert more.bytes > found.budget

    def test_42_weights_in_the_folder_are_taken_off(self):
        weights = (PYDOC / "model.safetensors").stat().st_size
        found = make_plan(PYDOC, "1GiB", reserve=0.0)
        assert (found.weights, found.budget) == (weights, 2**30 - weights)

    def test_42_more_devices_than_heads(self, tmp_path):
        path = folder(tmp_path, **LLAMA)
        found = make_plan(path, "80GB", tensor_parallel=16)
        assert found.config.num_kv_heads == 1
        assert "each kv head is kept by 2 devices" in found.notes
        assert any("no weight files found" in note for note in found.notes)

    @pytest.mark.parametrize(
        "arguments, says",
        [
            (dict(tensor_parallel=3), "8 kv heads cannot be shared evenly by 3"),
            (dict(tensor_parallel=0), "at least 1 device"),
            (dict(weights="90GB"), "leave nothing for a cache"),
            (dict(reserve=1.5), "share"),
            (dict(memory="lots"), "no number of bytes"),
            (dict(memory="1MB"), "a single block takes"),
        ],
    )
    def test_42_plans_that_fail_say_why(self, tmp_path, arguments, says):
        path = folder(tmp_path, **LLAMA)
        with pytest.raises(ValueError, match=says):
            make_plan(path, **dict(memory="80GB") | arguments)

    def run(self, *arguments):
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "jkv.plan", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    def test_42_the_command_prints_what_fits(self, tmp_path):
        path = folder(tmp_path, **LLAMA, sliding_window=4096)
        done = self.run(
            *("--model", str(path), "--memory", "192GiB", "--tensor-parallel", "8"),
            *("--weights", "15GiB", "--block-size", "32"),
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "memory      192.0 GiB on each of 8 devices"
        assert "1.9 GiB weights, 19.2 GiB reserve = 170.9 GiB for" in lines[1]
        assert "32 layers, 1 kv heads of 128, bfloat16" in lines[2]
        assert " blocks of 32 = " in lines[3]
        assert "per token   128.0 KiB, 16.0 KiB on each" in lines
        rows = [line.split() for line in lines if line[:14].strip("0123456789, ") == ""]
        lengths = [int(row[0].replace(",", "")) for row in rows if len(row) == 2]
        assert lengths == [1024, 4096, 16_384, 65_536, 131_072]
        assert lines[-1].startswith("note: a sliding window of 4096 tokens is ignored")

    def test_42_the_command_fails_in_one_sentence(self, tmp_path):
        done = self.run("--model", str(tmp_path), "--memory", "1GB")
        assert done.returncode == 1 and not done.stdout
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "config.json is missing" in done.stderr
