"""GroupedConfig: its errors, and the arrays and bytes of its caches."""

import dataclasses

import jax
import pytest
from support.checkpoints.config_json import LLAMA, folder
from support.small_caches import small_config

import jkv
from jkv.inspection.recount import named_arrays

pytestmark = pytest.mark.one_end


def config_of_two(**changes):
    """Return layers 0 and 2 with a window, 3 with full attention, 1 without keys."""
    windowed = small_config(num_layers=2, num_blocks=6, sliding_window=5)
    fields = dict(groups=(windowed, small_config()), layer_groups=(0, (), 0, (1,)))
    return jkv.GroupedConfig(**fields | changes)


def grouped(count, **changes):
    """Return `count` groups of one layer, with windows of 5, 6, ... tokens."""
    groups = tuple(small_config(sliding_window=5 + i, **changes) for i in range(count))
    return dict(groups=groups, layer_groups=tuple(range(count)))


def test_bytes_by_hand():
    config = config_of_two()
    # Keys and values: layers, blocks, tokens, two floats.
    storage = 2 * (2 * 6 + 1 * 8) * 4 * 2 * 4
    # Five numbers of 4 sequences, a ring of 4, eight ints, 14 counters of two words.
    sequences = 5 * 16 + 16 + 32 + 112
    # Per group: tables 4x4, a row of 4, counts and ring, eight ints; the window's.
    groups = 64 + 16 + 2 * 24 + 32 + 16 + 64 + 16 + 2 * 32 + 32
    assert config.storage_bytes == storage
    assert config.metadata_bytes == sequences + groups
    # The index's bytes as documented, and three rows of 4.
    found = dataclasses.replace(config, prefix_caching=True)
    more = 32 * 4 + 8 * (116 + 4) + 6 * 12 + 3 * 16
    assert found.bytes == config.bytes + more


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        config_of_two(),
        config_of_two(groups=tuple(small_config(num_layers=n) for n in (2, 1))),
        jkv.GroupedConfig(**grouped(3, record_tokens=True)),
        jkv.GroupedConfig(
            groups=[small_config(dtype="int8", values_in_keys=True)], layer_groups=[0]
        ),
    ],
    ids=["windows", "equal", "no full layer", "one"],
)
def test_config_arrays_equal_the_cache(config, prefix_caching):
    config = dataclasses.replace(config, prefix_caching=prefix_caching)
    cache = jkv.init(config)
    found = named_arrays(cache)
    assert list(found) == list(config.arrays)
    for name, array in found.items():
        expected = config.arrays[name]
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype), name
    leaves = jax.tree.leaves(cache)
    assert config.bytes == cache.nbytes == sum(leaf.nbytes for leaf in leaves)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.storage))
    assert (config.storage_bytes, config.metadata_bytes) == (
        stored,
        config.bytes - stored,
    )
    assert cache.layer_groups == config.groups_of_layers


def test_only_the_leading_group_records_tokens():
    """The first with full attention, else the one with the widest window."""
    for config, leader in (
        (config_of_two(prefix_caching=True), 1),
        (jkv.GroupedConfig(**grouped(3, record_tokens=True)), 2),
        (config_of_two(groups=(small_config(num_layers=2), small_config())), 0),
    ):
        metadata = jkv.init(config, storage=False).metadata
        assert metadata.leader == leader
        has_tokens = [group.tokens is not None for group in metadata.groups]
        others = len(has_tokens) * [False]
        others[leader] = config.prefix_caching or config.groups[0].record_tokens
        assert has_tokens == others


def test_a_plain_config_is_one_group_of_all_layers():
    for prefix_caching in (False, True):
        plain = small_config(num_layers=3, prefix_caching=prefix_caching)
        inside = jkv.GroupedConfig(groups=(plain,), layer_groups=(0,) * 3)
        outside = jkv.GroupedConfig(
            groups=(small_config(num_layers=3),),
            layer_groups=(0,) * 3,
            prefix_caching=prefix_caching,
        )
        for config in (inside, outside):
            assert config.arrays == plain.arrays
            kinds = [jax.tree.structure(jkv.init(each)) for each in (config, plain)]
            assert kinds[0] == kinds[1]


def test_configurations_can_be_static_arguments():
    assert hash(config_of_two()) == hash(config_of_two())
    listed = config_of_two(layer_groups=[0, [], 0, [1]])
    assert listed == config_of_two()
    assert listed != config_of_two(prefix_caching=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layer_groups=(0, 0)), "group 1 has num_layers 1, .* gives it 0 layers"),
        (dict(layer_groups=(0, 0, 1, 2)), "must name one of 2 groups"),
        (dict(layer_groups=(0, 0, -1)), "must name one of 2 groups"),
        (dict(layer_groups=(0, 0, "1")), "must name one of 2 groups"),
        (dict(groups=()), "must name one of 0 groups"),
        (dict(layer_groups=(0, (0, 1))), "at most one group with blocks, .* layer 1"),
        (grouped(2, prefix_caching=True), r"GroupedConfig\(..., prefix_caching=True"),
        (
            grouped(2, block_size=5) | dict(prefix_caching=True),
            "sliding_window above block_size: got 5 and 5",
        ),
        (
            grouped(2, num_blocks=2**29) | dict(prefix_caching=True),
            "num_blocks must be at most .* with prefix_caching",
        ),
        (
            dict(groups=(small_config(num_layers=2, block_size=2), small_config())),
            "all groups need the same block_size",
        ),
    ],
)
def test_invalid_groups_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of_two(**changes)


def test_a_budget_includes_the_index(tmp_path):
    sizes = dict(layer_windows=[32, None], num_kv_heads=1, head_dim=8, step_tokens=4)
    plain, indexed = (
        jkv.GroupedConfig.for_context_length(
            64, budget_bytes="100kB", prefix_caching=prefix_caching, **sizes
        )
        for prefix_caching in (False, True)
    )
    assert indexed.bytes <= 100_000
    assert indexed.prefix_caching and indexed.max_sequences < plain.max_sequences
    assert [group.sliding_window for group in indexed.groups] == [None, 32]
    path = folder(tmp_path, **LLAMA, sliding_window=64)
    read = jkv.GroupedConfig.from_model(path, max_sequences=1, prefix_caching=True)
    assert read.prefix_caching and not read.groups[0].prefix_caching


def test_printed_in_human_units():
    lines = str(config_of_two(prefix_caching=True)).splitlines()
    assert lines[:5] == [
        "group 0: 2 layers, 1 kv heads of 2, float32, prefix caching, a window of 5 "
        "tokens",
        "6 blocks of 4 = 24 tokens, 32 B each",
        "group 1: 1 layers, 1 kv heads of 2, float32, prefix caching",
        "8 blocks of 4 = 32 tokens, 16 B each",
        "4 sequences of up to 14 tokens",
    ]
    assert lines[5:] == ["3.0 KiB, 1.8 KiB of it metadata"]
