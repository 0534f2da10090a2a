"""Recurrent layers of published models."""

import math

import pytest
from support.checkpoints.config_json import LLAMA, folder

import jkv
from jkv.config.huggingface import read_sizes

pytestmark = pytest.mark.one_end

BFLOAT16 = dict(torch_dtype="bfloat16", max_position_embeddings=262_144)

NEMOTRON_NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

# config.json, the attention layers, the recurrent layers, and the bytes of one state:
# of its memories, and of the tokens that its convolutions keep.
MODELS = {
    # 36 layers, 32 heads of 128 x 128; 3 tokens of 2 x 16 + 32 heads of 128.
    "Qwen3-Next-80B-A3B": (
        dict(
            model_type="qwen3_next",
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
        ),
        (12, 36),
        (36 * 32 * 128 * 128 * 4, 36 * 3 * 8192 * 2),
    ),
    "Qwen3.5-4B": (
        dict(
            model_type="qwen3_5",
            text_config=dict(
                model_type="qwen3_5_text",
                hidden_size=2560,
                num_hidden_layers=32,
                num_attention_heads=16,
                num_key_value_heads=4,
                head_dim=256,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
                linear_num_value_heads=32,
                **BFLOAT16,
            ),
        ),
        (8, 24),
        (24 * 32 * 128 * 128 * 4, 24 * 3 * 8192 * 2),
    ),
    # Keys of 3,840 x 3 / 4 in 30 heads, values twice as wide.
    "Olmo-Hybrid-7B": (
        dict(
            model_type="olmo_hybrid",
            hidden_size=3840,
            num_hidden_layers=32,
            num_attention_heads=30,
            num_key_value_heads=30,
        ),
        (8, 24),
        (24 * 30 * 96 * 192 * 4, 24 * 3 * 30 * 384 * 2),
    ),
    "Kimi-Linear-48B-A3B": (
        dict(
            model_type="kimi_linear",
            hidden_size=2304,
            num_hidden_layers=27,
            num_attention_heads=32,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            linear_attn_config=dict(
                full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
                head_dim=128,
                num_heads=32,
                short_conv_kernel_size=4,
            ),
        ),
        (7, 20),
        (20 * 32 * 128 * 128 * 4, 20 * 3 * 3 * 4096 * 2),
    ),
    # 128 heads of 64, one group of keys and queries of 128.
    "granite-4.0-h-small": (
        dict(
            model_type="granitemoehybrid",
            hidden_size=4096,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=8,
            layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
            mamba_d_conv=4,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            mamba_n_heads=128,
        ),
        (4, 36),
        (36 * 128 * 64 * 128 * 4, 36 * 3 * (8192 + 256) * 2),
    ),
    # 25 layers are MLPs without a cache.
    "NVIDIA-Nemotron-Nano-9B-v2": (
        dict(
            model_type="nemotron_h",
            hidden_size=4480,
            num_hidden_layers=56,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            hybrid_override_pattern=NEMOTRON_NANO_9B,
            mamba_head_dim=80,
            mamba_num_heads=128,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
        ),
        (4, 27),
        (27 * 128 * 80 * 128 * 4, 27 * 3 * (10_240 + 2048) * 2),
    ),
    # Every layer has both.
    "Falcon-H1-34B": (
        dict(
            model_type="falcon_h1",
            hidden_size=5120,
            num_hidden_layers=72,
            num_attention_heads=20,
            num_key_value_heads=4,
            head_dim=128,
            mamba_d_conv=4,
            mamba_d_head=128,
            mamba_d_ssm=4096,
            mamba_d_state=256,
            mamba_n_groups=2,
            mamba_n_heads=32,
        ),
        (72, 72),
        (72 * 32 * 128 * 256 * 4, 72 * 3 * (4096 + 1024) * 2),
    ),
    "Bamba-9B": (
        dict(
            model_type="bamba",
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            attn_layer_indices=[9, 18, 27],
            mamba_d_state=128,
            mamba_n_heads=128,
        ),
        (3, 29),
        (29 * 128 * 64 * 128 * 4, 29 * 3 * (8192 + 256) * 2),
    ),
    "mamba2-2.7b": (
        dict(
            model_type="mamba2",
            hidden_size=2560,
            num_hidden_layers=64,
            num_heads=80,
            head_dim=64,
            n_groups=1,
            state_size=128,
        ),
        (0, 64),
        (64 * 80 * 64 * 128 * 4, 64 * 3 * (5120 + 256) * 2),
    ),
    # The state holds only previous tokens.
    "LFM2-1.2B": (
        dict(
            model_type="lfm2",
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            full_attn_idxs=[2, 5, 8, 10, 12, 14],
            conv_L_cache=3,
        ),
        (6, 10),
        (0, 10 * 2 * 2048 * 2),
    ),
    "Jamba-v0.1": (
        dict(
            model_type="jamba",
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_conv=4,
            mamba_d_state=16,
            mamba_expand=2,
        ),
        (4, 28),
        (28 * 8192 * 16 * 4, 28 * 3 * 8192 * 2),
    ),
    "mamba-2.8b": (
        dict(model_type="mamba", hidden_size=2560, num_hidden_layers=64, state_size=16),
        (0, 64),
        (64 * 5120 * 16 * 4, 64 * 3 * 5120 * 2),
    ),
}


def count_bytes(arrays):
    return sum(math.prod(each.shape) * (4 if each.dtype else 2) for each in arrays)


def weigh(layers):
    """Return the bytes of all states: of memories, and of previous tokens."""
    states = [layer.state for layer in layers if layer.state]
    arrays = [each for state in states for each in state.arrays]
    memories = [array for name, array in arrays if not name.startswith("past")]
    past = [array for name, array in arrays if name.startswith("past")]
    return count_bytes(memories), count_bytes(past)


@pytest.mark.parametrize("name", MODELS)
def test_states_of_published_models(tmp_path, name):
    settings, (num_attending, num_with_state), expected = MODELS[name]
    path = folder(tmp_path, **BFLOAT16 | settings)
    sizes = read_sizes(path, {}, with_states=True)
    assert sum(layer.attends for layer in sizes.layers) == num_attending
    assert sum(layer.state is not None for layer in sizes.layers) == num_with_state
    assert sizes.fields["num_layers"] == len(sizes.layer_windows) == num_attending
    assert weigh(sizes.layers) == expected


def test_a_state_beside_keys_and_values(tmp_path):
    """A state of Qwen3-Next is as large as 3,072 tokens of its keys and values."""
    settings = BFLOAT16 | MODELS["Qwen3-Next-80B-A3B"][0]
    path = folder(tmp_path, **settings)
    memories, _ = weigh(read_sizes(path, {}, with_states=True).layers)
    config = jkv.CacheConfig.from_model(path, num_blocks=1)
    assert memories == 72 * 2**20 == 3072 * config.bytes_per_token


def test_a_pending_token_is_small(tmp_path):
    """The pending inputs of four tokens take at most a tenth of the state."""
    for name in ("Qwen3-Next-80B-A3B", "granite-4.0-h-small", "Falcon-H1-34B"):
        path = folder(tmp_path, **BFLOAT16 | MODELS[name][0])
        layers = read_sizes(path, {}, with_states=True).layers
        state = next(layer.state for layer in layers if layer.state)
        arrays, inputs = (
            [array for _, array in each] for each in (state.arrays, state.inputs)
        )
        assert 4 * count_bytes(inputs) <= count_bytes(arrays) / 10


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_published_models(tmp_path, name):
    """Each layer is in the groups of its cached data; bytes equal the arrays'."""
    settings, (num_attending, num_with_state), states = MODELS[name]
    path = folder(tmp_path, **BFLOAT16 | settings)
    config = jkv.GroupedConfig.from_model(
        path, max_sequences=3, max_context_length=64, max_pending=2
    )
    (of_states,) = config.state_groups
    assert sum(group.num_layers for group in config.block_groups) == num_attending
    assert of_states.num_layers == num_with_state
    layers = read_sizes(path, {}, with_states=True).layers
    assert [len(groups) for groups in config.groups_of_layers] == [
        layer.attends + (layer.state is not None) for layer in layers
    ]
    inputs = next(layer.state.inputs for layer in layers if layer.state)
    pending = 2 * num_with_state * count_bytes([array for _, array in inputs])
    # Plus a number per sequence and layer: the state's token count.
    assert of_states.bytes_per_sequence == sum(states) + pending + 4 * num_with_state
    blocks = [group.num_blocks * group.block_size for group in config.block_groups]
    assert blocks == [3 * 64] * bool(num_attending)


def test_a_cache_of_a_small_hybrid(tmp_path):
    settings = MODELS["Falcon-H1-34B"][0] | dict(
        num_hidden_layers=2, mamba_d_state=8, mamba_d_ssm=256, mamba_n_heads=2
    )
    config = jkv.GroupedConfig.from_model(
        folder(tmp_path, **BFLOAT16 | settings),
        max_sequences=2,
        max_context_length=32,
        num_snapshots=2,
        snapshot_every=16,
        prefix_caching=True,
    )
    assert config.layer_groups == ((0, 1), (0, 1))
    cache = jkv.init(config)
    cache, opened = jkv.allocate(cache, [0])
    cache, batch = jkv.append(cache, opened.seq_ids, [2], capacity=2)
    state = jkv.read_state(cache, 1, batch)
    assert {name: array.shape for name, array in state.items()} == dict(
        memory=(1, 2, 128, 8),
        past_x=(1, 3, 2, 128),
        past_b=(1, 3, 2, 8),
        past_c=(1, 3, 2, 8),
    )


def test_state_fields_without_recurrent_layers(tmp_path):
    with pytest.raises(ValueError, match="max_pending.* there are none"):
        jkv.GroupedConfig.from_model(
            folder(tmp_path, **LLAMA), max_sequences=2, max_pending=4
        )


def test_a_model_without_attention_is_refused_as_a_single_pool(tmp_path):
    path = folder(tmp_path, **BFLOAT16 | MODELS["mamba2-2.7b"][0])
    with pytest.raises(ValueError, match="none of its layers.*GroupedConfig"):
        jkv.CacheConfig.from_model(path, num_blocks=4)


def test_keys_and_values_only(tmp_path):
    """With `num_layers` given, or by default, there are no states."""
    path = folder(tmp_path, **BFLOAT16 | MODELS["Bamba-9B"][0])
    given = read_sizes(path, {"num_layers": 3}, with_states=True)
    default_platforms = read_sizes(path, {})
    assert given.layers is default_platforms.layers is None
    assert given.fields == default_platforms.fields
    assert jkv.CacheConfig.from_model(path, num_blocks=4).num_layers == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(model_type="minimax", layer_types=["linear_attention"]),
            "'minimax' have",
        ),
        (
            dict(model_type="bamba", mamba_n_heads="many"),
            "mamba_n_heads must be .* got 'many'",
        ),
        (dict(model_type="nemotron_h", hybrid_override_pattern="M?"), r"\['\?'\]"),
    ],
)
def test_unknown_states_are_refused_by_name(tmp_path, changes, message):
    path = folder(tmp_path, **LLAMA | changes)
    with pytest.raises(ValueError, match=message):
        read_sizes(path, {}, with_states=True)


def test_other_models_have_no_states(tmp_path):
    assert read_sizes(folder(tmp_path, **LLAMA), {}, with_states=True).layers is None
