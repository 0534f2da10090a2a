"""Tests of read, read_slot, slots, block_ids, block_info and tokens."""

import jax
import numpy as np
import pytest
from support.models.windowed_model import EMBEDDING, grouped_cache, mixed_model
from support.small_caches import (
    allocate,
    append,
    fork,
    free,
    grow,
    lengths,
    names,
    opened,
    reorder,
    small_cache,
    truncate,
)

import jkv

pytestmark = pytest.mark.one_end

MAX = 2**31 - 1
MIN = -(2**31)
NOT_OPEN = [1, 4, MAX, -1, -2, MIN]
FAR = (8, 9, MAX, -1, -8, MIN)


def i32(*values):
    return np.array(values, np.int32)


def test_read_has_the_length_of_the_longest_context():
    cache = opened(6, value_head_dim=3)
    keys, values, length = jax.device_get(jkv.read(cache, 0, 0))
    assert keys.shape == (14, 1, 2) and values.shape == (14, 1, 3)
    assert length == 6
    assert keys[:6, 0].tolist() == [[n, n] for n in range(6)]
    assert values[:6, 0].tolist() == [[-n, -n, -n] for n in range(6)]


@pytest.mark.parametrize("seq_id", NOT_OPEN)
def test_a_closed_id_reads_as_empty(seq_id):
    assert int(jkv.read(opened(6), 0, seq_id)[2]) == 0
    assert jkv.block_ids(opened(6), seq_id).tolist() == [8, 8, 8, 8]


def test_blocks_of_a_sequence_and_block_of_a_position():
    cache = opened(3, 9)
    assert jkv.block_ids(cache, 1).tolist() == [1, 2, 3, 8]
    found = jkv.slots(cache, i32(1, 1, 1, 0), i32(0, 4, 8, 2))
    assert found.block_ids.tolist() == [1, 2, 3, 0]
    assert found.offsets.tolist() == [0, 0, 0, 2]
    cache = grow(cache, 1, range(109, 113))  # appends a block to the table
    assert jkv.block_ids(cache, 1).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "seq_ids, positions",
    [((0, 0, 0, 1), (8, -1, MAX, 0)), ((-1, 4, 0, 0), (0, 0, 14, MIN))],
)
def test_unmapped_slots(seq_ids, positions):
    found = jkv.slots(opened(6), i32(*seq_ids), i32(*positions))
    assert found.block_ids.tolist() == [8] * 4


def test_read_slot():
    key, value = jkv.read_slot(opened(6), 0, np.int32(1), np.int32(1))
    assert key.tolist() == [[5, 5]] and value.tolist() == [[-5, -5]]


def test_ids_out_of_range_have_bounds():
    cache = opened(6)
    for far in FAR:
        for block, offset in ((far, 0), (0, far)):
            slot = jkv.read_slot(cache, 0, np.int32(block), np.int32(offset))
            assert not any(np.asarray(array).any() for array in slot)
        info = jkv.block_info(cache, np.int32(far))
        assert int(info.reference_count) == 0 and not bool(info.is_free)


def test_a_block_is_free_or_in_use():
    cache, _ = fork(opened(6), 0)
    info = [jkv.block_info(cache, np.int32(block)) for block in range(8)]
    assert [int(each.reference_count) for each in info] == [2, 1, 1] + [0] * 5
    assert [bool(each.is_free) for each in info] == [False] * 3 + [True] * 5
    assert not any(bool(each.is_cached) for each in info)
    cache, _ = free(cache, [0, 1])
    assert all(bool(jkv.block_info(cache, np.int32(b)).is_free) for b in range(8))


class TestTokens:
    def recorded(self, cache, seq_id):
        tokens = jkv.tokens(cache, seq_id).tolist()
        length = lengths(cache)[seq_id]
        assert tokens[length:] == [-1] * (14 - length)
        return tokens[:length]

    def test_tokens_are_indexed_by_row(self):
        cache, _ = allocate(small_cache(record_tokens=True), [0, 0])
        cache, _ = append(cache, [1, 0], [3, 2], tokens=[5, 6, 7, 8, 9, 0])
        assert jkv.tokens(cache, 1).tolist() == [5, 6, 7] + [-1] * 11
        assert jkv.tokens(cache, 0).tolist() == [8, 9] + [-1] * 12

    def test_agree_with_the_length(self):
        cache, _ = allocate(small_cache(record_tokens=True), [0, 0])

        def record(cache, seq_id, *tokens):
            return append(cache, seq_id, len(tokens), tokens=tokens)[0]

        cache = record(cache, 0, 5, 6, 7, 8, 9, 10)
        cache, _ = fork(cache, 0)
        cache = record(cache, 2, 11)
        assert self.recorded(cache, 2) == [5, 6, 7, 8, 9, 10, 11]
        cache, _ = truncate(cache, 2, 2)
        cache = record(cache, 2, 20, 21, 22)
        assert self.recorded(cache, 2) == [5, 6, 20, 21, 22]
        assert self.recorded(cache, 0) == [5, 6, 7, 8, 9, 10]
        cache, _ = reorder(cache, [0, 1], [2, 0])
        assert self.recorded(cache, 0) == [5, 6, 20, 21, 22]
        assert self.recorded(cache, 1) == [5, 6, 7, 8, 9, 10]
        cache, step = append(cache, 0, 10, tokens=range(10))
        assert names(step.status) == ["CONTEXT_FULL"]
        assert self.recorded(cache, 0) == [5, 6, 20, 21, 22]
        cache, _ = free(cache, 0)
        assert self.recorded(cache, 0) == []
        jkv.check(cache)

    def test_need_a_cache_that_records_them(self):
        with pytest.raises(ValueError, match="record_tokens"):
            jkv.tokens(opened(6), 0)


class TestGroups:
    """Each group of layers has its own blocks; group 1 has a window of 8."""

    def grown(self):
        """Return a cache: sequence 0 reserves blocks, sequence 1 has 18 tokens."""
        cache, result = jkv.allocate(grouped_cache([12]), [0])
        jkv.raise_for_status(result)
        for length in (11, 7):
            cache, batch = jkv.append(cache, [1], length, capacity=11)
            tokens = i32(*range(1, 12))
            _, cache = mixed_model(EMBEDDING, tokens, cache, batch)
        jkv.check(cache)
        return cache

    def test_blocks_and_slots_belong_to_a_group(self):
        cache = self.grown()
        # 18 tokens are columns 0 to 4. The second step started at position 11, and its
        # row attends from 4 on: column 0 was released, and allocated again.
        full, windowed = (jkv.block_ids(cache, 1, group=i).tolist() for i in (0, 1))
        assert full == [3, 4, 5, 6, 7] + [44] * 7
        assert windowed == [20, 4, 5, 6, 7] + [20] * 7
        found = jkv.slots(cache, i32(1, 1), i32(3, 9), group=1)
        assert found.block_ids.tolist() == [20, 5] and found.offsets.tolist() == [0, 1]
        assert bool(jkv.block_info(cache, 3, group=1).is_free)
        assert not bool(jkv.block_info(cache, 3, group=0).is_free)

    def test_several_groups_need_the_group_argument(self):
        cache = self.grown()
        for ask in (
            lambda **group: jkv.block_ids(cache, 0, **group),
            lambda **group: jkv.slots(cache, 0, 0, **group),
            lambda **group: jkv.block_info(cache, 0, **group),
        ):
            with pytest.raises(ValueError, match="2 groups .* pass one, as in"):
                ask()
            for wrong in (2, -1, "full"):
                with pytest.raises(ValueError, match=r"group must be in 0\.\.1"):
                    ask(group=wrong)
        with pytest.raises(ValueError, match=r"in 0\.\.0"):
            jkv.block_ids(opened(6), 0, group=1)
        assert jkv.block_ids(opened(6), 0, group=0).tolist() == [0, 1, 8, 8]

    def test_free_blocks_are_the_minimum_over_groups(self):
        cache = self.grown()
        counts = [int(group.free_blocks.count) for group in cache.metadata.groups]
        assert counts == [36, 13] and int(jkv.num_free_blocks(cache)) == 13
        kept = [jkv.kept_from(cache, group=i).tolist()[:2] for i in (None, 0, 1)]
        assert kept == [[0, 4], [0, 0], [0, 4]]

    def test_a_layer_is_read_from_its_group(self):
        cache = self.grown()
        tokens = [*range(1, 12), *range(1, 8)]
        for layer, start in ((0, 4), (1, 0)):
            keys, _, length, found = jkv.read(cache, layer, 1, return_start=True)
            assert (int(length), int(found)) == (18, start)
            assert not np.asarray(keys)[:start].any()
            assert np.asarray(keys)[start:18].any(axis=(1, 2)).all()
        keys, _, _ = jkv.read(cache, 0, 1)  # the rows written to layer 0
        np.testing.assert_array_equal(np.asarray(keys)[4:18, 0], EMBEDDING[tokens][4:])
        block = int(jkv.slots(cache, 1, 9, group=1).block_ids[0])
        key, _ = jkv.read_slot(cache, 0, block, 1)
        np.testing.assert_array_equal(np.asarray(key)[0], EMBEDDING[tokens[9]])
        with pytest.raises(ValueError, match=r"layer must be in 0\.\.1"):
            jkv.read(cache, 2, 1)
