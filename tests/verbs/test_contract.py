"""The fine print of the contract, one small test per sentence.

The cache of these tests has eight blocks of four tokens and four sequences of at most
14 tokens; calls carry three requests wherever the number does not matter.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    grow,
    opened,
    refusal_counts,
    small_cache,
    stored_tokens,
    table,
    without_refusals,
    write_tokens,
)

import jkv
from jkv import Status

MAX = 2**31 - 1
MIN = -(2**31)


def i32(*values):
    return jnp.array(values, jnp.int32)


def names(status):
    return [Status(code).name for code in np.asarray(status).tolist()]


def free_count(cache):
    return int(jkv.num_free_blocks(cache))


def assert_unchanged(before, after):
    assert without_refusals(before) == without_refusals(after)


class TestAnyVerb:
    def calls(self, cache):
        """Every verb with one good request, one padding and one refused."""
        return {
            "allocate": lambda c: jkv.allocate(c, i32(1, -1, -2)),
            "append": lambda c: jkv.append(c, i32(0, -1, 3), i32(1, 1, 1)),
            "fork": lambda c: jkv.fork(c, i32(0, -1, 3)),
            "free": lambda c: jkv.free(c, i32(0, -1, 3)),
            "truncate": lambda c: jkv.truncate(c, i32(0, -1, 3), i32(1, 1, 1)),
            "reorder": lambda c: jkv.reorder(c, i32(0, -1, 3), i32(1, 1, 1)),
        }

    @pytest.mark.parametrize(
        "verb", ["allocate", "append", "fork", "free", "truncate", "reorder"]
    )
    def test_is_the_same_eagerly_under_jit_and_donated(self, verb):
        call = self.calls(None)[verb]
        eager = call(opened(6, 6))
        before = opened(6, 6)
        bits = without_refusals(before)
        jitted = jax.jit(call)(before)
        # Nothing donates by itself: the old value is still there.
        assert without_refusals(before) == bits
        donated = jax.jit(call, donate_argnums=0)(before)
        leaves = [jax.tree.leaves(result) for result in (eager, jitted, donated)]
        for one, two, three in zip(*leaves, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)

    @pytest.mark.parametrize(
        "verb", ["allocate", "append", "fork", "free", "truncate", "reorder"]
    )
    def test_answers_each_request_for_itself(self, verb):
        cache = opened(6, 6)
        cache, result = self.calls(cache)[verb](cache)
        status = getattr(result, "status", result)
        assert status.shape == (3,) and status.dtype == jnp.int32
        refusal = "INVALID_ARGUMENT" if verb == "allocate" else "INVALID_SEQUENCE"
        assert names(status) == ["OK", "OK", refusal]
        jkv.check(cache)

    def test_runs_inside_scan(self):
        def step(cache, number):
            cache, batch = jkv.append(cache, i32(0, 1))
            cache = write_tokens(cache, batch, jnp.full(2, number))
            cache, status = jkv.reorder(cache, i32(0, 1), i32(0, 0))
            return cache, status

        cache, statuses = jax.lax.scan(step, opened(0, 0), jnp.arange(10.0))
        assert (np.asarray(statuses) == Status.OK).all()
        assert stored_tokens(cache, 1) == list(range(10))
        jkv.check(cache)

    def test_runs_inside_while_loop(self):
        def step(cache):
            cache, _ = jkv.append(cache, i32(0))
            cache, child = jkv.fork(cache, i32(0))
            cache, _ = jkv.truncate(cache, child.seq_ids, 1)
            return jkv.free(cache, child.seq_ids)[0]

        def has_room(cache):
            return jkv.num_free_blocks(cache) > 5

        cache = jax.lax.while_loop(has_room, step, opened(0))
        assert int(cache.metadata.context_lengths[0]) == 9
        jkv.check(cache)

    def test_takes_a_python_int_for_all(self):
        _, batch = jkv.append(opened(1, 1, 1), i32(0, 1, 2), 2, capacity=6)
        assert batch.query_lengths.tolist() == [2, 2, 2]
        _, status = jkv.truncate(opened(3, 3), i32(0, 1), 2)
        assert names(status) == ["OK", "OK"]
        _, status = jkv.reorder(opened(3, 2), i32(0, 1), 1)
        assert names(status) == ["OK", "OK"]

    def test_takes_a_python_int_alone_as_one_request(self):
        cache, result = jkv.allocate(small_cache(), 5)
        assert result.seq_ids.tolist() == [0]
        assert jkv.can_allocate(cache, 5).tolist() == [True]
        cache, batch = jkv.append(cache, 0, 1)
        assert batch.context_lengths.tolist() == [1]
        cache, forked = jkv.fork(cache, 0)
        assert forked.seq_ids.tolist() == [1]
        cache, status = jkv.free(cache, 0)
        assert status.tolist() == [Status.OK]

    def test_padding_is_ignored_and_ok(self):
        cache = opened(6)
        pad = i32(-1, -1, -1)
        far = i32(MAX, -5, MIN)
        for after, status in [
            jkv.allocate(cache, pad),
            jkv.append(cache, pad, far),
            jkv.fork(cache, pad),
            jkv.free(cache, pad),
            jkv.truncate(cache, pad, far),
            jkv.reorder(cache, pad, far),
        ]:
            assert names(getattr(status, "status", status)) == ["OK"] * 3
            assert_unchanged(cache, after)
            assert refusal_counts(after) == [0] * 7

    @pytest.mark.parametrize("seq_id", [1, 3, 4, 5, MAX, -2, -3, MIN])
    def test_an_id_that_is_not_open_is_an_invalid_sequence(self, seq_id):
        cache = opened(6)
        ids = i32(seq_id)
        for after, status in [
            jkv.append(cache, ids),
            jkv.fork(cache, ids),
            jkv.free(cache, ids),
            jkv.truncate(cache, ids, 0),
            jkv.reorder(cache, ids, 0),
            jkv.reorder(cache, i32(0), ids),
        ]:
            assert names(getattr(status, "status", status)) == ["INVALID_SEQUENCE"]
            assert_unchanged(cache, after)

    def test_a_refused_new_sequence_gets_no_id(self):
        _, result = jkv.allocate(small_cache(), i32(15, -2, 1))
        assert result.seq_ids.tolist() == [-1, -1, 0]
        _, result = jkv.fork(opened(1), i32(7, 0, -1))
        assert result.seq_ids.tolist() == [-1, 1, -1]

    def test_the_second_mention_is_an_invalid_sequence(self):
        two = i32(0, 0)
        refused = ["OK", "INVALID_SEQUENCE"]
        assert names(jkv.append(opened(6), two)[1].status) == refused
        assert names(jkv.free(opened(6), two)[1]) == refused
        assert names(jkv.truncate(opened(6), two, 1)[1]) == refused
        assert names(jkv.reorder(opened(6, 6), two, 1)[1]) == refused

    def test_the_first_mention_counts_even_when_refused(self):
        cache, batch = jkv.append(opened(6), i32(0, 0), i32(-1, 1))
        assert names(batch.status) == ["INVALID_ARGUMENT", "INVALID_SEQUENCE"]
        assert stored_tokens(cache, 0) == list(range(6))
        _, status = jkv.truncate(opened(6), i32(0, 0), i32(7, 1))
        assert names(status) == ["INVALID_ARGUMENT", "INVALID_SEQUENCE"]
        _, status = jkv.reorder(opened(6, 6), i32(0, 0), i32(3, 1))
        assert names(status) == ["INVALID_SEQUENCE", "INVALID_SEQUENCE"]

    def test_refusals_are_counted_per_status(self):
        cache, _ = jkv.append(opened(6), i32(0, 7, 7), i32(-1, 1, 1))
        counts = refusal_counts(cache)
        assert counts[Status.INVALID_SEQUENCE] == 2
        assert counts[Status.INVALID_ARGUMENT] == 1
        assert sum(counts) == 3

    def test_a_refusal_counter_passes_32_bits(self):
        cache = opened(6)
        full = cache.metadata.counters.at[Status.INVALID_SEQUENCE, 0].set(2**32 - 1)
        metadata = dataclasses.replace(cache.metadata, counters=full)
        cache = dataclasses.replace(cache, metadata=metadata)
        cache, _ = jkv.free(cache, i32(7, 7))
        assert refusal_counts(cache)[Status.INVALID_SEQUENCE] == 2**32 + 1

    def test_one_trace_however_the_values_change(self):
        """Eager calls with other values, ints too, compile nothing new."""
        compiled = []

        def listen(event, duration, **_):
            if event.endswith("backend_compile_duration"):
                compiled.append(event)

        def play(cache, count, seq_id):
            ids = i32(seq_id, 3, -1)
            cache, _ = jkv.allocate(cache, i32(count, 0, -1))
            cache, batch = jkv.append(cache, ids, i32(count, 0, 2))
            cache, _ = jkv.append(cache, ids, count, capacity=6)
            cache, _ = jkv.fork(cache, ids)
            cache, _ = jkv.truncate(cache, ids, count)
            cache, _ = jkv.reorder(cache, ids, i32(1, count, seq_id))
            return jkv.free(cache, ids)[0]

        cache = play(opened(6, 6), 1, 0)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            play(cache, 2, 1)
            play(opened(6, 6), 3, 1)
        finally:
            jax.monitoring.clear_event_listeners()
        assert compiled == []

    def test_a_list_may_hold_arrays_and_traced_values(self):
        cache, opened_ = jax.jit(jkv.allocate)(small_cache(), [5, 6])
        cache, batch = jkv.append(cache, [opened_.seq_ids[1], 0])
        assert batch.seq_ids.tolist() == [1, 0]


class TestOrderOfCauses:
    """The first of several causes is reported."""

    def test_append(self):
        cache = opened(6, num_blocks=2)
        _, batch = jkv.append(cache, i32(9, 9, 0), i32(-1, MAX, MAX), capacity=1)
        assert names(batch.status) == [
            "INVALID_SEQUENCE",
            "INVALID_SEQUENCE",
            "CONTEXT_FULL",
        ]
        # 7 more tokens fit neither the row nor the pool, 9 more no context either.
        for count, cause in [(9, "CONTEXT_FULL"), (7, "BATCH_FULL")]:
            _, batch = jkv.append(cache, i32(0), i32(count), capacity=1)
            assert names(batch.status) == [cause]
        _, batch = jkv.append(cache, i32(0), i32(7), capacity=16)
        assert names(batch.status) == ["OUT_OF_BLOCKS"]

    def test_allocate(self):
        full = opened(4, 4, num_blocks=2, max_sequences=2)
        _, result = jkv.allocate(full, i32(-2, 15, 1))
        assert names(result.status) == [
            "INVALID_ARGUMENT",
            "CONTEXT_FULL",
            "OUT_OF_SEQUENCES",
        ]
        _, result = jkv.allocate(opened(4, 4, num_blocks=2), i32(-2, 15, 1))
        assert names(result.status) == [
            "INVALID_ARGUMENT",
            "CONTEXT_FULL",
            "OUT_OF_BLOCKS",
        ]

    def test_fork(self):
        full = opened(3, 3, num_blocks=2, max_sequences=2)
        _, result = jkv.fork(full, i32(7, 0, 1))
        assert names(result.status) == [
            "INVALID_SEQUENCE",
            "OUT_OF_SEQUENCES",
            "OUT_OF_SEQUENCES",
        ]

    def test_truncate(self):
        _, status = jkv.truncate(opened(3), i32(1, 0, 0), i32(-1, 4, -1))
        assert names(status) == [
            "INVALID_SEQUENCE",
            "INVALID_ARGUMENT",
            "INVALID_SEQUENCE",
        ]


class TestWhoGetsTheLastBlocks:
    def test_requests_are_served_in_order(self):
        cache = opened(4, 4, 4, num_blocks=5)
        cache, batch = jkv.append(cache, i32(2, 0, 1))
        assert names(batch.status) == ["OK", "OK", "OUT_OF_BLOCKS"]
        assert table(cache, 2)[-1] == 3 and table(cache, 0)[-1] == 4

    def test_one_that_does_not_fit_shuts_later_ones_out(self):
        cache, result = jkv.allocate(small_cache(num_blocks=3), i32(13, 1, 4))
        assert names(result.status) == ["OUT_OF_BLOCKS"] * 3
        assert free_count(cache) == 3

    def test_a_request_that_needs_no_block_is_always_served(self):
        cache, result = jkv.allocate(small_cache(num_blocks=3), i32(13, 0, 4))
        assert names(result.status) == ["OUT_OF_BLOCKS", "OK", "OUT_OF_BLOCKS"]
        cache, batch = jkv.append(opened(4, 3, num_blocks=2), i32(0, 1))
        assert names(batch.status) == ["OUT_OF_BLOCKS", "OK"]

    def test_other_refusals_shut_nobody_out(self):
        cache, result = jkv.allocate(small_cache(num_blocks=3), i32(MAX, MIN, 12))
        assert names(result.status) == ["CONTEXT_FULL", "INVALID_ARGUMENT", "OK"]
        cache, batch = jkv.append(
            opened(4, 4, num_blocks=3), i32(0, 9, 1), i32(11, 9, 1), capacity=21
        )
        assert names(batch.status) == ["CONTEXT_FULL", "INVALID_SEQUENCE", "OK"]

    def test_a_call_is_judged_by_the_blocks_free_before_it(self):
        # Sequence 1 shares block 0 and needs a copy; sequence 2 gives two blocks up.
        cache, _ = jkv.fork(opened(4, num_blocks=3), i32(0))
        cache, _ = jkv.allocate(cache, i32(8))
        assert free_count(cache) == 0
        cache, status = jkv.truncate(cache, i32(2, 1), i32(0, 3))
        assert names(status) == ["OK", "OUT_OF_BLOCKS"]
        assert free_count(cache) == 2
        assert stored_tokens(cache, 1) == [0, 1, 2, 3]
        cache, status = jkv.truncate(cache, i32(1), i32(3))
        assert names(status) == ["OK"]
        assert stored_tokens(cache, 1) == [0, 1, 2]
        assert stored_tokens(cache, 0) == [0, 1, 2, 3]
        jkv.check(cache)

    def test_one_refused_for_want_of_blocks_takes_no_sequence(self):
        cache = small_cache(num_blocks=3, max_sequences=1)
        cache, result = jkv.allocate(cache, i32(13, 0, 1))
        assert names(result.status) == ["OUT_OF_BLOCKS", "OK", "OUT_OF_SEQUENCES"]
        assert result.seq_ids.tolist() == [-1, 0, -1]

    def test_huge_requests_do_not_overflow(self):
        cache = small_cache()
        cache, result = jkv.allocate(cache, i32(MAX, MAX, 4))
        assert names(result.status) == ["CONTEXT_FULL", "CONTEXT_FULL", "OK"]
        cache, batch = jkv.append(cache, i32(-1, -1, 0), i32(MAX, MAX, 4))
        assert names(batch.status) == ["OK", "OK", "BATCH_FULL"]
        cache, batch = jkv.append(cache, i32(9, 9, 0), i32(MAX, 2, 1))
        assert names(batch.status)[2] == "BATCH_FULL"
        assert (np.asarray(batch.query_starts)[1:] >= 3).all()


class TestAllocate:
    def test_hands_out_ids_and_blocks_in_order(self):
        cache, result = jkv.allocate(small_cache(), i32(5, 0, 4))
        assert result.seq_ids.tolist() == [0, 1, 2]
        assert result.num_cached.tolist() == [0, 0, 0]
        assert [table(cache, seq_id) for seq_id in range(3)] == [[0, 1], [], [2]]

    def test_reserves_and_stores_nothing(self):
        cache, _ = jkv.allocate(small_cache(), i32(9))
        assert int(cache.metadata.context_lengths[0]) == 0
        assert int(cache.metadata.num_mapped_blocks[0]) == 3
        assert free_count(cache) == 5

    def test_freed_ids_come_back_last(self):
        cache, _ = jkv.free(opened(1, 1), i32(0))
        cache, result = jkv.allocate(cache, i32(0, 0, 0))
        assert result.seq_ids.tolist() == [2, 3, 0]

    def test_up_to_the_longest_context(self):
        _, result = jkv.allocate(small_cache(), i32(14, 15))
        assert names(result.status) == ["OK", "CONTEXT_FULL"]

    def test_can_allocate_is_what_allocate_would_serve(self):
        for cache in (small_cache(), opened(14, 1, 1), opened(9, 1, max_sequences=3)):
            for counts in [(14, 14, 4), (13, 5, 0), (0, 0, 0), (-2, 15, -1)]:
                expected = jkv.allocate(cache, i32(*counts))[1].status == Status.OK
                fits = jkv.can_allocate(cache, i32(*counts))
                assert fits.dtype == jnp.bool_
                assert fits.tolist() == expected.tolist()

    def test_can_allocate_counts_rows(self):
        cache = opened(1, 1, max_sequences=3)
        assert jkv.can_allocate(cache, i32(0, 0)).tolist() == [True, False]

    def test_num_free_blocks_is_a_scalar(self):
        assert jkv.num_free_blocks(opened(5)).shape == ()
        assert free_count(opened(5)) == 6


class TestAppend:
    def test_knows_when_it_decodes(self):
        """From the call, not from values: what attends then leaves prefill out."""
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

    def test_packs_rows_in_request_order(self):
        cache = opened(3, 0, 5)
        _, batch = jkv.append(cache, i32(2, 0, 1), i32(2, 3, 1), capacity=8)
        assert batch.query_starts.tolist() == [0, 2, 5]
        assert batch.query_lengths.tolist() == [2, 3, 1]
        assert batch.context_lengths.tolist() == [7, 6, 1]
        assert batch.valid.tolist() == [True] * 6 + [False] * 2
        assert batch.positions.tolist()[:6] == [5, 6, 3, 4, 5, 0]
        assert batch.offsets.tolist()[:6] == [1, 2, 3, 0, 1, 0]
        assert batch.last_rows.tolist() == [1, 4, 5]

    def test_the_default_capacity_is_one_row_per_request(self):
        _, batch = jkv.append(opened(3, 0, 5), i32(2, 0, 1))
        assert batch.valid.shape == (3,)
        assert batch.query_lengths.tolist() == [1, 1, 1]

    def test_refused_requests_and_padding_own_their_rows(self):
        _, batch = jkv.append(
            opened(3, 3), i32(9, -1, 0, 1), i32(2, 3, -4, 1), capacity=8
        )
        assert batch.query_starts.tolist() == [0, 2, 5, 5]
        assert batch.query_lengths.tolist() == [0, 0, 0, 1]
        assert batch.valid.tolist() == [False] * 5 + [True] + [False] * 2

    def test_a_negative_count_owns_no_row(self):
        _, batch = jkv.append(opened(3, 3), i32(0, 1), i32(MIN, 1))
        assert names(batch.status) == ["INVALID_ARGUMENT", "OK"]
        assert batch.query_starts.tolist() == [0, 0]
        assert batch.valid.tolist() == [True, False]
        assert batch.context_lengths.tolist() == [3, 4]

    def test_negative_padding_owns_no_row(self):
        _, batch = jkv.append(opened(3, 3), i32(-1, 1), i32(-3, 1))
        assert names(batch.status) == ["OK", "OK"]
        assert batch.query_starts.tolist() == [0, 0]

    def test_batch_full(self):
        cache = opened(3, 3)
        cache, batch = jkv.append(cache, i32(0, 1), i32(2, 2), capacity=3)
        assert names(batch.status) == ["OK", "BATCH_FULL"]
        assert batch.context_lengths.tolist() == [5, 3]

    def test_zero_tokens_are_never_batch_full(self):
        _, batch = jkv.append(opened(3, 3), i32(-1, 0, 1), i32(MAX, 0, 1), capacity=3)
        assert names(batch.status) == ["OK", "OK", "BATCH_FULL"]
        assert (np.asarray(batch.query_starts)[1:] >= 3).all()

    def test_padded_layout(self):
        cache, batch = jkv.append(
            opened(3, 0, 5), i32(2, 0, 1), i32(2, 3, 1), max_query_length=2
        )
        assert names(batch.status) == ["OK", "BATCH_FULL", "OK"]
        assert batch.query_starts.tolist() == [0, 2, 4]
        assert batch.valid.tolist() == [True, True, False, False, True, False]
        assert int(batch.last_rows[0]) == 1 and int(batch.last_rows[2]) == 4

    def test_context_lengths_of_refused_padding_and_invalid(self):
        cache = opened(3, 6)
        _, batch = jkv.append(cache, i32(1, -1, 7, 0), i32(15, 1, 1, -1), capacity=32)
        assert batch.context_lengths.tolist() == [6, 0, 0, 3]

    def test_invalid_rows_have_no_slot(self):
        cache, batch = jkv.append(opened(3), i32(-1, 0, 9))
        assert batch.block_ids.tolist() == [8, 0, 8]

    def test_returns_what_was_asked(self):
        _, batch = jkv.append(opened(3), i32(-1, 0, 9))
        assert batch.seq_ids.tolist() == [-1, 0, 9]

    def test_rollback_then_a_shorter_append_needs_no_negative_block(self):
        cache, _ = jkv.allocate(small_cache(), i32(14))
        cache, batch = jkv.append(cache, i32(0), i32(2), capacity=2)
        assert names(batch.status) == ["OK"]
        assert table(cache, 0) == [0, 1, 2, 3]
        assert free_count(cache) == 4


class TestWrite:
    def test_casts_to_the_storage(self):
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            cache, _ = jkv.allocate(small_cache(dtype=dtype), i32(0))
            cache, batch = jkv.append(cache, i32(0))
            rows = jnp.full((1, 1, 2), 1.2345678, jnp.float32)
            cache = jkv.write(cache, 0, batch, rows, rows)
            keys, values, _ = jkv.read(cache, 0, 0)
            assert keys.dtype == values.dtype == dtype
            assert keys[0, 0, 0] == jnp.asarray(1.2345678, dtype)

    def test_the_layer_may_be_traced(self):
        cache = opened(0, num_layers=3)
        cache, batch = jkv.append(cache, i32(0))

        def write_layer(layer, cache):
            rows = jnp.full((1, 1, 2), 1.0, jnp.float32) * layer.astype(jnp.float32)
            return jkv.write(cache, layer, batch, rows, -rows)

        cache = jax.lax.fori_loop(0, 3, write_layer, cache)
        for layer in range(3):
            keys, values, _ = jkv.read(cache, layer, 0)
            assert keys[0].tolist() == [[layer, layer]]
            assert values[0].tolist() == [[-layer, -layer]]

    def test_invalid_rows_are_dropped(self):
        cache = opened(3, 2)
        pool = np.asarray(cache.keys)
        cache, batch = jkv.append(cache, i32(-1, 9, 0), i32(1, 1, 15), capacity=20)
        cache = write_tokens(cache, batch, range(20))
        np.testing.assert_array_equal(np.asarray(cache.keys), pool)

    def test_writes_nothing_but_its_slots(self):
        cache = opened(3, 2)
        pool = np.asarray(cache.keys).copy()
        cache, batch = jkv.append(cache, i32(1, 0, -1))
        cache = write_tokens(cache, batch, [7, 8, 9])
        for row, number in ((0, 7), (1, 8)):
            pool[0, batch.block_ids[row], :, batch.offsets[row]] = number
        np.testing.assert_array_equal(np.asarray(cache.keys), pool)

    def test_commit_changes_nothing_yet(self):
        cache, batch = jkv.append(opened(3), i32(0))
        assert_unchanged(cache, jkv.commit(cache, batch))


class TestAttend:
    def attended(self, cache, batch, seed=0, **options):
        shape = (batch.valid.shape[0], 2, 2)
        queries = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        return np.asarray(jkv.attend(cache, 0, batch, queries, **options)), queries

    def step(self, cache, seq_ids, counts, capacity):
        cache, batch = jkv.append(cache, seq_ids, counts, capacity=capacity)
        numbers = np.random.default_rng(1).standard_normal(capacity)
        return write_tokens(cache, batch, numbers), batch

    def test_is_causal_up_to_its_own_position(self):
        # One call over five tokens equals five calls over one.
        cache, batch = self.step(opened(0), i32(0), i32(5), 5)
        together, queries = self.attended(cache, batch)
        cache = opened(0)
        numbers = np.random.default_rng(1).standard_normal(5)
        for row in range(5):
            cache, batch = jkv.append(cache, i32(0))
            cache = write_tokens(cache, batch, numbers[row : row + 1])
            alone = jkv.attend(cache, 0, batch, queries[row : row + 1])
            np.testing.assert_allclose(alone[0], together[row], atol=1e-6)

    def test_invalid_rows_give_zeros(self):
        cache, batch = self.step(opened(3, 2), i32(-1, 0, 9), i32(1, 2, 1), 6)
        found, _ = self.attended(cache, batch)
        assert not found[[0, 3, 4, 5]].any()
        assert found[[1, 2]].all()

    def test_returns_the_dtype_of_the_queries(self):
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            cache, batch = self.step(opened(3, dtype=dtype), i32(0), i32(1), 1)
            for query_dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
                found = jkv.attend(cache, 0, batch, jnp.ones((1, 2, 2), query_dtype))
                assert found.dtype == query_dtype

    def test_a_window_counts_the_token_itself_and_may_be_traced(self):
        cache, batch = self.step(opened(3), i32(0), i32(1), 1)
        newest = jkv.read(cache, 0, 0)[1][3]  # [K, D] of the one token seen

        def attend(window):
            queries = jnp.ones((1, 2, 2), jnp.float32)
            return jkv.attend(cache, 0, batch, queries, window=window)

        np.testing.assert_allclose(attend(1)[0], jnp.repeat(newest, 2, 0), atol=1e-6)
        traced = jax.jit(attend)
        for window in (1, 2, 4, 9):
            np.testing.assert_allclose(traced(window), attend(window), atol=1e-6)
        assert np.abs(np.asarray(traced(1) - traced(2))).max() > 1e-3

    def test_the_default_scale_is_one_over_root_d(self):
        cache, batch = self.step(opened(3), i32(0), i32(1), 1)
        default, _ = self.attended(cache, batch)
        named, _ = self.attended(cache, batch, scale=1 / np.sqrt(2.0))
        other, _ = self.attended(cache, batch, scale=1.0)
        np.testing.assert_allclose(default, named, atol=1e-6)
        assert np.abs(default - other).max() > 1e-3

    def test_same_values_whatever_the_order_of_blocks(self):
        fresh, fresh_batch = self.step(opened(0), i32(0), i32(10), 10)
        worn = opened(4, 8, 4)
        worn, _ = jkv.free(worn, i32(1, 0, 2))
        worn, opened_again = jkv.allocate(worn, i32(0))
        seq_ids = opened_again.seq_ids
        worn, _ = jkv.append(worn, seq_ids, 14, capacity=14)  # runs around the ring
        worn, _ = jkv.free(worn, seq_ids)
        worn, opened_again = jkv.allocate(worn, i32(0))
        worn, batch = self.step(worn, opened_again.seq_ids, i32(10), 10)
        row = int(opened_again.seq_ids[0])
        assert table(worn, row) != sorted(table(worn, row))
        expected, _ = self.attended(fresh, fresh_batch)
        found, _ = self.attended(worn, batch)
        np.testing.assert_array_equal(found, expected)

    def test_query_head_h_reads_kv_head_h_over_group(self):
        cache = jkv.init(
            jkv.CacheConfig(
                num_layers=1,
                num_kv_heads=2,
                head_dim=2,
                num_blocks=2,
                block_size=4,
                max_sequences=1,
                max_context_length=8,
                dtype=jnp.float32,
            )
        )
        cache, _ = jkv.allocate(cache, i32(0))
        cache, batch = jkv.append(cache, i32(0))
        values = jnp.array([[[1.0, 1.0], [2.0, 2.0]]])
        cache = jkv.write(cache, 0, batch, values, values)
        found = jkv.attend(cache, 0, batch, jnp.ones((1, 6, 2)))
        assert found[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


class TestFork:
    def test_shares_the_past_but_not_the_reservation(self):
        cache, _ = jkv.allocate(small_cache(), i32(14))
        cache = grow(cache, 0, range(6))
        cache, result = jkv.fork(cache, i32(0))
        assert names(result.status) == ["OK"]
        assert table(cache, 0) == [0, 1, 2, 3]
        assert table(cache, 1) == [0, 4]
        assert stored_tokens(cache, 1) == list(range(6))
        jkv.check(cache)

    def test_a_parent_may_appear_many_times(self):
        cache, result = jkv.fork(opened(6), i32(0, 0, 0))
        assert result.seq_ids.tolist() == [1, 2, 3]
        assert [table(cache, child) for child in (1, 2, 3)] == [[0, 2], [0, 3], [0, 4]]
        assert int(jkv.block_info(cache, 0).reference_count) == 4

    def test_a_child_is_no_parent_in_its_call(self):
        cache, result = jkv.fork(opened(6), i32(0, 1, 2))
        assert names(result.status) == ["OK", "INVALID_SEQUENCE", "INVALID_SEQUENCE"]

    def test_children_part_ways(self):
        cache, _ = jkv.fork(opened(6), i32(0, 0))
        cache = grow(cache, 1, [77])
        cache = grow(cache, 2, [88])
        past = list(range(6))
        assert stored_tokens(cache, 0) == past
        assert stored_tokens(cache, 1) == [*past, 77]
        assert stored_tokens(cache, 2) == [*past, 88]


class TestFree:
    def test_a_second_free_does_nothing(self):
        cache, status = jkv.free(opened(6, 6), i32(0))
        again, status = jkv.free(cache, i32(0))
        assert names(status) == ["INVALID_SEQUENCE"]
        assert_unchanged(cache, again)

    def test_blocks_return_last_first(self):
        cache, _ = jkv.free(opened(12, 12, num_blocks=6), i32(1, 0))
        cache, _ = jkv.allocate(cache, i32(12, 12))
        assert table(cache, 2) == [5, 4, 3] and table(cache, 3) == [2, 1, 0]

    def test_a_shared_block_returns_with_its_last_reference(self):
        cache, _ = jkv.fork(opened(8, num_blocks=3), i32(0))
        cache, _ = jkv.free(cache, i32(0))
        assert free_count(cache) == 1
        assert stored_tokens(cache, 1) == list(range(8))
        cache, _ = jkv.free(cache, i32(1))
        assert free_count(cache) == 3

    def test_all_owners_in_one_call(self):
        cache, _ = jkv.fork(opened(8, num_blocks=3), i32(0))
        cache, _ = jkv.free(cache, i32(1, 0))
        assert free_count(cache) == 3
        jkv.check(cache)


class TestTruncate:
    def test_returns_reserved_blocks_too(self):
        cache, _ = jkv.allocate(small_cache(), i32(14))
        cache = grow(cache, 0, range(6))
        cache, status = jkv.truncate(cache, i32(0), i32(6))
        assert names(status) == ["OK"]
        assert table(cache, 0) == [0, 1]
        assert stored_tokens(cache, 0) == list(range(6))

    @pytest.mark.parametrize("length", [-1, MIN, 7, 14, MAX])
    def test_a_length_that_is_not_there(self, length):
        cache = opened(6)
        after, status = jkv.truncate(cache, i32(0), i32(length))
        assert names(status) == ["INVALID_ARGUMENT"]
        assert_unchanged(cache, after)

    def test_into_a_shared_block_copies_it(self):
        cache, _ = jkv.fork(opened(8), i32(0))
        cache, _ = jkv.truncate(cache, i32(1), i32(6))
        cache = grow(cache, 1, [66, 77])
        assert stored_tokens(cache, 0) == list(range(8))
        assert stored_tokens(cache, 1) == [0, 1, 2, 3, 4, 5, 66, 77]
        assert table(cache, 0) == [0, 1] and table(cache, 1) == [0, 2]
        jkv.check(cache)

    @pytest.mark.parametrize("length", [0, 4, 8])
    def test_to_a_multiple_of_t_needs_no_block(self, length):
        cache, _ = jkv.fork(opened(8, num_blocks=2), i32(0))
        cache, status = jkv.truncate(cache, i32(1), i32(length))
        assert names(status) == ["OK"]
        assert stored_tokens(cache, 1) == list(range(length))
        jkv.check(cache)

    def test_into_a_shared_block_without_a_free_one(self):
        cache, _ = jkv.fork(opened(8, num_blocks=2), i32(0))
        after, status = jkv.truncate(cache, i32(1), i32(7))
        assert names(status) == ["OUT_OF_BLOCKS"]
        assert_unchanged(cache, after)


class TestReorder:
    def test_continues_from_what_the_parent_was(self):
        cache = opened(6, 6, 6)
        cache, status = jkv.reorder(cache, i32(0, 1, 2), i32(1, 2, 0))
        assert names(status) == ["OK"] * 3
        assert stored_tokens(cache, 0) == list(range(100, 106))
        assert stored_tokens(cache, 1) == list(range(200, 206))
        assert stored_tokens(cache, 2) == list(range(6))
        jkv.check(cache)

    @pytest.mark.parametrize("length", range(1, 9))
    def test_beams_of_equal_length_never_run_out(self, length):
        blocks = -(-length // 4)
        cache = opened(length, length, length, num_blocks=3 * blocks)
        assert free_count(cache) == 0
        for parents in (i32(1, 2, 0), i32(2, 2, 1), i32(0, 0, 0), i32(1, 0, 1)):
            before = [stored_tokens(cache, seq_id) for seq_id in range(3)]
            cache, status = jkv.reorder(cache, i32(0, 1, 2), parents)
            assert names(status) == ["OK"] * 3
            for seq_id, parent in enumerate(parents.tolist()):
                assert stored_tokens(cache, seq_id) == before[parent]
            jkv.check(cache)

    def test_a_sequence_that_is_its_own_parent_stays(self):
        cache, _ = jkv.allocate(small_cache(), i32(14, 0))
        cache = grow(cache, 0, range(6))
        after, status = jkv.reorder(cache, i32(0), i32(0))
        assert names(status) == ["OK"]
        assert_unchanged(cache, after)

    def test_gives_back_what_nobody_names_any_more(self):
        cache, _ = jkv.reorder(opened(9, 9), i32(0), i32(1))
        assert free_count(cache) == 4  # two shared blocks and two tails
        jkv.check(cache)

    def test_takes_no_reservation_along(self):
        cache, _ = jkv.allocate(small_cache(), i32(14, 0))
        cache = grow(cache, 0, range(6))
        cache, _ = jkv.reorder(cache, i32(1), i32(0))
        assert len(table(cache, 1)) == 2

    def test_parents_need_not_be_in_the_call(self):
        cache, status = jkv.reorder(opened(6, 3, 3), i32(1, 2), i32(0, 0))
        assert names(status) == ["OK", "OK"]
        assert stored_tokens(cache, 1) == stored_tokens(cache, 2) == list(range(6))

    def test_refuses_what_does_not_fit(self):
        # Sequence 1 has no block to give for a tail, and the pool has none.
        cache = opened(6, 0, num_blocks=2)
        after, status = jkv.reorder(cache, i32(1), i32(0))
        assert names(status) == ["OUT_OF_BLOCKS"]
        assert_unchanged(cache, after)


class TestLookingUp:
    def test_read_is_as_long_as_the_context_may_be(self):
        keys, values, length = jkv.read(opened(6, value_head_dim=3), 0, 0)
        assert keys.shape == (14, 1, 2) and values.shape == (14, 1, 3)
        assert int(length) == 6

    @pytest.mark.parametrize("seq_id", [1, 4, MAX, -1, -2, MIN])
    def test_read_of_an_id_that_is_not_open(self, seq_id):
        assert int(jkv.read(opened(6), 0, seq_id)[2]) == 0

    @pytest.mark.parametrize("seq_id", [1, 4, MAX, -1, -2, MIN])
    def test_block_ids_of_an_id_that_is_not_open(self, seq_id):
        assert jkv.block_ids(opened(6), seq_id).tolist() == [8, 8, 8, 8]

    def test_slots(self):
        found = jkv.slots(opened(6, 6), i32(0, 1, 1), i32(5, 0, 4))
        assert found.block_ids.tolist() == [1, 2, 3]
        assert found.offsets.tolist() == [1, 0, 0]

    def test_slots_that_are_not_mapped(self):
        cache = opened(6)
        found = jkv.slots(cache, i32(0, 0, 0, 1, -1), i32(8, -1, MAX, 0, 0))
        assert found.block_ids.tolist() == [8] * 5

    def test_read_slot(self):
        key, value = jkv.read_slot(opened(6), 0, 1, 1)
        assert key.tolist() == [[5, 5]] and value.tolist() == [[-5, -5]]

    def test_block_info(self):
        cache, _ = jkv.fork(opened(6), i32(0))
        found = [jkv.block_info(cache, block) for block in range(4)]
        assert [int(info.reference_count) for info in found] == [2, 1, 1, 0]
        assert [bool(info.is_free) for info in found] == [False] * 3 + [True]

    def test_tokens_if_recorded(self):
        cache, _ = jkv.allocate(small_cache(record_tokens=True), i32(0, 0))
        cache, _ = jkv.append(
            cache, i32(1, 0), i32(3, 2), capacity=6, tokens=i32(5, 6, 7, 8, 9, 0)
        )
        assert jkv.tokens(cache, 1).tolist() == [5, 6, 7] + [-1] * 11
        assert jkv.tokens(cache, 0).tolist() == [8, 9] + [-1] * 12

    def test_tokens_if_not_recorded(self):
        with pytest.raises(ValueError, match="record_tokens"):
            jkv.tokens(opened(6), 0)


class TestStatus:
    def test_values_are_in_the_order_of_the_contract(self):
        assert [status.name for status in sorted(Status)] == [
            "OK",
            "OUT_OF_BLOCKS",
            "OUT_OF_SEQUENCES",
            "CONTEXT_FULL",
            "BATCH_FULL",
            "INVALID_SEQUENCE",
            "INVALID_ARGUMENT",
        ]
        assert Status.OK == 0 and jkv.NO_SEQUENCE == -1

    @pytest.mark.parametrize("status", list(Status)[1:])
    def test_raises_the_exception_of_the_same_name(self, status):
        name = status.name.title().replace("_", "")
        error = getattr(jkv, name)
        assert issubclass(error, jkv.CacheError)
        with pytest.raises(error, match="1 of 3"):
            jkv.raise_for_status(i32(0, status, 0))

    def test_raises_nothing_when_all_is_well(self):
        jkv.raise_for_status(i32(0, 0))
        jkv.raise_for_status(i32())
