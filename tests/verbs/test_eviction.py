"""Tests of touch and evict: least recently used sequences are evicted first."""

import numpy as np
import pytest
from support.models.windowed_model import count_free, grouped_cache
from support.small_caches import (
    allocate,
    append,
    fork,
    free_count,
    names,
    opened,
    stored_tokens,
    touch,
)

import jkv

pytestmark = pytest.mark.one_end

NOBODY = np.full(4, -1, np.int32)


def protecting(*seq_ids):
    return np.array([*seq_ids, *NOBODY[len(seq_ids) :]], np.int32)


def evict(cache, num_blocks, *protected):
    cache, evicted = jkv.evict(cache, num_blocks, protect=protecting(*protected))
    return cache, evicted.tolist()


def evict_older_than(cache, age, *protected):
    cache, evicted = jkv.evict_older_than(cache, age, protect=protecting(*protected))
    return cache, evicted.tolist()


def test_created_last_used_and_number_of_uses():
    cache = opened(6, 3)
    meta = cache.metadata.sequences
    assert meta.created.tolist()[:2] == [1, 3]
    assert meta.last_used.tolist()[:2] == [2, 4]
    assert meta.num_uses.tolist()[:2] == [1, 1]
    cache, status = touch(cache, [0, 0, 3, -1])
    assert names(status) == ["OK", "INVALID_SEQUENCE", "INVALID_SEQUENCE", "OK"]
    assert int(jkv.clock(cache)) == 5
    assert cache.metadata.sequences.last_used.tolist()[:2] == [5, 4]
    assert cache.metadata.sequences.num_uses.tolist()[:2] == [2, 1]
    # Forking uses the parent; the child is new.
    cache, _ = fork(cache, 1)
    assert cache.metadata.sequences.last_used.tolist()[:3] == [5, 6, 6]
    assert cache.metadata.sequences.num_uses.tolist()[:3] == [2, 2, 0]
    # Reading, writing and refusals are not uses.
    before = cache.metadata.sequences.last_used.tolist()
    cache, _ = append(cache, 0, -1)
    jkv.read(cache, 0, 0)
    assert cache.metadata.sequences.last_used.tolist() == before


def test_least_recently_used_are_evicted_until_enough_is_free():
    cache = opened(8, 4, 8, 4)  # 2 + 1 + 2 + 1 blocks of 8
    cache, _ = touch(cache, 0)
    order = jkv.least_recently_used(cache, 4, exclude=NOBODY)
    assert order.tolist() == [1, 2, 3, 0]
    order = jkv.least_recently_used(cache, 3, exclude=[2, -1, 99, -1])
    assert order.tolist() == [1, 3, 0]
    after, evicted = evict(cache, 4, 2)
    assert evicted == [1, 3, -1, -1] and free_count(after) == 4
    jkv.check(after)
    # Nothing is evicted if enough is free; everything is if the pool is too small.
    assert evict(cache, 2)[1] == [-1] * 4
    after, evicted = evict(cache, 99, 0)
    assert evicted == [1, 2, 3, -1] and free_count(after) == 6


def test_exclude_protects_one_sequence_or_none():
    cache = opened(8, 4)
    assert jkv.least_recently_used(cache, 2).tolist() == [0, 1]
    assert jkv.least_recently_used(cache, 2, exclude=0).tolist() == [1, -1]
    assert jkv.evict(cache, 99)[1].tolist() == [0, 1, -1, -1]
    assert jkv.evict(cache, 99, protect=0)[1].tolist() == [1, -1, -1, -1]


def test_a_refused_request_succeeds_after_eviction():
    cache = opened(8, 8, 8)
    cache, refused = allocate(cache, 12)
    assert names(refused.status) == ["OUT_OF_BLOCKS"]
    cache, evicted = evict(cache, 3)
    assert evicted[:2] == [0, -1]
    cache, result = allocate(cache, 12)
    assert names(result.status) == ["OK"]
    assert stored_tokens(cache, 1) == list(range(100, 108))
    jkv.check(cache)


def test_shared_blocks_are_freed_with_their_last_sequence():
    cache, _ = fork(opened(8), 0)
    after, evicted = evict(cache, 7)
    assert evicted == [0, 1, -1, -1] and free_count(after) == 8


def test_sequences_above_an_age_are_evicted():
    cache = opened(8, 4, 4)
    for _ in range(3):
        cache, _ = touch(cache, 1)
    ages = int(jkv.clock(cache)) - np.asarray(cache.metadata.sequences.last_used)
    assert ages[:3].tolist() == [7, 0, 3]
    assert evict_older_than(cache, 7)[1] == [-1] * 4
    after, evicted = evict_older_than(cache, 2)
    assert evicted == [0, 2, -1, -1] and free_count(after) == 7
    _, evicted = evict_older_than(cache, 2, 0)
    assert evicted == [2, -1, -1, -1]
    for age in (-1, 2**32):
        with pytest.raises(ValueError, match="age must be"):
            jkv.evict_older_than(cache, age)


def test_each_group_has_the_requested_free_blocks():
    # 40 tokens need 10 blocks of group 0, and 3 for a window of 8 tokens.
    cache = grouped_cache([40, 40, 4, 40])
    assert count_free(cache) == [13, 10]
    cache, evicted = jkv.evict(cache, 12)
    assert evicted.tolist()[:2] == [0, -1] and count_free(cache) == [23, 13]
    # Group 0 has enough, group 1 not yet.
    cache, evicted = jkv.evict(cache, 15, protect=1)
    assert evicted.tolist()[:3] == [2, 3, -1] and count_free(cache) == [34, 17]
    jkv.check(cache)
