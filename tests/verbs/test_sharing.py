"""Tests of fork, truncate and reorder: sequences that share blocks and diverge."""

import pytest
from support.small_caches import (
    allocate,
    append,
    assert_refused,
    assert_unchanged,
    fork,
    free,
    free_count,
    grow,
    names,
    opened,
    reorder,
    small_cache,
    stored_tokens,
    table,
    tables,
    truncate,
    with_free_blocks,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end

MAX = 2**31 - 1
MIN = -(2**31)


def reserved():
    """Return a sequence of six tokens with four reserved blocks, and an empty one."""
    cache, _ = allocate(small_cache(), [14, 0])
    return grow(cache, 0, range(6))


class TestFork:
    def test_shares_the_past_but_not_the_reservation(self):
        cache, result = fork(reserved(), 0)
        assert names(result.status) == ["OK"]
        assert table(cache, 0) == [0, 1, 2, 3]
        assert table(cache, 2) == [0, 4]
        assert stored_tokens(cache, 2) == list(range(6))
        jkv.check(cache)

    @pytest.mark.parametrize("length", range(10))
    def test_shares_full_blocks_and_copies_a_tail(self, length):
        cache, _ = fork(opened(length), 0)
        full, tail = divmod(length, 4)
        assert table(cache, 1)[:full] == table(cache, 0)[:full]
        assert 8 - free_count(cache) == full + 2 * (tail > 0)
        assert stored_tokens(cache, 1) == list(range(length))
        jkv.check(cache)

    @pytest.mark.parametrize("length", range(7))
    def test_a_child_may_take_a_prefix(self, length):
        cache, result = fork(opened(6), [0, 0, 0], [length, 7, -1])
        assert names(result.status) == ["OK", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]
        full, tail = divmod(length, 4)
        assert table(cache, 1)[:full] == table(cache, 0)[:full]
        # A full block is shared, even if the parent's own tail follows it.
        assert 8 - free_count(cache) == 2 + (tail > 0)
        assert stored_tokens(cache, 1) == list(range(length))
        cache = grow(cache, 1, [50, 51])
        assert stored_tokens(cache, 1) == [*range(length), 50, 51]
        assert stored_tokens(cache, 0) == list(range(6))
        jkv.check(cache)

    def test_fork_needs_a_block_only_for_the_copied_tail(self):
        cache = with_free_blocks(opened(6), 0)
        cache, result = fork(cache, [0, 0], [5, 4])
        assert names(result.status) == ["OUT_OF_BLOCKS", "OK"]

    def test_inherited_blocks_stay_indexed(self):
        def grow_with_tokens(cache, seq_id, tokens):
            cache, step = append(cache, seq_id, len(tokens), tokens=tokens)
            return write_tokens(cache, step, tokens)

        cache, _ = allocate(small_cache(prefix_caching=True), 0)
        cache = grow_with_tokens(cache, 0, range(9))
        cache, _ = fork(cache, [0], [6])
        jkv.check(cache)
        assert table(cache, 1)[1] != table(cache, 0)[1]
        cache = grow_with_tokens(cache, 1, [6, 7])
        # The child's second block equals the parent's now, and is replaced by it.
        jkv.check(cache)
        assert table(cache, 1) == table(cache, 0)[:2]

    def test_a_parent_may_appear_many_times(self):
        cache, result = fork(opened(6), [0, 0, 0])
        assert result.seq_ids.tolist() == [1, 2, 3]
        assert tables(cache)[1:] == [[0, 2], [0, 3], [0, 4]]
        counts = cache.metadata.groups[0].reference_counts
        assert counts.tolist() == [4, 1, 1, 1, 1, 0, 0, 0]

    def test_a_child_is_not_a_parent_in_the_same_call(self):
        _, result = fork(opened(6), [0, 1, 2])
        assert names(result.status) == ["OK", "INVALID_SEQUENCE", "INVALID_SEQUENCE"]

    def test_children_diverge(self):
        cache, _ = fork(opened(6), [0, 0])
        cache, step = append(cache, [0, 1, 2])
        assert len(set(step.block_ids.tolist())) == 3
        cache = write_tokens(cache, step, [66, 77, 88])
        for seq_id, number in enumerate((66, 77, 88)):
            assert stored_tokens(cache, seq_id) == [*range(6), number]

    def test_counts_equal_a_recount_of_rows(self):
        cache, _ = fork(opened(8, 5), [0, 0])
        cache, _ = truncate(cache, 2, 3)
        cache, _ = free(cache, 0)
        rows = sum(tables(cache), [])
        counts = [rows.count(block) for block in range(8)]
        assert cache.metadata.groups[0].reference_counts.tolist() == counts


class TestTruncate:
    @pytest.mark.parametrize("length", range(10))
    def test_returns_every_block_past_the_end(self, length):
        cache, status = truncate(opened(9), 0, length)
        assert names(status) == ["OK"]
        assert table(cache, 0) == [0, 1, 2][: -(-length // 4)]
        assert stored_tokens(cache, 0) == list(range(length))
        jkv.check(cache)

    def test_returns_reserved_blocks_too(self):
        cache, status = truncate(reserved(), 0, 6)
        assert names(status) == ["OK"]
        assert table(cache, 0) == [0, 1]
        assert stored_tokens(cache, 0) == list(range(6))

    @pytest.mark.parametrize("length", [-1, MIN, 7, 14, MAX])
    def test_refuses_a_length_beyond_the_sequence(self, length):
        cache = opened(6)
        assert_refused(cache, truncate(cache, 0, length), "INVALID_ARGUMENT")

    def test_within_a_shared_block_copies_it(self):
        cache, _ = fork(opened(8), 0)
        cache, _ = truncate(cache, 1, 6)
        cache = grow(cache, 1, [66, 77])
        assert stored_tokens(cache, 0) == list(range(8))
        assert stored_tokens(cache, 1) == [0, 1, 2, 3, 4, 5, 66, 77]
        assert table(cache, 0) == [0, 1] and table(cache, 1) == [0, 2]
        jkv.check(cache)

    @pytest.mark.parametrize("length", [0, 4, 8])
    def test_to_a_multiple_of_the_block_size_needs_no_block(self, length):
        cache, _ = fork(with_free_blocks(opened(8), 0), 0)
        cache, status = truncate(cache, 3, length)
        assert names(status) == ["OK"]
        assert stored_tokens(cache, 3) == list(range(length))
        jkv.check(cache)

    def test_within_a_shared_block_without_a_free_one(self):
        cache, _ = fork(with_free_blocks(opened(8), 0), 0)
        assert_refused(cache, truncate(cache, 3, 7), "OUT_OF_BLOCKS")


class TestReorder:
    def test_reorder_continues_from_the_parent_state(self):
        cache, status = reorder(opened(6, 6, 6), [0, 1, 2], [1, 2, 0])
        assert names(status) == ["OK"] * 3
        assert stored_tokens(cache, 0) == list(range(100, 106))
        assert stored_tokens(cache, 1) == list(range(200, 206))
        assert stored_tokens(cache, 2) == list(range(6))
        jkv.check(cache)

    @pytest.mark.parametrize("length", range(1, 9))
    def test_beams_of_equal_length_never_run_out(self, length):
        # With eight blocks one would be left: a sequence has at most four.
        cache = opened(length, length, length, num_blocks=7)
        cache = with_free_blocks(cache, 0)
        beams = [0, 1, 2]
        for parents in ([1, 2, 0], [2, 2, 1], [0, 0, 0], [1, 0, 1]):
            before = [stored_tokens(cache, beam) for beam in beams]
            cache, status = reorder(cache, beams, parents)
            assert names(status) == ["OK"] * 3
            assert [stored_tokens(cache, beam) for beam in beams] == [
                before[parent] for parent in parents
            ]
            jkv.check(cache)

    def test_a_sequence_that_is_its_own_parent_is_unchanged(self):
        cache = reserved()
        after, status = reorder(cache, 0, 0)
        assert names(status) == ["OK"]
        assert_unchanged(cache, after)

    def test_reorder_releases_unreferenced_blocks(self):
        cache, _ = reorder(opened(9, 9), 0, 1)
        assert free_count(cache) == 4  # two shared blocks and two tails
        jkv.check(cache)

    def test_does_not_inherit_the_reservation(self):
        cache, _ = reorder(reserved(), 1, 0)
        assert len(table(cache, 1)) == 2

    def test_parents_need_not_be_in_the_call(self):
        cache, status = reorder(opened(6, 3, 3), [1, 2], [0, 0])
        assert names(status) == ["OK", "OK"]
        assert stored_tokens(cache, 1) == stored_tokens(cache, 2) == list(range(6))

    def test_reorder_refuses_without_blocks(self):
        # Sequence 1 has no block to release for a tail, and the pool is empty.
        cache = with_free_blocks(opened(6, 0), 0)
        assert_refused(cache, reorder(cache, 1, 0), "OUT_OF_BLOCKS")
