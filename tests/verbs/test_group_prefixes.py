"""Prefix cache hits with unlike layers: each group has the tokens the next row sees.

One group sees all tokens, the other a window of five: row 12 sees from 8 on. Blocks
have four tokens, and layer 0 is the windowed one.
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
TEXT = list(range(50, 66))


@functools.cache
def fresh(num_blocks=16):
    """Sixteen blocks for all tokens, twelve for windows; NaN in all."""
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


def compute(cache, seq_id, text, size=4):
    """Append a text's missing tokens, some at a time; commit each."""
    start = int(jkv.context_lengths(cache)[seq_id])
    for begin in range(start, len(text), size):
        part = text[begin : begin + size]
        cache, step = append(cache, seq_id, len(part), tokens=part)
        assert names(step.status) == ["OK"]
        cache = write_tokens(cache, step, part)
        jkv.check(cache)
    return cache


@functools.cache
def remembering():
    """A cache that has computed TEXT, and has freed it."""
    cache, _ = allocate(fresh(), 0)
    cache, _ = free(compute(cache, 0, TEXT), 0)
    jkv.check(cache)
    return cache


def without_window_blocks(cache, count):
    """Allocate `count` window blocks to others, the oldest first."""
    while count:
        tokens = 4 * min(count, 3)  # no more are reserved for a sequence
        cache, opened = allocate(cache, tokens)
        jkv.raise_for_status(opened.status)
        count -= tokens // 4
    return cache


def stored(cache, layer, seq_id):
    """The numbers that a sequence has in a layer, None where they were given back."""
    keys, _, length, start = jkv.read(cache, layer, seq_id, return_start=True)
    found = np.asarray(keys)[: int(length), 0, 0].tolist()
    return [None] * int(start) + [int(number) for number in found[int(start) :]]


def test_a_text_is_found_in_all_groups():
    cache, found = allocate(remembering(), 20, tokens=[TEXT])
    assert found.num_cached.tolist() == [15]
    seq_id = int(found.seq_ids[0])
    # The next row sees from 11 on: the windowed layer is given blocks 2 and 3.
    assert stored(cache, 1, seq_id) == TEXT[:15]
    assert stored(cache, 0, seq_id) == [None] * 8 + TEXT[8:15]
    assert table(cache, seq_id, FULL)[:3] == [0, 1, 2]
    assert table(cache, seq_id, WINDOWED)[0] == 2
    # Five blocks for all tokens; three for the window, one of them cached.
    assert len(table(cache, seq_id, FULL)) == 5
    assert len(table(cache, seq_id, WINDOWED)) == 3
    jkv.check(cache)
    computed = compute(cache, seq_id, TEXT + [1, 2, 3, 4, 5])
    assert stored(computed, 0, seq_id)[12:] == [*TEXT[12:], 1, 2, 3, 4, 5]


def test_the_longest_prefix_that_all_groups_have():
    """Only the windowed blocks of columns 3 and 2 are left, freed last."""
    texts = [TEXT[:9], TEXT[:13], TEXT]
    assert match(remembering(), texts) == [8, 12, 15]
    cache = without_window_blocks(remembering(), 10)
    assert match(cache, texts) == [0, 12, 15]
    cache, found = allocate(cache, [0, 0], tokens=[TEXT[:9], TEXT])
    assert found.num_cached.tolist() == [0, 15]
    jkv.check(cache)


def test_a_part_of_a_block_needs_a_block_in_each_group():
    similar = [*TEXT[:14], 7, 7]
    assert match(remembering(), [similar]) == [14]
    cache = without_window_blocks(remembering(), 11)  # column 3 has gone, too
    assert match(cache, [similar, TEXT, TEXT[:13]]) == [12, 12, 12]


def test_equal_blocks_are_stored_once_in_each_group():
    """Two sequences compute the same text side by side."""
    cache, _ = allocate(fresh(), [0, 0])
    cache = compute(compute(cache, 0, TEXT), 1, TEXT)
    assert table(cache, 0, FULL) == table(cache, 1, FULL)
    assert table(cache, 0, WINDOWED) == table(cache, 1, WINDOWED)
    assert free_count(cache, FULL) == 16 - 4 and free_count(cache, WINDOWED) == 12 - 2
    same_step, _ = allocate(fresh(), [0, 0])
    same_step, step = append(same_step, [0, 1], [8, 8], tokens=TEXT[:8] * 2)
    same_step = write_tokens(same_step, step, TEXT[:8] * 2)
    jkv.check(same_step)
    for group in (FULL, WINDOWED):
        assert table(same_step, 0, group) == table(same_step, 1, group) == [0, 1]
        assert free_count(same_step, group) == (14, 10)[group]


def test_a_block_given_back_is_found_at_another_owner():
    """A late commit finds the windowed blocks of columns 2 and 3 alone."""
    cache, _ = allocate(fresh(), 0)
    steps = []
    for start in range(0, 16, 4):
        cache, step = append(cache, 0, 4, tokens=TEXT[start : start + 4])
        steps.append(step)
    for step in steps:
        cache = jkv.commit(cache, step.batch)
    jkv.check(cache)
    texts = [TEXT[:9], TEXT]
    assert match(cache, texts) == [0, 15]
    cache, opened = allocate(cache, 0)
    cache = compute(cache, int(opened.seq_ids[0]), TEXT)
    assert match(cache, texts) == [8, 15]
    assert table(cache, 1, FULL) == table(cache, 0, FULL)


def test_a_block_that_is_written_again_is_not_found():
    """Sequence 1 alone still has the windowed block of column 3, 2 shares the other."""
    cache, _ = allocate(remembering(), 0, tokens=[TEXT])
    cache, _ = fork(compute(cache, 1, TEXT), 1)
    both, status = truncate(cache, [1, 2], [13, 13])
    assert names(status) == ["OK", "OK"]
    jkv.check(both)
    assert match(both, [TEXT]) == [15]  # both have copies
    longer = [*TEXT, *range(8)]
    cache = compute(cache, 2, longer)
    assert stored(cache, 0, 2)[:20] == [None] * 16 + [0, 1, 2, 3]
    shared = table(cache, 1, FULL)[3]
    cut, status = truncate(cache, 1, 13)
    assert names(status) == ["OK"]
    jkv.check(cut)
    assert table(cut, 1, FULL)[3] != shared == table(cut, 2, FULL)[3]
    assert table(cut, 1, WINDOWED) == table(cache, 1, WINDOWED)
    found = jkv.match(cut, [TEXT, [*longer, 9]])
    assert found.tolist() == [12, 24]


def test_a_reused_block_loses_its_pair():
    """Four blocks for all tokens: they are known again by another text."""
    cache, _ = allocate(fresh(num_blocks=4), 0)
    cache, _ = free(compute(cache, 0, TEXT[:8]), 0)
    assert match(cache, [TEXT[:9]]) == [8]
    other = [token + 100 for token in TEXT]
    cache, _ = allocate(cache, 0)
    cache = compute(cache, 1, other)
    assert stored(cache, 1, 1) == other
    assert stored(cache, 0, 1) == [None] * 8 + other[8:]
    assert match(cache, [TEXT[:9], other]) == [0, 15]


def test_evicts_the_oldest_block_of_each_group():
    """The oldest of the windowed blocks is that of column 0, of the others the last."""
    cache = jkv.evict_cached(remembering(), 1)
    assert match(cache, [TEXT[:6], TEXT[:9], TEXT]) == [0, 8, 12]
    jkv.check(cache)
    assert match(jkv.evict_cached(remembering(), 4), [TEXT]) == [0]
    assert match(jkv.clear_prefixes(remembering()), [TEXT]) == [0]
    assert match(jkv.invalidate(remembering(), 0), [TEXT]) == [0]
    assert match(jkv.invalidate(remembering(), 1), [TEXT]) == [15]


def test_no_group_gives_a_block_that_was_promised():
    """Cached blocks are pinned in all groups before any takes a block."""
    cache = without_window_blocks(remembering(), 8)
    # The four windowed blocks that are left belong to the text. One of these is a hit,
    # and two are taken: one is left for the other.
    _, found = allocate(cache, [20, 8], tokens=[TEXT, [9, 9]])
    assert names(found.status) == ["OK", "OUT_OF_BLOCKS"]
    cache, found = allocate(cache, [20, 4], tokens=[TEXT, [9, 9]])
    assert names(found.status) == ["OK", "OK"]
    assert found.num_cached.tolist() == [15, 0]
    assert free_count(cache, WINDOWED) == 0
    jkv.check(cache)
    refused, found = allocate(cache, [0, 1, 0])
    assert names(found.status) == ["OK", "OUT_OF_BLOCKS", "OK"]
    assert stored(refused, 0, 4)[8:] == TEXT[8:15]


def test_rows_attend_to_prefix_hits():
    """Attention behind a hit is that of the text computed anew."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((16, 2, 3)), jnp.float32)
    outputs = []
    for cache, seq_id in ((remembering(), 1), (fresh(), 0)):
        cache, found = allocate(cache, 0, tokens=[TEXT])
        assert int(found.seq_ids[0]) == seq_id
        if seq_id == 0:
            cache = compute(cache, 0, TEXT[:15])
        cache, step = append(cache, seq_id, 1, tokens=TEXT[15:])
        cache = write_tokens(cache, step, TEXT[15:])
        outputs.append(
            [
                np.asarray(jkv.attend(cache, layer, step.batch, queries, window=window))
                for layer, queries, window in ((0, rows, 5), (1, rows[..., :2], None))
            ]
        )
    for found, expected in zip(*outputs, strict=True):
        assert np.isfinite(found).all() and np.abs(found[0]).max() > 40
        np.testing.assert_array_equal(found, expected)
