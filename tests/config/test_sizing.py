"""Configurations from budgets, and their capacity in tokens."""

import dataclasses

import pytest
from support.paths import EXAMPLES
from support.small_caches import small_config

import jkv
from jkv.config.counts import human_bytes, parse_bytes

pytestmark = pytest.mark.one_end
PYDOC = EXAMPLES / "models" / "pydoc"
SIZES = dict(num_layers=2, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("budget", [50_000, 50_001, 1_000_000])
def test_a_budget_gives_the_maximum_number_of_sequences(budget, prefix_caching):
    sizes = SIZES | dict(prefix_caching=prefix_caching)
    config = jkv.CacheConfig.for_context_length(30, budget_bytes=budget, **sizes)
    assert config.bytes <= budget
    more = jkv.CacheConfig.for_context_length(
        30, max_sequences=config.max_sequences + 1, **sizes
    )
    assert more.bytes > budget
    # All of them reach that length, without sharing.
    assert config.max_sequences * -(-30 // config.block_size) <= config.num_blocks
    if budget > 50_001:
        return  # counted the same way, with another program to compile
    cache = jkv.init(config, storage=False)
    cache, opened = jkv.allocate(cache, [30] * config.max_sequences)
    assert not opened.status.any()


def test_either_a_budget_or_a_number():
    for wrong in (dict(), dict(max_sequences=2, budget_bytes=10**6)):
        with pytest.raises(ValueError, match="max_sequences or budget"):
            jkv.CacheConfig.for_context_length(30, **SIZES, **wrong)
    with pytest.raises(ValueError, match="one sequence of 30 tokens takes"):
        jkv.CacheConfig.for_context_length(30, budget_bytes="1kB", **SIZES)


def test_budgets_with_units():
    sizes = SIZES | dict(max_sequences=2, max_context_length=64)
    for text, count in (("1MiB", 2**20), ("1 MB", 10**6), ("0.5GB", 5 * 10**8)):
        config = jkv.CacheConfig.for_memory(text, **sizes)
        assert config == jkv.CacheConfig.for_memory(count, **sizes)


def test_reported_capacities_are_reached():
    config = small_config()  # 8 blocks of 4, 4 sequences of up to 14
    assert [config.longest_context(n) for n in range(6)] == [0, 14, 14, 8, 8, 0]
    found = [config.most_sequences(n) for n in (0, 4, 5, 9, 13, 14, 15)]
    assert found == [4, 4, 4, 2, 2, 2, 0]
    for num in (1, 2, 3, 4):
        cache = jkv.init(config, storage=False)
        length, others = config.longest_context(num), [0] * (4 - num)
        assert bool(jkv.can_allocate(cache, [length] * num + others).all())
        if length < 14:
            longer = [length + 1] * num + others
            assert not bool(jkv.can_allocate(cache, longer).all())


def test_bytes_by_hand():
    config = small_config(num_layers=3, num_kv_heads=2, value_head_dim=5)
    # 3 layers of 2 heads, 2 + 5 floats.
    assert config.bytes_per_token == 3 * 2 * 7 * 4
    assert config.storage_bytes == 32 * config.bytes_per_token


def test_sizes_printed_in_human_units():
    config = small_config(num_layers=3, value_head_dim=5, prefix_caching=True)
    lines = str(config).splitlines()
    assert lines[:3] == [
        "3 layers, 1 kv heads of 2 (values of 5), float32, prefix caching",
        "8 blocks of 4 = 32 tokens, 84 B each",
        "4 sequences of up to 14 tokens",
    ]
    assert lines[3].startswith(human_bytes(config.bytes))
    # `repr` still shows the constructor's arguments.
    assert repr(config).startswith("CacheConfig(num_layers=3, ")


def test_presets_fill_their_budgets():
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


def test_units():
    for text, count in (("192GiB", 192 * 2**30), ("80 gb", 80 * 10**9), ("7", 7)):
        assert parse_bytes(text) == count
    assert parse_bytes("9007199254740993 B") == 9007199254740993  # past 2**53
    for wrong in ("", "4X", "4G", "-3GB", "0", "GB", "1.2.3MB", "nan"):
        with pytest.raises(ValueError, match="byte"):
            parse_bytes(wrong)
    for count, text in ((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB")):
        assert human_bytes(count) == text
