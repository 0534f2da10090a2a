"""Tests of prefix cache hits with several groups of layers.

One group has full attention, the other a window of five: row 12 attends to tokens from
8 on. Blocks have four tokens, and layer 0 is the windowed one.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    fork,
    free,
    free_count,
    match,
    names,
    small_config,
    table,
    truncate,
    with_storage_filled,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end

FULL, WINDOWED = 0, 1
SEQUENCE = list(range(50, 66))


@functools.cache
def fresh(num_blocks=16):
    """Create sixteen blocks for full attention and twelve for windows, full of NaN."""
    sizes = dict(max_sequences=8, max_context_length=32)
    config = jkv.GroupedConfig(
        groups=(
            small_config(num_blocks=num_blocks, **sizes),
            small_config(num_blocks=12, sliding_window=5, head_dim=3, **sizes),
        ),
        layer_groups=(WINDOWED, FULL),
        prefix_caching=True,
    )
    return with_storage_filled(jkv.init(config), np.nan)


def compute(cache, seq_id, sequence, size=4):
    """Append a sequence's missing tokens, `size` at a time; commit each step."""
    start = int(jkv.context_lengths(cache)[seq_id])
    for begin in range(start, len(sequence), size):
        part = sequence[begin : begin + size]
        cache, step = append(cache, seq_id, len(part), tokens=part)
        assert names(step.status) == ["OK"]
        cache = write_tokens(cache, step, part)
        jkv.check(cache)
    return cache


@functools.cache
def remembering():
    """Return a cache that has computed SEQUENCE, and freed it."""
    cache, _ = allocate(fresh(), 0)
    cache, _ = free(compute(cache, 0, SEQUENCE), 0)
    jkv.check(cache)
    return cache


def without_window_blocks(cache, count):
    """Allocate `count` window blocks to other sequences, the oldest first."""
    while count:
        tokens = 4 * min(count, 3)  # no more are reserved per sequence
        cache, opened = allocate(cache, tokens)
        jkv.raise_for_status(opened.status)
        count -= tokens // 4
    return cache


def stored(cache, layer, seq_id):
    """Return a sequence's numbers in a layer, None where they were released."""
    keys, _, length, start = jkv.read(cache, layer, seq_id, return_start=True)
    found = np.asarray(keys)[: int(length), 0, 0].tolist()
    return [None] * int(start) + [int(number) for number in found[int(start) :]]


def test_a_prefix_is_found_in_all_groups():
    cache, found = allocate(remembering(), 20, tokens=[SEQUENCE])
    assert found.num_cached.tolist() == [15]
    seq_id = int(found.seq_ids[0])
    # The next row attends from 11 on: the windowed layer maps blocks 2 and 3.
    assert stored(cache, 1, seq_id) == SEQUENCE[:15]
    assert stored(cache, 0, seq_id) == [None] * 8 + SEQUENCE[8:15]
    assert table(cache, seq_id, FULL)[:3] == [0, 1, 2]
    assert table(cache, seq_id, WINDOWED)[0] == 2
    # Five blocks for full attention; three for the window, one of them cached.
    assert len(table(cache, seq_id, FULL)) == 5
    assert len(table(cache, seq_id, WINDOWED)) == 3
    jkv.check(cache)
    computed = compute(cache, seq_id, SEQUENCE + [1, 2, 3, 4, 5])
    assert stored(computed, 0, seq_id)[12:] == [*SEQUENCE[12:], 1, 2, 3, 4, 5]


def test_the_hit_is_the_longest_prefix_in_all_groups():
    """Of the windowed blocks, only columns 3 and 2 are left, freed last."""
    sequences = [SEQUENCE[:9], SEQUENCE[:13], SEQUENCE]
    assert match(remembering(), sequences) == [8, 12, 15]
    cache = without_window_blocks(remembering(), 10)
    assert match(cache, sequences) == [0, 12, 15]
    cache, found = allocate(cache, [0, 0], tokens=[SEQUENCE[:9], SEQUENCE])
    assert found.num_cached.tolist() == [0, 15]
    jkv.check(cache)


def test_a_partial_hit_needs_a_block_in_each_group():
    similar = [*SEQUENCE[:14], 7, 7]
    assert match(remembering(), [similar]) == [14]
    cache = without_window_blocks(remembering(), 11)  # column 3 is evicted, too
    assert match(cache, [similar, SEQUENCE, SEQUENCE[:13]]) == [12, 12, 12]


def test_equal_blocks_are_stored_once_in_each_group():
    """Two sequences compute the same tokens in parallel."""
    cache, _ = allocate(fresh(), [0, 0])
    cache = compute(compute(cache, 0, SEQUENCE), 1, SEQUENCE)
    assert table(cache, 0, FULL) == table(cache, 1, FULL)
    assert table(cache, 0, WINDOWED) == table(cache, 1, WINDOWED)
    assert free_count(cache, FULL) == 16 - 4 and free_count(cache, WINDOWED) == 12 - 2
    same_step, _ = allocate(fresh(), [0, 0])
    same_step, step = append(same_step, [0, 1], [8, 8], tokens=SEQUENCE[:8] * 2)
    same_step = write_tokens(same_step, step, SEQUENCE[:8] * 2)
    jkv.check(same_step)
    for group in (FULL, WINDOWED):
        assert table(same_step, 0, group) == table(same_step, 1, group) == [0, 1]
        assert free_count(same_step, group) == (14, 10)[group]


def test_a_released_block_is_found_in_another_sequence():
    """A late commit finds only the windowed blocks of columns 2 and 3."""
    cache, _ = allocate(fresh(), 0)
    steps = []
    for start in range(0, 16, 4):
        cache, step = append(cache, 0, 4, tokens=SEQUENCE[start : start + 4])
        steps.append(step)
    for step in steps:
        cache = jkv.commit(cache, step.batch)
    jkv.check(cache)
    sequences = [SEQUENCE[:9], SEQUENCE]
    assert match(cache, sequences) == [0, 15]
    cache, opened = allocate(cache, 0)
    cache = compute(cache, int(opened.seq_ids[0]), SEQUENCE)
    assert match(cache, sequences) == [8, 15]
    assert table(cache, 1, FULL) == table(cache, 0, FULL)


def test_an_overwritten_block_is_not_found():
    """Only sequence 1 still maps the windowed block of column 3; 2 shares the other."""
    cache, _ = allocate(remembering(), 0, tokens=[SEQUENCE])
    cache, _ = fork(compute(cache, 1, SEQUENCE), 1)
    both, status = truncate(cache, [1, 2], [13, 13])
    assert names(status) == ["OK", "OK"]
    jkv.check(both)
    assert match(both, [SEQUENCE]) == [15]  # both have copies
    longer = [*SEQUENCE, *range(8)]
    cache = compute(cache, 2, longer)
    assert stored(cache, 0, 2)[:20] == [None] * 16 + [0, 1, 2, 3]
    shared = table(cache, 1, FULL)[3]
    cut, status = truncate(cache, 1, 13)
    assert names(status) == ["OK"]
    jkv.check(cut)
    assert table(cut, 1, FULL)[3] != shared == table(cut, 2, FULL)[3]
    assert table(cut, 1, WINDOWED) == table(cache, 1, WINDOWED)
    found = jkv.match(cut, [SEQUENCE, [*longer, 9]])
    assert found.tolist() == [12, 24]


def test_a_reallocated_block_loses_its_counterpart():
    """The four full-attention blocks are indexed again with other tokens."""
    cache, _ = allocate(fresh(num_blocks=4), 0)
    cache, _ = free(compute(cache, 0, SEQUENCE[:8]), 0)
    assert match(cache, [SEQUENCE[:9]]) == [8]
    other = [token + 100 for token in SEQUENCE]
    cache, _ = allocate(cache, 0)
    cache = compute(cache, 1, other)
    assert stored(cache, 1, 1) == other
    assert stored(cache, 0, 1) == [None] * 8 + other[8:]
    assert match(cache, [SEQUENCE[:9], other]) == [0, 15]


def test_evict_cached_evicts_the_oldest_block_of_each_group():
    """Column 0 is the oldest windowed block, and the newest of full attention."""
    cache = jkv.evict_cached(remembering(), 1)
    assert match(cache, [SEQUENCE[:6], SEQUENCE[:9], SEQUENCE]) == [0, 8, 12]
    jkv.check(cache)
    assert match(jkv.evict_cached(remembering(), 4), [SEQUENCE]) == [0]
    assert match(jkv.clear_prefixes(remembering()), [SEQUENCE]) == [0]
    assert match(jkv.invalidate(remembering(), 0), [SEQUENCE]) == [0]
    assert match(jkv.invalidate(remembering(), 1), [SEQUENCE]) == [15]


def test_pinned_blocks_are_not_allocated_in_any_group():
    """Cached blocks are pinned in all groups before any block is allocated."""
    cache = without_window_blocks(remembering(), 8)
    # The first request has the four remaining windowed blocks reserved: one is a hit,
    # two are allocated, and one is left for the other request.
    _, found = allocate(cache, [20, 8], tokens=[SEQUENCE, [9, 9]])
    assert names(found.status) == ["OK", "OUT_OF_BLOCKS"]
    cache, found = allocate(cache, [20, 4], tokens=[SEQUENCE, [9, 9]])
    assert names(found.status) == ["OK", "OK"]
    assert found.num_cached.tolist() == [15, 0]
    assert free_count(cache, WINDOWED) == 0
    jkv.check(cache)
    refused, found = allocate(cache, [0, 1, 0])
    assert names(found.status) == ["OK", "OUT_OF_BLOCKS", "OK"]
    assert stored(refused, 0, 4)[8:] == SEQUENCE[8:15]


def test_attention_after_a_hit_equals_recomputation():
    """Attention after a hit equals attention of the recomputed sequence."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((16, 2, 3)), jnp.float32)
    outputs = []
    for cache, seq_id in ((remembering(), 1), (fresh(), 0)):
        cache, found = allocate(cache, 0, tokens=[SEQUENCE])
        assert int(found.seq_ids[0]) == seq_id
        if seq_id == 0:
            cache = compute(cache, 0, SEQUENCE[:15])
        cache, step = append(cache, seq_id, 1, tokens=SEQUENCE[15:])
        cache = write_tokens(cache, step, SEQUENCE[15:])
        outputs.append(
            [
                np.asarray(jkv.attend(cache, layer, step.batch, queries, window=window))
                for layer, queries, window in ((0, rows, 5), (1, rows[..., :2], None))
            ]
        )
    for found, expected in zip(*outputs, strict=True):
        assert np.isfinite(found).all() and np.abs(found[0]).max() > 40
        np.testing.assert_array_equal(found, expected)
