"""Models with heads that differ by layer, compared with transformers' classes."""

import importlib.util

import pretrained
import pytest
from support.checkpoints.config_json import LLAMA, folder

import jkv
from jkv.commands.capacity import make_plan
from jkv.config import families
from jkv.config.huggingface import read_sizes

pytestmark = pytest.mark.one_end
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="no transformers"
)
FULL_FIRST = ("cwm", "granite_swa", "granitemoe_swa")


def list_stepping():
    return [kind for kind, each in families.FAMILIES.items() if each.full_every]


def list_types(name):
    return [kind for kind, each in families.FAMILIES.items() if each.kinds is name]


# Keys that list the windowed layers; without them the model type decides.
TELLING = ("layer_types", "sliding_window_pattern", "_sliding_window_pattern")
GEMMA4 = dict(
    model_type="gemma4_text",
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_size=2304,
    sliding_window=512,
    max_position_embeddings=131_072,
    dtype="bfloat16",
)
MIMO = dict(
    model_type="mimo_v2_flash",
    num_hidden_layers=48,
    num_attention_heads=64,
    num_key_value_heads=4,
    hidden_size=4096,
    head_dim=192,
    v_head_dim=128,
    sliding_window_size=128,
    sliding_window=128,
    max_position_embeddings=262_144,
    dtype="bfloat16",
)


def bytes_per_token(path, **options):
    config = jkv.GroupedConfig.from_model(path, max_sequences=1, **options)
    return sum(group.bytes_per_token for group in config.groups)


def of_transformers(model_type, **changes):
    """Return transformers' config.json, and its configuration object."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](dtype="bfloat16", **changes)
    return config.to_dict(), config


@needs_transformers
@pytest.mark.parametrize("num_layers", [30, 8])
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(num_global_key_value_heads=2),
        dict(num_global_key_value_heads=2, attention_k_eq_v=True, global_head_dim=1024),
        dict(num_kv_shared_layers=2),
    ],
)
def test_gemma_4_bytes_equal_its_layers(tmp_path, changes, num_layers):
    changes = dict(num_hidden_layers=num_layers) | changes
    settings, config = of_transformers("gemma4_text", **changes)
    kept = num_layers - config.num_kv_shared_layers
    layers = [config.per_layer_config[layer] for layer in range(kept)]
    expected = sum(4 * each.num_key_value_heads * each.head_dim for each in layers)
    assert bytes_per_token(folder(tmp_path, **settings)) == expected
    # As the authors write it, without per-layer entries.
    plain = GEMMA4 | changes
    assert bytes_per_token(folder(tmp_path, **plain)) == expected


def test_gemma_4_by_hand(tmp_path):
    path = folder(tmp_path, model_type="gemma4", text_config=GEMMA4)
    assert bytes_per_token(path) == 143_360
    config = jkv.GroupedConfig.from_model(path, max_sequences=2, block_size=32)
    full, windowed = config.groups
    assert (full.num_layers, full.num_kv_heads, full.head_dim) == (5, 4, 512)
    assert (windowed.num_layers, windowed.head_dim) == (25, 256)
    assert (full.sliding_window, windowed.sliding_window) == (None, 512)
    assert config.layer_groups == (1, 1, 1, 1, 1, 0) * 5


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(hybrid_layer_pattern=[0, 1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7),
        dict(
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            layer_types=(["full_attention"] + ["sliding_attention"] * 4)
            + (["full_attention"] + ["sliding_attention"] * 5) * 7
            + ["full_attention"],
        ),
    ],
    ids=["class", "pattern", "keys"],
)
def test_mimo_has_twice_the_kv_heads_in_windows(tmp_path, changes):
    path = folder(tmp_path, **MIMO | changes)
    assert bytes_per_token(path) == 222_720
    sizes = read_sizes(path, {})
    # Its window size excludes the token itself.
    assert [w is None for w in sizes.layer_windows].count(True) == 9
    assert set(sizes.layer_windows) == {None, 129}


@pytest.mark.parametrize("settings", [GEMMA4, MIMO], ids=["gemma4", "mimo"])
def test_one_pool_of_different_layers_is_refused(tmp_path, settings):
    path = folder(tmp_path, **settings)
    for ask in (
        lambda: jkv.CacheConfig.from_model(path, budget_bytes="8GB"),
        lambda: make_plan(path, "80GB", weights="8GB"),
    ):
        with pytest.raises(ValueError, match="25 have 4 kv|9 have 4 kv") as refused:
            ask()
        assert "GroupedConfig.from_model" in str(refused.value)
    # Given heads apply to every layer.
    given = jkv.CacheConfig.from_model(path, num_blocks=1, num_kv_heads=8, head_dim=512)
    assert given.bytes_per_token == given.num_layers * 8 * 512 * 2 * 2


def test_per_layer_entries(tmp_path):
    own = {"0": {"head_dim": 64}, "01": {"intermediate_size": 8}}
    path = folder(tmp_path, **LLAMA | dict(per_layer_config=own))
    assert bytes_per_token(path) == (31 * 128 + 64) * 8 * 4
    for unknown in (dict(skip=["attention"]), dict(sliding_window=4)):
        own = {"3": unknown}
        path = folder(tmp_path, **LLAMA | dict(per_layer_config=own))
        with pytest.raises(ValueError, match=f"changes {next(iter(unknown))} of"):
            jkv.CacheConfig.from_model(path, budget_bytes="8GB")
    for own in ([], {"a": {}}, {"3": []}, {"3": {"head_dim": "64"}}):
        path = folder(tmp_path, **LLAMA | dict(per_layer_config=own))
        with pytest.raises(
            ValueError, match="per_layer_config|head_dim must.*; give num"
        ):
            jkv.CacheConfig.from_model(path, budget_bytes="8GB")
    # All layers of a kind are one kind.
    own = {str(layer): {"num_key_value_heads": 2} for layer in range(32)}
    path = folder(tmp_path, **LLAMA | dict(per_layer_config=own))
    assert jkv.CacheConfig.from_model(path, num_blocks=1).num_kv_heads == 2


@needs_transformers
@pytest.mark.parametrize("attending", [[2, 5, 8], []])
def test_lfm2_counts_the_attention_layers(tmp_path, attending):
    settings, config = of_transformers("lfm2", full_attn_idxs=attending)
    del settings["layer_types"]
    assert config.layer_types.count("full_attention") == len(attending)
    path = folder(tmp_path, **settings)
    assert len(read_sizes(path, {}).layer_windows) == len(attending)


@needs_transformers
@pytest.mark.parametrize("model_type", [*list_stepping(), *FULL_FIRST])
def test_windows_determined_by_the_model_type(tmp_path, model_type):
    settings, config = of_transformers(model_type)
    window, shared = config.sliding_window, getattr(config, "num_kv_shared_layers", 0)
    kinds = config.layer_types[: config.num_hidden_layers - shared]
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    for name in TELLING:
        settings.pop(name, None)
    assert [*read_sizes(folder(tmp_path, **settings), {}).layer_windows] == expected


@needs_transformers
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize("late", [{}, dict(max_window_layers=5)])
def test_windows_of_only_late_or_only_early_layers(tmp_path, model_type, late):
    """In jkv and in the loader; `max_window_layers` defaults to 28."""
    changes = dict(num_hidden_layers=32, use_sliding_window=True, **late)
    settings, config = of_transformers(model_type, **changes)
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    expected = [config.sliding_window if kind else None for kind in kinds]
    left_out = {"layer_types", "sliding_window", "max_window_layers"} - {*late}
    settings = {name: settings[name] for name in settings.keys() - left_out}
    assert [*read_sizes(folder(tmp_path, **settings), {}).layer_windows] == expected
    loaded = pretrained.parse_config(settings | dict(vocab_size=32, architectures=[]))
    assert [*loaded.windows] == expected


@needs_transformers
@pytest.mark.parametrize("model_type", list_types(families.all_windowed))
def test_windows_of_all_layers(tmp_path, model_type):
    """Other window keys have no effect, as in transformers' classes."""
    changes = dict(sliding_window=8, max_window_layers=1, sliding_window_pattern=2)
    if model_type == "qwen3_moe":
        changes |= dict(use_sliding_window=True)
    settings, config = of_transformers(model_type, **changes)
    assert config.sliding_window == 8 and getattr(config, "layer_types", None) is None
    found = read_sizes(folder(tmp_path, **settings), {}).layer_windows
    assert found == (8,) * config.num_hidden_layers


@needs_transformers
@pytest.mark.parametrize("model_type", ["llama4_text", "smollm3"])
@pytest.mark.parametrize("turned", [None, [1, 1, 0, 1, 0, 1]])
def test_windows_of_layers_with_rope(tmp_path, model_type, turned):
    changes = dict(num_hidden_layers=6, no_rope_layers=turned)
    if model_type == "smollm3":
        changes |= dict(use_sliding_window=True, sliding_window=8)
    settings, config = of_transformers(model_type, **changes)
    window = settings.get("sliding_window") or settings["attention_chunk_size"]
    expected = [
        None if kind == "full_attention" else window for kind in config.layer_types
    ]
    for name in ("layer_types", "no_rope_layers")[: 1 + (turned is None)]:
        settings.pop(name)
    assert [*read_sizes(folder(tmp_path, **settings), {}).layer_windows] == expected
