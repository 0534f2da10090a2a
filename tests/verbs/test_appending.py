"""Tests of append: the rows of a step, and the allocation of new blocks."""

import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    free_count,
    grow,
    lengths,
    names,
    opened,
    small_cache,
    stored_tokens,
    table,
    with_free_blocks,
)

import jkv

pytestmark = pytest.mark.one_end

MAX = 2**31 - 1
MIN = -(2**31)
BLOCK_SIZES = [1, 3, 4]


def i32(*values):
    return np.array(values, np.int32)


def num_taken(cache):
    return cache.num_blocks - free_count(cache)


class TestRows:
    def test_decode_steps_are_recognized_at_trace_time(self):
        """`is_decoding` follows from shapes, so that attention omits prefill."""
        cache = opened(1, 2)
        ids, ones = i32(0, 1), i32(1, 1)
        for arguments, options, expected in (
            ((ids,), {}, True),
            ((ids, 1), dict(max_query_length=1), True),
            ((ids, ones), {}, False),
            ((ids, 1), dict(capacity=3), False),
            ((ids, 1), dict(max_query_length=2), False),
        ):
            _, batch = jkv.append(cache, *arguments, **options)
            assert batch.is_decoding is expected

    def test_are_packed_in_request_order(self):
        cache = opened(3, 0, 5)
        _, batch = jkv.append(cache, i32(2, 0, 1, -1), i32(2, 3, 1, 0), capacity=8)
        assert batch.query_starts.tolist() == [0, 2, 5, 6]
        assert batch.query_lengths.tolist() == [2, 3, 1, 0]
        assert batch.context_lengths.tolist() == [7, 6, 1, 0]
        assert batch.valid.tolist() == [True] * 6 + [False] * 2
        assert batch.positions.tolist()[:6] == [5, 6, 3, 4, 5, 0]
        assert batch.offsets.tolist()[:6] == [1, 2, 3, 0, 1, 0]
        assert batch.last_rows.tolist() == [1, 4, 5, 8]

    def test_are_one_per_request_by_default(self):
        _, batch = jkv.append(opened(3, 0, 5), i32(2, 0, 1))
        assert batch.valid.shape == (3,)
        assert batch.query_lengths.tolist() == [1, 1, 1]

    def test_of_refused_requests_and_padding_are_still_reserved(self):
        _, batch = jkv.append(
            opened(3, 3), i32(9, -1, 0, 1), i32(2, 3, -4, 1), capacity=8
        )
        assert batch.query_starts.tolist() == [0, 2, 5, 5]
        assert batch.query_lengths.tolist() == [0, 0, 0, 1]
        assert batch.valid.tolist() == [False] * 5 + [True] + [False] * 2

    def test_a_negative_count_owns_none(self):
        _, step = append(opened(3, 3), [0, 1], [MIN, 1])
        assert names(step.status) == ["INVALID_ARGUMENT", "OK"]
        assert step.query_starts.tolist() == [0, 0]
        assert step.valid.tolist() == [True]
        assert step.context_lengths.tolist() == [3, 4]

    def test_negative_padding_owns_none(self):
        _, step = append(opened(3, 3), [-1, 1], [-3, 1])
        assert names(step.status) == ["OK", "OK"]
        assert step.query_starts.tolist() == [0, 0]

    def test_requests_past_the_capacity_are_refused(self):
        _, batch = jkv.append(opened(3, 3), i32(0, 1, -1), i32(2, 2, 0), capacity=3)
        assert names(batch.status) == ["OK", "BATCH_FULL", "OK"]
        assert batch.context_lengths.tolist() == [5, 3, 0]

    def test_zero_tokens_need_none(self):
        _, batch = jkv.append(opened(3, 3), i32(-1, 0, 1), i32(MAX, 0, 1), capacity=3)
        assert names(batch.status) == ["OK", "OK", "BATCH_FULL"]
        assert (np.asarray(batch.query_starts)[1:] >= 3).all()

    def test_in_the_padded_layout(self):
        _, batch = jkv.append(
            opened(3, 0, 5), i32(2, 0, 1), i32(2, 3, 1), max_query_length=2
        )
        assert names(batch.status) == ["OK", "BATCH_FULL", "OK"]
        assert batch.query_starts.tolist() == [0, 2, 4]
        assert batch.valid.tolist() == [True, True, False, False, True, False]
        assert int(batch.last_rows[0]) == 1 and int(batch.last_rows[2]) == 4

    def test_invalid_rows_have_no_slot(self):
        _, batch = jkv.append(opened(3), i32(-1, 0, 9))
        assert batch.block_ids.tolist() == [8, 0, 8]
        assert batch.seq_ids.tolist() == [-1, 0, 9]  # as requested


def test_context_lengths_of_refused_requests():
    cache = opened(3, 6)
    seq_ids, counts = i32(1, -1, 7, 0), i32(15, 1, 1, -1)
    _, batch = jkv.append(cache, seq_ids, counts, capacity=8)
    assert batch.context_lengths.tolist() == [6, 0, 0, 3]


@pytest.mark.parametrize(
    "changes",
    [dict(prefix_caching=True), dict(sliding_window=4)],
    ids=lambda c: [*c][0],
)
@pytest.mark.parametrize(
    ("options", "num_rows"),
    [({}, 0), (dict(capacity=4), 4), (dict(max_query_length=2), 0)],
    ids=["", "capacity", "padded"],
)
def test_no_requests_are_a_step_of_padding(changes, options, num_rows):
    """An empty batch of requests is accepted, such as a step of an empty queue."""
    cache = opened(3, 6, **changes)
    after, batch = jkv.append(cache, [], **options)
    assert batch.num_rows == num_rows
    assert batch.seq_ids.tolist() == [-1] and names(batch.status) == ["OK"]
    rows = np.ones((num_rows, 1, cache.head_dim), np.float32)
    after = jkv.write(after, 0, batch, rows, rows)
    attended = jkv.attend(after, 0, batch, rows, window=4)
    assert attended.shape == rows.shape and not np.asarray(attended).any()
    after = jkv.commit(after, batch)
    assert lengths(after) == lengths(cache) and free_count(after) == free_count(cache)
    jkv.check(after)


class TestBlocks:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_are_taken_at_tokens_0_t_2t(self, block_size):
        cache, blocks_at = opened(0, block_size=block_size), []
        last = min(3 * block_size + 2, 8 * block_size)
        for position in range(last):
            before = num_taken(cache)
            cache, step = append(cache, 0)
            assert names(step.status) == ["OK"]
            assert step.positions.tolist() == [position]
            if num_taken(cache) != before:
                assert num_taken(cache) == before + 1
                blocks_at.append(position)
            # The first slot of the newly allocated block.
            assert step.block_ids.tolist() == [position // block_size]
            assert step.offsets.tolist() == [position % block_size]
        assert blocks_at == list(range(0, last, block_size))
        jkv.check(cache)

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("num_blocks", [1, 2, 3])
    @pytest.mark.parametrize("beside", [-1, 0, 1])
    def test_around_a_boundary(self, block_size, num_blocks, beside):
        length = num_blocks * block_size + beside
        cache = grow(opened(0, block_size=block_size), 0, range(length))
        expected = -(-length // block_size)
        assert table(cache, 0) == list(range(expected))
        assert num_taken(cache) == expected
        assert stored_tokens(cache, 0) == list(range(length))
        # Appending one more token allocates a block only if the last one is full.
        cache, _ = append(cache, 0)
        assert num_taken(cache) == expected + (length % block_size == 0)
        jkv.check(cache)

    @pytest.mark.parametrize("first", range(10))
    @pytest.mark.parametrize("second", [0, 1, 3, 4, 5])
    def test_two_appends_equal_one(self, first, second):
        cache = grow(opened(first), 0, range(first, first + second))
        assert table(cache, 0) == list(range(-(-(first + second) // 4)))
        assert lengths(cache)[0] == first + second
        assert stored_tokens(cache, 0) == list(range(first + second))

    def test_several_at_once_or_none(self):
        cache = with_free_blocks(opened(3), 2)
        for _ in range(2):  # a refused token is not counted
            cache, step = append(cache, 0, 10)
            assert names(step.status) == ["OUT_OF_BLOCKS"]  # 13 tokens: 4 blocks
            assert step.context_lengths.tolist() == [3] == lengths(cache)[:1]
        assert table(cache, 0) == [0]
        cache = grow(cache, 0, range(3, 12))  # 12 tokens: 3 blocks
        assert len(table(cache, 0)) == 3 and free_count(cache) == 0
        assert stored_tokens(cache, 0) == list(range(12))
        _, step = append(cache, 0)
        assert names(step.status) == ["OUT_OF_BLOCKS"]
        assert step.context_lengths.tolist() == [12]

    def test_a_zero_token_append_at_a_boundary_takes_none(self):
        cache, step = append(opened(8), 0, 0)
        assert names(step.status) == ["OK"]
        assert num_taken(cache) == 2

    def test_an_append_may_be_shorter_than_the_reservation(self):
        cache, _ = allocate(small_cache(), 14)
        cache, step = append(cache, 0, 2)
        assert names(step.status) == ["OK"]
        assert table(cache, 0) == [0, 1, 2, 3]
        assert free_count(cache) == 4

    @pytest.mark.parametrize("max_context", [4, 5])
    def test_the_longest_context_is_exact(self, max_context):
        cache = opened(max_context - 1, max_context_length=max_context)
        cache = grow(cache, 0, [max_context - 1])
        assert stored_tokens(cache, 0) == list(range(max_context))
        cache, step = append(cache, 0)
        assert names(step.status) == ["CONTEXT_FULL"]
        assert num_taken(cache) == -(-max_context // 4)
        jkv.check(cache)

    def test_positions_become_slots_only_through_the_table(self):
        cache, _ = jkv.free(opened(8, 4), i32(0, -1, -1, -1))
        cache, result = allocate(cache, 0)
        cache = grow(cache, int(result.seq_ids[0]), range(14))
        cache, result = allocate(cache, 0)
        seq_id = int(result.seq_ids[0])
        cache = grow(cache, seq_id, range(50, 62))
        assert table(cache, seq_id) == [7, 1, 0]  # logical 0, 1, 2
        found = jkv.slots(cache, i32(*[seq_id] * 4), i32(0, 5, 10, 11))
        assert found.block_ids.tolist() == [7, 1, 0, 0]
        for block, offset, number in zip(*found, (50, 55, 60, 61), strict=True):
            assert float(jkv.read_slot(cache, 0, block, offset)[0][0, 0]) == number
