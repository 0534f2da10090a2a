"""python -m jkv.plan for models with recurrent layers."""

import pytest
from support.checkpoints.config_json import folder

import jkv
from jkv.commands.capacity import main, make_plan

pytestmark = pytest.mark.one_end

# Qwen3-Next 80B: 36 of 48 layers have 32 heads of 128 x 128.
QWEN3_NEXT = dict(
    model_type="qwen3_next",
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    full_attention_interval=4,
    max_position_embeddings=262_144,
    torch_dtype="bfloat16",
)

MAMBA2 = dict(
    model_type="mamba2",
    hidden_size=2560,
    num_hidden_layers=64,
    num_heads=80,
    head_dim=64,
    n_groups=1,
    state_size=128,
    torch_dtype="bfloat16",
)


def test_states_beside_keys_and_values(tmp_path):
    found = make_plan(folder(tmp_path, **QWEN3_NEXT), "192GiB", weights="80GiB")
    past = 36 * 3 * 8192 * 2
    assert found.states == (36, 72 * 2**20, past)
    assert found.bytes_per_token == 12 * 2 * 2 * 256 * 2
    # A sequence of 4,096 tokens, its states, and their token counts.
    expected = 4096 * found.bytes_per_token + 72 * 2**20 + past + 36 * 4
    assert found.bytes_needed[4096] == expected
    output = found.report()
    assert (
        "36 layers with a state: 72.0 MiB of memory, as much as 3,072 tokens" in output
    )
    assert "context length   sequences at once   bytes of each\n" in output
    assert found.groups.bytes <= found.budget
    assert found.groups.layer_groups == (1, 1, 1, 0) * 12


def test_devices_shard_the_heads_of_states(tmp_path):
    path = folder(tmp_path, **QWEN3_NEXT)
    one, two = (
        make_plan(path, "192GiB", weights="80GiB", tensor_parallel=n) for n in (1, 2)
    )
    assert one.states == two.states and one.bytes_needed == two.bytes_needed
    (whole,), (half,) = (plan.groups.state_groups for plan in (one, two))
    numbers = 36 * 4  # token counts of states, on every device
    assert half.bytes_per_sequence - numbers == (whole.bytes_per_sequence - numbers) / 2


def test_pending_tokens_are_counted(tmp_path):
    path = folder(tmp_path, **QWEN3_NEXT)
    plain, guessing = (
        make_plan(path, "192GiB", weights="80GiB", max_pending=n) for n in (0, 4)
    )
    ratio = guessing.bytes_needed[1024] / plain.bytes_needed[1024]
    assert 1 < ratio < 1.1
    assert "4 tokens can be taken back" in guessing.report()


def test_a_model_without_keys_and_values(tmp_path):
    path, longest = folder(tmp_path, **MAMBA2), 8192
    found = make_plan(path, "24GiB", weights="5GiB", max_context_length=longest)
    assert found.config is None and found.bytes_per_token == 0
    # A sequence takes the same memory at any length.
    assert set(found.bytes_needed.values()) == {sum(found.states[1:]) + 64 * 4}
    output = found.report()
    assert "per token" not in output and "160.0 MiB of memory;" in output
    for memory, weights, message in (
        ("24MiB", "1KiB", "not even one sequence"),
        ("1GiB", "5GiB", "leave nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(path, memory, weights=weights, max_context_length=longest)
    with pytest.raises(ValueError, match="at least 1 device"):
        make_plan(path, "24GiB", max_context_length=longest, tensor_parallel=0)


def test_snapshots_for_prefix_caching(tmp_path, capsys):
    """Prefix caching needs snapshots, which take a part of the memory."""
    path = str(folder(tmp_path, **QWEN3_NEXT))
    given = ["--model", path, "--memory", "192GiB", "--max-context-length", "4096"]
    with pytest.raises(SystemExit):
        main([*given, "--prefix-caching"])
    assert "num_snapshots and snapshot_every" in capsys.readouterr().err
    copies = ["--num-snapshots", "64", "--snapshot-every", "1024"]
    main([*given, "--prefix-caching", *copies])
    output = capsys.readouterr().out
    assert "states and 64 snapshots, 73.7 MiB each" in output


def test_unknown_states_and_the_fix(tmp_path, capsys):
    settings = QWEN3_NEXT | dict(
        model_type="minimax", layer_types=["linear_attention", "full_attention"] * 24
    )
    path = folder(tmp_path, **settings)
    with pytest.raises(ValueError, match="'minimax' have a state.*give num_layers"):
        make_plan(path, "192GiB")
    main(["--model", str(path), "--memory", "192GiB", "--num-layers", "24"])
    assert "24 layers" in capsys.readouterr().out
    assert jkv.CacheConfig.from_model(path, num_blocks=4).num_layers == 24
