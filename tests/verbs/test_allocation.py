"""Tests of allocate and free: order of rows and blocks, reservations, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    assert_refused,
    fork,
    free,
    free_count,
    grow,
    lengths,
    names,
    opened,
    refusal_counts,
    small_cache,
    small_config,
    stored_tokens,
    table,
    tables,
    truncate,
    with_free_blocks,
)

import jkv
from jkv import Status

pytestmark = pytest.mark.one_end


class TestAllocate:
    def test_hands_out_ids_and_blocks_in_order(self):
        cache, result = allocate(small_cache(), [5, 0, 4])
        assert result.seq_ids.tolist() == [0, 1, 2]
        assert result.num_cached.tolist() == [0, 0, 0]
        assert tables(cache) == [[0, 1], [], [2], []]

    def test_reserves_and_stores_nothing(self):
        cache, _ = allocate(small_cache(), 9)
        assert lengths(cache)[0] == 0
        assert int(cache.metadata.groups[0].num_mapped_blocks[0]) == 3
        assert free_count(cache) == 5

    @pytest.mark.parametrize("count, blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (14, 4)])
    def test_a_reservation_is_rounded_up(self, count, blocks):
        cache, _ = allocate(small_cache(), count)
        assert 8 - free_count(cache) == blocks
        assert lengths(cache)[0] == 0

    def test_a_reservation_is_used_before_the_pool(self):
        cache, _ = allocate(small_cache(), 9)
        assert table(cache, 0) == [0, 1, 2]
        cache = grow(cache, 0, range(12))
        assert 8 - free_count(cache) == 3
        cache = grow(cache, 0, [12])
        assert table(cache, 0) == [0, 1, 2, 3]

    def test_freed_ids_come_back_last(self):
        cache, _ = free(opened(1, 1), 0)
        _, result = allocate(cache, [0, 0, 0])
        assert result.seq_ids.tolist() == [2, 3, 0]

    def test_free_blocks_are_first_in_first_out(self):
        cache = with_free_blocks(opened(4, 4, 4), 1)
        for seq_id in (1, 0, 2):
            cache, _ = free(cache, seq_id)
        cache, _ = allocate(cache, 14)
        assert table(cache, 1) == [7, 1, 0, 2]

    def test_needs_no_contiguous_blocks(self):
        cache, _ = free(with_free_blocks(opened(4, 4, 4), 1), [2, 0])
        cache, _ = allocate(cache, 12)
        assert table(cache, 2) == [7, 2, 0]

    def test_an_exhausted_pool_refuses_requests(self):
        cache = with_free_blocks(opened(4), 0)  # one row is free
        assert not np.asarray(jkv.can_allocate(cache, np.full(4, 1, np.int32))).any()
        assert_refused(cache, allocate(cache, [1, 14, 4]), *["OUT_OF_BLOCKS"] * 3)
        assert_refused(cache, append(cache, 0), "OUT_OF_BLOCKS")
        cache, _ = free(cache, 0)
        assert free_count(cache) == 1

    def test_blocks_reserved_by_others_are_not_allocated(self):
        cache, result = allocate(small_cache(), [4, 8, 0, 4], keep_free=6)
        assert names(result.status) == ["OK", "OUT_OF_BLOCKS", "OK", "OUT_OF_BLOCKS"]
        assert free_count(cache) == 7
        before = cache
        assert_refused(before, allocate(before, 4, keep_free=7), "OUT_OF_BLOCKS")

    def test_a_reservation_up_to_the_longest_context(self):
        _, result = allocate(small_cache(), [14, 15])
        assert names(result.status) == ["OK", "CONTEXT_FULL"]

    def test_can_allocate_agrees_with_allocate(self):
        for cache in (small_cache(), opened(14, 1, 1), opened(9, 1)):
            for counts in [(14, 14, 4), (13, 5, 0), (0, 0, 0), (-2, 15, -1)]:
                counts = np.array((*counts, -1), np.int32)
                expected = allocate(cache, counts)[1].status == Status.OK
                fits = jkv.can_allocate(cache, counts)
                assert fits.dtype == jnp.bool_
                assert fits.tolist() == expected.tolist()

    def test_can_allocate_counts_rows(self):
        counts = np.array([0, 0, -1, -1], np.int32)
        fits = jkv.can_allocate(opened(1, 1, 1), counts)
        assert fits.tolist() == [True, False, True, True]

    def test_num_free_blocks_is_a_scalar(self):
        assert jkv.num_free_blocks(opened(5)).shape == ()
        assert free_count(opened(5)) == 6

    def test_block_zero_is_an_ordinary_block(self):
        cache = opened(0, 4)
        assert table(cache, 1) == [0]
        assert jkv.block_ids(cache, 0).tolist() == [8] * 4
        cache, _ = fork(cache, 1)
        cache, _ = free(cache, 1)
        assert stored_tokens(cache, 2) == [100, 101, 102, 103]
        cache, _ = free(cache, 2)
        assert free_count(cache) == 8

    def test_no_block_is_allocated_twice(self):
        cache = small_cache()
        rng = np.random.default_rng(3)
        for _ in range(60):
            cache, _ = allocate(cache, rng.integers(0, 9, 3))
            cache, _ = free(cache, rng.integers(0, 4, 2))
            taken = sum(tables(cache), [])
            assert len(taken) == len(set(taken)) == 8 - free_count(cache)
            jkv.check(cache)


class TestFree:
    def test_a_second_free_is_refused(self):
        cache, _ = free(opened(6, 6), 0)
        for seq_ids in ([0], [0, 0]):
            answer = free(cache, seq_ids)
            assert_refused(cache, answer, *["INVALID_SEQUENCE"] * len(seq_ids))

    def test_blocks_return_last_first(self):
        cache = with_free_blocks(opened(12, 12), 0)
        cache, _ = free(cache, [1, 0])
        cache, result = allocate(cache, [12, 12])
        order = [table(cache, seq_id) for seq_id in result.seq_ids]
        assert order == [[5, 4, 3], [2, 1, 0]]

    def test_a_shared_block_is_freed_by_its_last_reference(self):
        cache, _ = fork(with_free_blocks(opened(8), 2), [0, 0])
        for seq_id, blocks_free in ((0, 2), (3, 2), (2, 4)):
            assert stored_tokens(cache, 2) == list(range(8))
            cache, _ = free(cache, seq_id)
            assert free_count(cache) == blocks_free
            jkv.check(cache)

    def test_a_shared_block_is_freed_if_all_sequences_are_freed_in_one_call(self):
        cache, _ = fork(opened(8), 0)
        cache, _ = free(cache, [1, 0])
        assert free_count(cache) == 8
        jkv.check(cache)

    def test_reference_counts_cannot_underflow(self):
        cache, _ = fork(opened(8), 0)
        for _ in range(4):
            cache, _ = free(cache, [0, 1, 0, 1])
            assert min(cache.metadata.groups[0].reference_counts.tolist()) == 0
            jkv.check(cache)
        assert free_count(cache) == 8

    def test_runs_in_the_loop_that_ends_the_sequences(self):
        limits = np.array([3, 9, 6], np.int32)

        def step(carry):
            cache, seq_ids = carry
            cache, batch = jkv.append(cache, seq_ids)
            done = (batch.context_lengths >= limits) & (seq_ids >= 0)
            cache, _ = jkv.free(cache, jnp.where(done, seq_ids, jkv.NO_SEQUENCE))
            return cache, jnp.where(done, jkv.NO_SEQUENCE, seq_ids)

        start = opened(0, 0, 0), np.array([0, 1, 2], np.int32)
        cache, _ = jax.lax.while_loop(lambda carry: (carry[1] >= 0).any(), step, start)
        assert free_count(cache) == 8 and not np.asarray(cache.metadata.is_open).any()
        assert refusal_counts(cache) == [0] * 7
        # Freeing again is refused and changes nothing.
        assert_refused(cache, free(cache, [0, 1, 2]), *["INVALID_SEQUENCE"] * 3)


def test_ten_thousand_cycles_end_with_the_full_pool():
    def cycle(i, cache):
        cache, result = jkv.allocate(cache, jnp.stack([i % 9, i % 5]))
        cache, _ = jkv.append(cache, result.seq_ids, i % 8, capacity=16)
        cache, children = jkv.fork(cache, result.seq_ids)
        cache, _ = jkv.truncate(cache, children.seq_ids, i % 3)
        cache, _ = jkv.free(cache, result.seq_ids)
        return jkv.free(cache, children.seq_ids)[0]

    cache = jkv.init(small_config(), storage=False)
    cache = jax.jit(lambda c: jax.lax.fori_loop(0, 10_000, cycle, c))(cache)
    assert free_count(cache) == 8
    assert not np.asarray(cache.metadata.is_open).any()
    assert not np.asarray(cache.metadata.groups[0].reference_counts).any()
    # Some truncations exceeded the length; no other refusal occurred.
    assert set(np.flatnonzero(refusal_counts(cache))) == {Status.INVALID_ARGUMENT}
    jkv.check(cache)


def test_sequences_are_isolated_after_churn():
    cache, live, number = small_cache(), {}, 0
    rng = np.random.default_rng(15)
    for _ in range(40):
        if len(live) == 4 or (live and rng.random() < 0.3):
            seq_id = int(rng.choice(list(live)))
            cache, _ = free(cache, seq_id)
            del live[seq_id]
        else:
            cache, result = allocate(cache, 0)
            live[int(result.seq_ids[0])] = []
        for seq_id in live:
            contents = list(range(number, number + int(rng.integers(3))))
            if len(live[seq_id] + contents) <= 8:
                cache = grow(cache, seq_id, contents)
                live[seq_id] += contents
                number += len(contents)
        for seq_id, contents in live.items():
            assert stored_tokens(cache, seq_id) == contents
    jkv.check(cache)


def test_metadata_without_storage():
    """Metadata operations agree; functions that need contents raise errors."""
    bare, full = jkv.init(small_config(), storage=False), small_cache()
    assert bare.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(bare.metadata))
    for verb, *arguments in (
        (allocate, [5, 5]),
        (append, [0, 1], [7, 2]),
        (fork, [0, 0, 1]),
        (append, [2, 0], [1, 5]),
        (truncate, [2, 1], [3, 1]),
        (allocate, [5, 5]),
        (free, [0, 2]),
    ):
        bare, one = verb(bare, *arguments)
        full, two = verb(full, *arguments)
        np.testing.assert_array_equal(
            getattr(one, "status", one), getattr(two, "status", two)
        )
    jkv.check(bare)
    for one, two in zip(
        jax.tree.leaves(bare.metadata), jax.tree.leaves(full.metadata), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    cache, step = append(bare, 1)
    rows = np.ones((16, 1, 2), np.float32)
    with pytest.raises(ValueError, match="storage"):
        jkv.write(cache, 0, step.batch, rows, rows)
    with pytest.raises(ValueError, match="storage"):
        jkv.read(cache, 0, 0)
