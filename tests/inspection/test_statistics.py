"""stats and memory_profile, compared with recounts on the host and by hand."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    fork,
    free,
    grow,
    opened,
    small_cache,
    small_config,
    with_metadata,
)

import jkv
from jkv.inspection.statistics import _sums, _wide_sum
from jkv.metadata import requests
from jkv.status import Counter, Status

pytestmark = pytest.mark.one_end


def churned(**changes):
    """Return a cache after forks, a free and refused requests."""
    cache = opened(6, 5, 9, **changes)
    cache, _ = fork(cache, [0])
    cache, _ = free(cache, [1, 1])
    cache, _ = allocate(cache, [40, -5])
    return cache


def recounted(cache):
    """Return the statistics of the state, counted entry by entry in plain Python."""
    meta = cache.metadata
    rows = [
        [b for b in row if b != cache.num_blocks]
        for row in meta.groups[0].block_tables.tolist()
    ]
    owners = [sum(row.count(b) for row in rows) for b in range(cache.num_blocks)]
    return dict(
        live_blocks=sum(n > 0 for n in owners),
        free_blocks=sum(n == 0 for n in owners),
        shared_blocks=sum(n > 1 for n in owners),
        live_sequences=sum(meta.is_open.tolist()),
        tokens=sum(meta.context_lengths.tolist()),
    )


def test_the_state_equals_a_recount():
    for cache in (small_cache(), opened(6, 5, 9), churned()):
        found = jkv.stats(cache)
        for name, number in recounted(cache).items():
            assert getattr(found, name) == number, name
        assert found.total_blocks == 8 and found.max_sequences == 4


def test_counters_by_hand():
    # 2 + 2 + 3 blocks appended, 1 copied in the fork; sequence 1 released 2.
    stats = jkv.stats(churned())
    assert (stats.allocations, stats.frees, stats.peak_blocks) == (8, 2, 8)
    refused = {s: n for s, n in stats.refusals.items() if n}
    # 40 tokens exceed the context of 14.
    assert refused == {
        Status.CONTEXT_FULL: 1,
        Status.INVALID_ARGUMENT: 1,
        Status.INVALID_SEQUENCE: 1,
    }
    # Three times allocate and append, fork, free; the last allocate served no request.
    assert stats.clock == 8
    assert stats.last_compaction is None and stats.compactions == 0
    assert stats.evicted_sequences == stats.evicted_blocks == 0


def test_everything_is_a_python_number():
    stats = jkv.stats(churned())
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        assert type(value) in (int, dict, tuple, type(None)), field.name
    (group,) = stats.groups
    for field in dataclasses.fields(group):
        assert type(getattr(group, field.name)) is int, field.name
    assert {type(n) for n in stats.refusals.values()} == {int}
    assert type(stats.utilisation) is type(stats.hit_rate) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.tokens = 3


def test_counters_carry_into_64_bits():
    cache = small_cache()
    metadata = cache.metadata
    for _ in range(3):
        metadata = requests.add_counts(
            metadata,
            {
                Counter.PREFIX_TOKENS: jnp.uint32(2**32 - 1),
                Counter.PREFIX_HITS: jnp.uint32(2**31),
                Counter.CLOCK: jnp.uint32(2**32 - 2),
            },
        )
    stats = jkv.stats(cache.with_metadata(metadata))
    assert stats.prefix_tokens == 3 * (2**32 - 1)
    assert stats.prefix_hits == 3 * 2**31
    assert stats.clock == 3 * (2**32 - 2)
    assert stats.hit_rate == pytest.approx(0.5)


def test_a_sum_of_lengths_past_32_bits():
    # No cache this long fits a test, but the sum does.
    lengths = jnp.array([2**31 - 1] * 5 + [0, 7], jnp.int32)
    low, high = _wide_sum(lengths).tolist()
    assert low + (high << 32) == 5 * (2**31 - 1) + 7


def test_indexed_blocks_are_pinned_or_cached():
    """By definition of the index; three blocks are marked by hand, two of them free."""
    cache = opened(6, prefix_caching=True)  # blocks 0 and 1 are live
    hashes = np.array(cache.metadata.index.hashes)
    hashes[[0, 5, 7]] = 9
    index = dataclasses.replace(cache.metadata.index, hashes=jnp.asarray(hashes))
    cache = with_metadata(cache, index=index)
    stats = jkv.stats(cache)
    assert (stats.pinned_blocks, stats.cached_blocks, stats.free_blocks) == (1, 2, 6)
    profile = jkv.memory_profile(cache)
    assert profile.cached_bytes == 2 * profile.storage_bytes // 8


def test_stats_use_one_small_transfer_at_any_size(monkeypatch):
    # Every read of an array on the host, int() or np.asarray, uses `_value`.
    kind, fetched = type(jnp.zeros(1)), []
    read = kind._value.fget

    def counting(array):
        fetched.append(array.nbytes)
        return read(array)

    for size in (8, 4096):
        cache = jkv.init(
            small_config(num_blocks=size, max_sequences=size, prefix_caching=True)
        )
        for ask in (jkv.stats, jkv.memory_profile):
            with monkeypatch.context() as patch:
                patch.setattr(kind, "_value", property(counting))
                ask(cache)
            assert len(fetched) == 1 and fetched.pop() < 300


def test_values_do_not_retrace():
    sums = jax.jit(chex.assert_max_traces(_sums.__wrapped__, n=1))
    for cache in (small_cache(), opened(3), churned()):
        sums(cache.metadata)


def test_an_empty_pool_has_no_utilization():
    stats = jkv.stats(small_cache())
    assert stats.utilisation == 0.0 and stats.hit_rate == 0.0
    assert stats.peak_blocks == stats.allocations == stats.frees == 0
    assert jkv.stats(opened(14, 14)).utilisation == 1.0
    assert jkv.memory_profile(small_cache()).efficiency == 1.0


def test_the_peak_is_kept_after_freeing():
    cache = opened(14, 9)
    cache, _ = free(cache, [0, 1])
    stats = jkv.stats(cache)
    assert (stats.live_blocks, stats.peak_blocks) == (0, 7)
    assert (stats.allocations, stats.frees) == (7, 7)


def test_without_storage():
    cache = jkv.init(small_config(), storage=False)
    cache, _ = allocate(cache, [9])
    assert jkv.stats(cache).live_blocks == 3
    profile = jkv.memory_profile(cache)
    assert profile.storage_bytes == profile.used_bytes == profile.bytes_per_token == 0
    assert profile.total_bytes == profile.metadata_bytes == cache.nbytes


def test_printed_in_a_few_lines():
    lines = str(jkv.stats(churned())).splitlines()
    assert lines[0] == "blocks      6 of 8 live (75%), 1 of them shared, 0 pinned"
    assert lines[2] == "sequences   3 of 4 live, 21 tokens"
    assert "1 CONTEXT_FULL, 1 INVALID_SEQUENCE" in lines[4]
    assert len(lines) < 12 and max(map(len, lines)) < 88


def test_used_and_free_bytes_equal_the_storage():
    profile = jkv.memory_profile(churned())
    # One layer, one head, 4 tokens, 2 + 2 floats: 64 bytes a block; 6 are live.
    assert profile.used_bytes == 6 * 64 and profile.free_bytes == 2 * 64
    assert profile.used_bytes + profile.free_bytes == profile.storage_bytes


def test_efficiency_counts_a_shared_token_once():
    # Sequence 0 has blocks of 4 and 2 tokens, its fork the same 4 and a copy of the 2:
    # 8 tokens in 3 blocks, although the lengths add up to 12.
    cache, _ = fork(opened(6), [0])
    profile = jkv.memory_profile(cache)
    assert (profile.tokens, profile.cells) == (8, 12)
    assert profile.efficiency == 8 / 12
    # A reservation maps blocks without tokens.
    cache, _ = allocate(cache, [8])
    assert jkv.memory_profile(cache).efficiency == 8 / 20


def test_efficiency_equals_a_recount():
    cache = churned()
    cache = grow(cache, 3, [1, 2, 3])
    cells = set()
    for row, length in enumerate(cache.metadata.context_lengths.tolist()):
        slots = jkv.slots(cache, row, np.arange(length, dtype=np.int32))
        cells |= set(zip(slots.block_ids.tolist(), slots.offsets.tolist(), strict=True))
    assert jkv.memory_profile(cache).tokens == len(cells)


def test_printed_and_as_a_dict():
    profile = jkv.memory_profile(churned())
    report = profile.report()
    assert "storage     512 B: 384 B used, 128 B free" in report
    assert "efficiency  71%: 17 tokens in 24 cells" in report
    listed = report.split("arrays\n")[1].splitlines()
    assert len(listed) == len(profile.array_bytes)
    assert ["rows", "80", "B"] in [line.split() for line in listed]
    assert json.loads(json.dumps(profile.to_dict())) == profile.to_dict()
    assert profile.to_dict()["efficiency"] == 17 / 24


def test_compared_with_the_devices_memory_statistics(monkeypatch):
    cache = small_cache()
    cpu = jax.devices("cpu")[0]
    profile = jkv.memory_profile(cache)
    assert profile.devices == {f"cpu:{cpu.id}": cpu.memory_stats()}

    class Accelerator:
        platform, id = "gpu", 3

        def memory_stats(self):
            return {"bytes_in_use": 3 * 2**29, "bytes_limit": 2**31}

    monkeypatch.setattr(jkv.Cache, "devices", property(lambda _: {Accelerator()}))
    profile = jkv.memory_profile(cache)
    assert profile.devices["gpu:3"] == Accelerator().memory_stats()
    assert "device      gpu:3 1.5 GiB in use of 2.0 GiB" in profile.report()
