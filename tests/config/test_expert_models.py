"""Caches of published models with unusual keys in config.json, by hand."""

import pytest
from support.checkpoints import published_models as published
from support.checkpoints.config_json import folder

import jkv
from jkv.commands.capacity import make_plan
from jkv.config.huggingface import read_sizes

pytestmark = pytest.mark.one_end

# Layers, kv heads and head dim of a bfloat16 cache.
SIZES = {
    "GLM4_9B": (40, 2, 128),
    "GLM4_5_AIR": (46, 8, 128),
    "GLM4_7_FLASH": (47, 1, 512 + 64),
    "HUNYUAN_1_8B": (32, 4, 128),
    "HUNYUAN_A13B": (32, 8, 128),
    "ERNIE_0_3B": (18, 2, 128),
    "ERNIE_21B": (28, 4, 128),
    "QWEN2_57B": (28, 4, 128),
    "MINIMAX_M2": (62, 8, 128),
    "PHI_3_5_MOE": (32, 8, 128),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_model(name, tmp_path):
    settings = getattr(published, name)
    path = folder(tmp_path, **settings)
    config = jkv.CacheConfig.from_model(path, num_blocks=4)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == SIZES[name]
    assert config.max_context_length == settings["max_position_embeddings"]
    assert config.dtype == "bfloat16"
    # All layers are alike: a single group.
    grouped = jkv.GroupedConfig.from_model(path, budget_bytes="96GiB")
    assert grouped.layer_groups == (0,) * config.num_layers
    assert make_plan(path, "96GiB").bytes_per_token == config.bytes_per_token


def test_windows_of_early_layers(tmp_path):
    """transformers gives them to every other layer before `max_window_layers`."""
    given = dict(num_hidden_layers=6, max_window_layers=4, sliding_window=16)
    settings = published.QWEN2_57B | given
    path = folder(tmp_path, **settings)
    assert read_sizes(path, {}).layer_windows == (None,) * 6
    path = folder(tmp_path, **settings | dict(use_sliding_window=True))
    assert read_sizes(path, {}).layer_windows == (16, None, 16, None, None, None)


def test_kinds_of_minimax(tmp_path):
    mixed = published.MINIMAX_M2 | dict(attn_type_list=[0, 1] * 31)
    path = folder(tmp_path, **mixed)
    assert jkv.CacheConfig.from_model(path, num_blocks=4).num_layers == 31
    with pytest.raises(ValueError, match="'minimax_m2' have a state"):
        jkv.GroupedConfig.from_model(path, budget_bytes="8GiB")


def test_shared_layers_are_refused(tmp_path):
    path = folder(tmp_path, **published.HUNYUAN_A13B | dict(use_cla=True))
    with pytest.raises(ValueError, match="use_cla.*give num_layers"):
        jkv.CacheConfig.from_model(path, num_blocks=4)
    assert jkv.CacheConfig.from_model(path, num_blocks=4, num_layers=16)


def test_names_of_chatglm(tmp_path):
    """GLM-4-9B before its port to transformers."""
    settings = dict(
        model_type="chatglm",
        num_layers=40,
        num_attention_heads=32,
        multi_query_attention=True,
        multi_query_group_num=2,
        kv_channels=128,
        hidden_size=4096,
        seq_length=131_072,
        torch_dtype="bfloat16",
    )
    config = jkv.CacheConfig.from_model(folder(tmp_path, **settings), num_blocks=4)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (40, 2, 128)
