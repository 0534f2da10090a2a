"""Small examples of blocks that a sliding window releases."""

import dataclasses

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
    match,
    names,
    reorder,
    small_cache,
    small_config,
    table,
    truncate,
    with_free_blocks,
    with_metadata,
    with_storage_filled,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end

# Blocks of four, a window of eight: a row attends to itself and seven earlier tokens.
WINDOW = dict(sliding_window=8, max_context_length=40)


def kept(cache, seq_id):
    return int(jkv.kept_from(cache)[seq_id])


def columns(cache, seq_id):
    """Return the columns of a sequence that map a block."""
    found = np.asarray(jkv.block_ids(cache, seq_id))
    return np.flatnonzero(found < cache.num_blocks).tolist()


class TestReserving:
    def test_sequences_reserve_only_windowed_blocks(self):
        """At most three blocks at a time, whatever the reserved length."""
        cache, opened = allocate(small_cache(**WINDOW), [40, 5, 14])
        assert names(opened.status) == ["OK"] * 3
        assert [columns(cache, i) for i in range(3)] == [[0, 1, 2], [0, 1], [0, 1, 2]]
        assert free_count(cache) == 0
        jkv.check(cache)

    def test_reserved_blocks_suffice_token_by_token(self):
        """With the pool exhausted, a sequence reuses its own released blocks."""
        cache, _ = allocate(small_cache(**WINDOW), 40)
        cache = with_free_blocks(cache, 0)
        for _ in range(40):
            cache, step = append(cache, 0)
            assert names(step.status) == ["OK"]
        assert free_count(cache) == 1  # row 39 attends from 32 on: two blocks

    def test_hits_count_toward_reserved_blocks(self):
        """A full and a partial block are cached; the sequence keeps three."""
        cache, found = allocate(remembering(), 32, tokens=[SEQUENCE])
        assert found.num_cached.tolist() == [15]
        assert columns(cache, 1) == [2, 3, 4] and free_count(cache) == 5
        jkv.check(cache)


class TestAppending:
    def test_a_long_sequence_keeps_two_or_three_blocks(self):
        cache, _ = allocate(small_cache(**WINDOW), 0)
        held = []
        for length in range(40):
            cache, step = append(cache, 0)
            assert names(step.status) == ["OK"]
            jkv.check(cache)
            held.append(columns(cache, 0))
            seen = range(max(length - 7, 0), length + 1)
            assert held[-1] == sorted({position // 4 for position in seen})
        assert lengths(cache)[0] == 40 and {len(each) for each in held[8:]} == {2, 3}
        assert max(map(len, held)) == small_config(**WINDOW).most_blocks()

    def test_a_step_keeps_the_window_of_its_first_row(self):
        """Row 20 attends from 13 on: only the blocks before 12 are released."""
        cache = grow_to(20)
        assert columns(cache, 0) == [2, 3, 4]  # the previous step started at 16
        cache, _ = append(cache, 0, 16)
        assert columns(cache, 0) == [3, 4, 5, 6, 7, 8] and kept(cache, 0) == 12
        cache, _ = append(cache, 0)
        assert columns(cache, 0) == [7, 8, 9] and kept(cache, 0) == 28

    def test_refused_and_empty_steps_release_nothing(self):
        cache = grow_to(20)
        before = columns(cache, 0)
        cache, _ = append(cache, 0, 0)
        assert columns(cache, 0) == before
        refused, step = append(cache, [0, 0], [30, 1])
        assert_refused(cache, (refused, step), "CONTEXT_FULL", "INVALID_SEQUENCE")

    def test_blocks_free_before_the_call_decide(self):
        """Blocks that a call releases are available to the next call."""
        cache = grow_to(20)  # holds columns 2, 3 and 4; the next row starts a block
        cache, filler = allocate(cache, [12, 8])
        jkv.raise_for_status(filler.status)
        assert free_count(cache) == 0
        refused, step = append(cache, 0)
        assert_refused(cache, (refused, step), "OUT_OF_BLOCKS")

    @pytest.mark.parametrize("num_tokens", [1, 3, 6])
    def test_a_pool_of_reserved_blocks_never_runs_out(self, num_tokens):
        config = jkv.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            num_blocks=3 * 6,
            block_size=4,
            max_sequences=3,
            max_context_length=80,
            sliding_window=9,
        )
        most = config.most_blocks(num_tokens)

        def refusals(num_blocks):
            cache = jkv.init(config, storage=False)
            others = 4 * (config.num_blocks - num_blocks)
            cache, _ = jkv.allocate(cache, [0, 0, 0])
            cache, _ = jkv.append(cache, 2, others, capacity=80)
            for _ in range(80 // num_tokens):
                cache, _ = jkv.append(cache, [0, 1], [num_tokens] * 2, capacity=16)
            return jkv.stats(cache).refusals[jkv.Status.OUT_OF_BLOCKS]

        assert refusals(2 * most) == 0 < refusals(2 * most - 1)


class TestSinks:
    def test_their_blocks_stay(self):
        """Five sink tokens occupy two blocks."""
        cache, _ = allocate(small_cache(**WINDOW, num_sink_tokens=5), 0)
        for start in range(0, 32, 8):
            cache = grow(cache, 0, range(start, start + 8))
        jkv.check(cache)
        assert columns(cache, 0) == [0, 1, 4, 5, 6, 7] and kept(cache, 0) == 16
        keys, _, length, start = jkv.read(cache, 0, 0, return_start=True)
        found = np.asarray(keys)[: int(length), 0, 0].tolist()
        assert found == [*range(8), *[0] * 8, *range(16, 32)] and int(start) == 16
        slots = jkv.slots(cache, 0, [7, 8, 15, 16])
        assert (np.asarray(slots.block_ids) == 8).tolist() == [False, True, True, False]

    def test_rows_attend_to_sinks_and_window_like_a_dense_model(self):
        """Three sinks and the last eight tokens, in steps of one and of several tokens.

        Released blocks hold NaN.
        """
        rng = np.random.default_rng(0)
        rows = rng.standard_normal((30, 3, 1, 2)).astype(np.float32)
        config = small_config(**WINDOW, num_sink_tokens=3)
        cache = with_storage_filled(jkv.init(config), np.nan)
        cache, _ = jkv.allocate(cache, [0, 0])

        @jax.jit
        def step(cache, counts, keys, values, queries):
            cache, batch = jkv.append(cache, jnp.arange(2), counts, capacity=6)
            cache = jkv.write(cache, 0, batch, keys, values)
            return cache, attend_with_sinks(cache, batch, queries, 8, 3)

        done, num_far = 0, 0
        for count in (5, 5, 5, 1, 1, 5, 2, 5, 1):
            given = np.zeros((3, 6, 1, 2), np.float32)
            given[:, 1 : 1 + count] = rows[done : done + count].swapaxes(0, 1)
            # A neighbour of one token occupies the next block.
            counts = np.int32([1 if done == 0 else 0, count])
            if done:
                given = np.roll(given, -1, axis=1)
            cache, found = step(cache, counts, *given)
            counts = np.asarray(cache.metadata.groups[0].reference_counts)
            cache = with_storage_filled(cache, np.nan, np.flatnonzero(counts == 0))
            for i in range(count):
                place = done + i
                seen = [p for p in range(place + 1) if p < 3 or p > place - 8]
                scores = rows[seen, 0, 0] @ rows[place, 2, 0] / np.sqrt(2)
                weights = np.exp(scores - scores.max())
                expected = weights / weights.sum() @ rows[seen, 1, 0]
                row = np.asarray(found)[i + (done == 0), 0]
                np.testing.assert_allclose(row, expected, atol=1e-5)
                num_far += len(seen) < place + 1
            done += count
        assert num_far > 15 and kept(cache, 1) > 4


class TestSharing:
    def test_a_shared_block_is_freed_with_its_last_reference(self):
        cache, child = fork(grow_to(20), 0)
        assert child.seq_ids.tolist() == [1]
        assert [columns(cache, i) for i in (0, 1)] == [[2, 3, 4]] * 2
        shared = table(cache, 0)[0]
        cache, _ = append(cache, 0, 1)
        assert columns(cache, 0) == [3, 4, 5]
        assert int(jkv.block_info(cache, shared).reference_count) == 1
        cache, _ = append(cache, 1, 1)
        assert bool(jkv.block_info(cache, shared).is_free)
        jkv.check(cache)

    def test_a_shorter_child_needs_its_own_window(self):
        cache = grow_to(20)
        assert kept(cache, 0) == 8
        refused = fork(cache, [0, 0], [14, 8])
        assert_refused(cache, refused, "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        cache, child = fork(cache, [0, 0], [15, 0])
        assert names(child.status) == ["OK", "OK"]
        assert [kept(cache, i) for i in (1, 2)] == [8, 0]
        jkv.check(cache)

    def test_reorder_inherits_released_columns(self):
        cache, other = allocate(grow_to(20), 0)
        cache, status = reorder(cache, other.seq_ids, 0)
        assert names(status) == ["OK"] and kept(cache, 1) == 8
        assert [columns(cache, i) for i in (0, 1)] == [[2, 3, 4]] * 2
        jkv.check(cache)


class TestTruncating:
    def test_the_last_append_can_be_rolled_back(self):
        cache = grow_to(20)
        cache, _ = append(cache, 0, 14)
        cache, status = truncate(cache, 0, 20)
        assert names(status) == ["OK"] and lengths(cache)[0] == 20
        jkv.check(cache)
        assert_refused(cache, truncate(cache, 0, 18), "INVALID_ARGUMENT")

    @pytest.mark.parametrize("length", [1, 4, 5, 6])
    def test_truncation_to_the_sinks_is_refused_after_a_release(self, length):
        """Five sinks in two blocks, after which other blocks were released."""
        cache, _ = allocate(small_cache(**WINDOW, num_sink_tokens=5), 0)
        cache = grow(cache, 0, range(8))
        # Nothing has been released yet.
        other, status = truncate(cache, 0, length)
        assert names(status) == ["OK"] and lengths(other)[0] == length
        for start in range(8, 32, 8):
            cache = grow(cache, 0, range(start, start + 8))
        assert columns(cache, 0) == [0, 1, 4, 5, 6, 7]
        assert_refused(cache, truncate(cache, 0, length), "INVALID_ARGUMENT")
        cache, status = truncate(cache, 0, 0)
        assert names(status) == ["OK"] and columns(cache, 0) == []
        jkv.check(cache)

    def test_length_zero_needs_no_released_blocks(self):
        cache, status = truncate(grow_to(20), 0, 0)
        assert names(status) == ["OK"] and kept(cache, 0) == 0
        assert free_count(cache) == 8
        cache = grow(cache, 0, range(5))
        jkv.check(cache)
        assert columns(cache, 0) == [0, 1]


def test_free_returns_the_remaining_blocks():
    cache, _ = free(grow_to(20), 0)
    jkv.check(cache)
    assert free_count(cache) == 8


class TestAttending:
    def test_an_attention_window_above_the_caches_is_refused(self):
        cache = grow_to(20)
        cache, step = append(cache, 0)
        queries = jnp.ones((step.batch.num_rows, 1, 2))
        for window in (None, 9, np.int32(9), jnp.int32(9)):
            with pytest.raises(ValueError, match="window must be at most 8"):
                jkv.attend(cache, 0, step.batch, queries, window=window)
        shapes = [
            jax.eval_shape(
                lambda w: jkv.attend(cache, 0, step.batch, queries, window=w), window
            ).shape
            for window in (8, np.int32(3))
        ]
        assert shapes == [(16, 1, 2)] * 2

    def test_a_traced_window_is_limited_to_the_caches(self):
        """Free and released blocks hold NaN."""
        cache = grow_to(20)
        cache, step = append(cache, 0)
        cache = jkv.write(
            cache, 0, step.batch, jnp.ones((16, 1, 2)), jnp.ones((16, 1, 2))
        )
        is_free = np.asarray(cache.metadata.groups[0].reference_counts) == 0
        cache = with_storage_filled(cache, np.nan, np.flatnonzero(is_free))
        queries = jnp.ones((16, 1, 2))
        wide = jax.jit(lambda w: jkv.attend(cache, 0, step.batch, queries, window=w))
        exact = jkv.attend(cache, 0, step.batch, queries, window=8)
        found = wide(np.int32(2**30))
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, exact, atol=1e-6)


class TestMoving:
    def test_restored_sequences_need_no_more_blocks(self):
        cache = grow_to(20)
        cache, swapped = jkv.swap_out(cache, 0)
        assert swapped.num_blocks == 3
        assert swapped.groups[0].num_released.tolist() == [2]
        cache, back = jkv.swap_in(cache, swapped)
        assert names(back.status) == ["OK"] and kept(cache, int(back.seq_ids[0])) == 8
        jkv.check(cache)
        for changes in (dict(sliding_window=None), dict(sliding_window=14)):
            with pytest.raises(ValueError, match="lack tokens inside"):
                jkv.swap_in(small_cache(**WINDOW | changes), swapped)
        with pytest.raises(ValueError, match="num_sink_tokens of the seq"):
            jkv.swap_in(small_cache(**WINDOW, num_sink_tokens=2), swapped)
        # The row after 20 tokens attends from 8 on, with a window of 12 or 13.
        for window in (9, 13):
            wider = small_cache(**WINDOW | dict(sliding_window=window))
            wider, back = jkv.swap_in(wider, swapped)
            assert names(back.status) == ["OK"] and kept(wider, 0) == 8
            jkv.check(wider)
        narrower, back = jkv.swap_in(
            small_cache(**WINDOW | dict(sliding_window=3)), swapped
        )
        assert names(back.status) == ["OK"]
        jkv.check(narrower)


class TestCounting:
    def test_statistics_count_mapped_blocks(self):
        cache = grow_to(20)
        sharing = jkv.fragmentation(cache)
        assert sharing.sharing == 1.0 and sharing.internal == 0.0
        profile = jkv.memory_profile(cache)
        assert (profile.tokens, profile.cells) == (12, 12)
        assert jkv.stats(cache).tokens == 20  # a length counts released tokens


def attend_with_sinks(cache, batch, queries, window, num_sinks):
    """Attend to sinks and window, as documented in docs/how-to/sliding-window.md."""
    seen, lse = jkv.attend(cache, 0, batch, queries, window=window, return_lse=True)
    row = jnp.arange(batch.num_rows, dtype=jnp.int32)
    owner = jnp.searchsorted(batch.query_starts, row, side="right") - 1
    counts = jnp.clip(batch.positions - (window - 1), 0, num_sinks)
    counts = jnp.where(batch.valid, counts, 0)
    sunk, sunk_lse = jkv.paged_attention(
        queries,
        cache.storage[0].key_pool,
        cache.storage[0].value_pool,
        0,
        cache.metadata.groups[0].block_tables,
        jnp.maximum(batch.seq_ids[owner], 0),
        row,
        jnp.minimum(counts, 1),
        counts,
        max_query_length=1,
        return_lse=True,
    )
    share = jax.nn.sigmoid(lse - sunk_lse)[..., None]
    return jnp.where(counts[:, None, None] > 0, share * seen + (1 - share) * sunk, seen)


# Blocks of four, a window of five: row 12 attends from 8 on, all of block 2.
REUSED = dict(sliding_window=5, max_context_length=32, prefix_caching=True)
SEQUENCE = list(range(50, 66))


def remembering(**changes):
    """Return a cache that computed SEQUENCE and freed blocks 0, 1, 3, 2 in order."""
    cache, _ = allocate(small_cache(**REUSED | changes), 0, tokens=[SEQUENCE[:4]])
    for start in range(0, 16, 4):
        cache, step = append(cache, 0, 4, tokens=SEQUENCE[start : start + 4])
        cache = write_tokens(cache, step, SEQUENCE[start : start + 4])
    cache, _ = free(cache, 0)
    jkv.check(cache)
    return cache


def without_the_beginning(cache):
    """Allocate all but the two blocks that were freed last."""
    return with_free_blocks(cache, 2)


class TestPrefixes:
    def test_hits_map_only_the_window(self):
        """One token is left to compute, which attends from 11 on."""
        cache, found = allocate(remembering(), 16, tokens=[SEQUENCE])
        assert found.num_cached.tolist() == [15]
        assert columns(cache, 1) == [2, 3] and kept(cache, 1) == 8
        jkv.check(cache)
        assert jkv.tokens(cache, 1).tolist()[:16] == [-1] * 8 + SEQUENCE[8:15] + [-1]

    def test_hits_without_the_first_blocks(self):
        cache = without_the_beginning(remembering())
        assert match(cache, [SEQUENCE[:9], SEQUENCE[:13], SEQUENCE]) == [0, 12, 15]

    def test_hits_map_the_blocks_of_sinks(self):
        cache, found = allocate(remembering(num_sink_tokens=3), 16, tokens=[SEQUENCE])
        assert found.num_cached.tolist() == [15] and columns(cache, 1) == [0, 2, 3]
        jkv.check(cache)

    def test_another_prefix_with_the_same_end_is_not_found(self):
        cache = remembering()
        for other in (
            [49, *SEQUENCE[1:]],
            [*SEQUENCE[4:8], *SEQUENCE[:4], *SEQUENCE[8:]],
        ):
            assert match(cache, [other]) == [0]
        assert match(cache, [SEQUENCE], salts=1) == [0]

    def test_partial_hits_check_released_tokens(self):
        cache = without_the_beginning(remembering())
        similar = [*SEQUENCE[:14], 7, 7]
        assert match(cache, [similar, [49, *similar[1:]]]) == [14, 0]
        cache, found = allocate(cache, 16, tokens=[similar])
        assert found.num_cached.tolist() == [14] and columns(cache, 3) == [2, 3]
        jkv.check(cache)

    def test_truncation_unindexes_only_the_cut_block(self):
        """A step of two blocks is rolled back except for one token."""
        cache, _ = allocate(small_cache(**REUSED), 0, tokens=[SEQUENCE[:4]])
        for start, count in ((0, 4), (4, 4), (8, 8)):
            tokens = SEQUENCE[start : start + count]
            cache, step = append(cache, 0, count, tokens=tokens)
            cache = write_tokens(cache, step, tokens)
        cut, last = np.asarray(jkv.block_ids(cache, 0))[2:4]
        cache, status = truncate(cache, 0, 9)
        assert names(status) == ["OK"]
        jkv.check(cache)
        assert bool(jkv.block_info(cache, last).is_cached)
        cache, _ = free(cache, 0)
        assert not bool(jkv.block_info(cache, cut).is_cached)

    def test_a_late_commit_of_freed_blocks_indexes_nothing(self):
        cache, _ = allocate(small_cache(**REUSED), 0, tokens=[SEQUENCE[:4]])
        steps = []
        for start in (0, 8):
            cache, step = append(cache, 0, 8, tokens=SEQUENCE[start : start + 8])
            steps.append(step.batch)
        for step in steps:
            cache = jkv.commit(cache, step)
        jkv.check(cache)
        cache, _ = free(cache, 0)
        assert match(cache, [SEQUENCE]) == [0]


class TestConfiguration:
    @pytest.mark.parametrize(
        "changes, message",
        [
            (dict(sliding_window=0), "sliding_window must be at least 1"),
            (dict(sliding_window=2.5), "sliding_window must be an int"),
            (dict(num_sink_tokens=4), "pass sliding_window"),
            (dict(sliding_window=8, num_sink_tokens=-1), "num_sink_tokens must be at"),
            (dict(sliding_window=4, prefix_caching=True), "above block_size: got 4"),
        ],
    )
    def test_invalid_windows_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            small_config(**changes)

    def test_a_window_increases_the_capacity(self):
        config = small_config(num_blocks=12, max_sequences=8, **WINDOW)
        plain = small_config(num_blocks=12, max_sequences=8, max_context_length=40)
        assert (config.most_sequences(40), plain.most_sequences(40)) == (4, 1)
        assert (config.longest_context(4), plain.longest_context(4)) == (40, 12)
        assert config.bytes == plain.bytes + 4 * 8
        assert "a window of 8 tokens" in str(config)

    def test_check_detects_a_window_with_a_gap(self):
        cache = grow_to(20)
        window = cache.metadata.groups[0].window
        window = dataclasses.replace(
            window, num_released=window.num_released.at[0].add(1)
        )
        with pytest.raises(jkv.InvariantError, match=r"block_tables|released"):
            jkv.check(with_metadata(cache, window=window))


class TestPrograms:
    def test_types_are_32_bits_wide_under_x64(self):
        with jax.enable_x64(True):
            cache = small_cache(**WINDOW, num_sink_tokens=3)
            before = [leaf.dtype for leaf in jax.tree.leaves(cache)]

            def cycle(_, cache):
                cache, opened = jkv.allocate(cache, 2)
                cache, _ = jkv.append(cache, opened.seq_ids, 9, capacity=12)
                cache, forked = jkv.fork(cache, opened.seq_ids, 9)
                cache, _ = jkv.truncate(cache, forked.seq_ids, 3)
                cache, _ = jkv.reorder(cache, opened.seq_ids, forked.seq_ids)
                return jkv.free(cache, opened.seq_ids)[0]

            lowered = jax.jit(lambda c: jax.lax.fori_loop(0, 5, cycle, c)).lower(cache)
            after = jax.tree.leaves(lowered.out_info)
            assert [leaf.dtype for leaf in after] == before


def grow_to(length):
    """Return a sequence that was grown by four tokens at a time."""
    cache, _ = allocate(small_cache(**WINDOW), 0)
    for start in range(0, length, 4):
        cache = grow(cache, 0, range(start, start + 4))
    return cache
