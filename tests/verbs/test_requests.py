"""Rules common to all verbs: batches, padding, refusals, and the order of service."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few
from support.small_caches import (
    allocate,
    append,
    assert_refused,
    assert_unchanged,
    copied,
    fork,
    free,
    free_count,
    lengths,
    names,
    opened,
    refusal_counts,
    reorder,
    small_cache,
    small_config,
    stored_tokens,
    table,
    truncate,
    with_free_blocks,
    with_free_rows,
    with_metadata,
    without_refusals,
    write_tokens,
)

import jkv
from jkv import Status

MAX = 2**31 - 1
MIN = -(2**31)


def i32(*values):
    return np.array(values, np.int32)


# Each verb with a valid, a padding and a refused request.
CALLS = {
    "allocate": lambda c: jkv.allocate(c, i32(1, -1, -2)),
    "append": lambda c: jkv.append(c, i32(0, -1, 3), i32(1, 1, 1)),
    "fork": lambda c: jkv.fork(c, i32(0, -1, 3)),
    "free": lambda c: jkv.free(c, i32(0, -1, 3)),
    "truncate": lambda c: jkv.truncate(c, i32(0, -1, 3), i32(1, 1, 1)),
    "reorder": lambda c: jkv.reorder(c, i32(0, -1, 3), i32(1, 1, 1)),
}


class TestAnyVerb:
    @pytest.mark.parametrize("verb", few(CALLS, "reorder"))
    def test_is_the_same_eagerly_under_jit_and_donated(self, verb):
        call = CALLS[verb]
        before = opened(6, 6)
        bits = without_refusals(before)
        eager = call(before)
        jitted = jax.jit(call)(before)
        # Verbs do not donate: the old value still exists.
        assert without_refusals(before) == bits
        donated = jax.jit(call, donate_argnums=0)(copied(before))
        leaves = [jax.tree.leaves(result) for result in (eager, jitted, donated)]
        for one, two, three in zip(*leaves, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)

    @pytest.mark.parametrize("verb", CALLS)
    @pytest.mark.one_end
    def test_has_one_status_per_request(self, verb):
        cache, result = CALLS[verb](opened(6, 6))
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

        numbers = np.arange(10, dtype=np.float32)
        cache, statuses = jax.lax.scan(step, opened(0, 0), numbers)
        assert (np.asarray(statuses) == Status.OK).all()
        assert stored_tokens(cache, 1) == list(range(10))
        jkv.check(cache)

    @pytest.mark.one_end
    def test_runs_inside_while_loop(self):
        def step(cache):
            cache, _ = jkv.append(cache, i32(0))
            cache, child = jkv.fork(cache, i32(0))
            cache, _ = jkv.truncate(cache, child.seq_ids, 1)
            return jkv.free(cache, child.seq_ids)[0]

        def has_room(cache):
            return jkv.num_free_blocks(cache) > 5

        cache = jax.lax.while_loop(has_room, step, opened(0))
        assert lengths(cache)[0] == 9
        jkv.check(cache)

    def test_broadcasts_a_python_int(self):
        cache, batch = jkv.append(opened(1, 1, 1), i32(0, 1, 2), 2, capacity=6)
        assert batch.query_lengths.tolist() == [2, 2, 2]
        cache, status = jkv.truncate(cache, i32(0, 1, 2), 2)
        assert names(status) == ["OK"] * 3 and lengths(cache) == [2, 2, 2, 0]
        _, status = jkv.reorder(cache, i32(0, 1, 2), 1)
        assert names(status) == ["OK"] * 3

    @pytest.mark.one_end
    def test_accepts_a_python_int_as_one_request(self):
        cache, result = jkv.allocate(small_cache(), 5)
        assert result.seq_ids.tolist() == [0]
        assert jkv.can_allocate(cache, 5).tolist() == [True]
        cache, batch = jkv.append(cache, 0, 1)
        assert batch.context_lengths.tolist() == [1]
        cache, forked = jkv.fork(cache, 0)
        assert forked.seq_ids.tolist() == [1]
        cache, status = jkv.free(cache, 0)
        assert status.tolist() == [Status.OK]

    @pytest.mark.one_end
    def test_padding_is_ignored_and_ok(self):
        cache = opened(6)
        pad, far = [-1, -1, -1], [MAX, -5, MIN]
        for after, status in [
            allocate(cache, pad),
            append(cache, pad, far),
            fork(cache, pad),
            free(cache, pad),
            truncate(cache, pad, far),
            reorder(cache, pad, far),
        ]:
            assert names(getattr(status, "status", status)) == ["OK"] * 3
            assert_unchanged(cache, after)
            assert refusal_counts(after) == [0] * 7

    @pytest.mark.parametrize("seq_id", [1, 3, 4, 5, MAX, -2, -3, MIN])
    @pytest.mark.one_end
    def test_a_closed_id_is_an_invalid_sequence(self, seq_id):
        cache = opened(6)
        for answer in [
            append(cache, seq_id),
            fork(cache, seq_id),
            free(cache, seq_id),
            truncate(cache, seq_id, 0),
            reorder(cache, seq_id, 0),
            reorder(cache, 0, seq_id),
        ]:
            assert_refused(cache, answer, "INVALID_SEQUENCE")

    @pytest.mark.one_end
    def test_a_refused_new_sequence_gets_no_id(self):
        _, result = allocate(small_cache(), [15, -2, 1])
        assert result.seq_ids.tolist() == [-1, -1, 0]
        _, result = fork(opened(1), [7, 0, -1])
        assert result.seq_ids.tolist() == [-1, 1, -1]

    @pytest.mark.one_end
    def test_the_second_mention_is_an_invalid_sequence(self):
        two, refused = [0, 0], ["OK", "INVALID_SEQUENCE"]
        assert names(append(opened(6), two)[1].status) == refused
        assert names(free(opened(6), two)[1]) == refused
        assert names(truncate(opened(6), two, 1)[1]) == refused
        assert names(reorder(opened(6, 6), two, 1)[1]) == refused

    @pytest.mark.one_end
    def test_the_first_mention_counts_even_when_refused(self):
        cache, step = append(opened(6), [0, 0], [-1, 1])
        assert names(step.status) == ["INVALID_ARGUMENT", "INVALID_SEQUENCE"]
        assert stored_tokens(cache, 0) == list(range(6))
        _, status = truncate(opened(6), [0, 0], [7, 1])
        assert names(status) == ["INVALID_ARGUMENT", "INVALID_SEQUENCE"]
        _, status = reorder(opened(6, 6), [0, 0], [3, 1])
        assert names(status) == ["INVALID_SEQUENCE", "INVALID_SEQUENCE"]

    @pytest.mark.one_end
    def test_refusals_are_counted_per_status(self):
        cache, _ = append(opened(6), [0, 7, 7], [-1, 1, 1])
        counts = refusal_counts(cache)
        assert counts[Status.INVALID_SEQUENCE] == 2
        assert counts[Status.INVALID_ARGUMENT] == 1
        assert sum(counts) == 3

    @pytest.mark.one_end
    def test_a_refusal_counter_passes_32_bits(self):
        cache = opened(6)
        full = np.array(cache.metadata.sequences.counters)
        full[Status.INVALID_SEQUENCE, 0] = 2**32 - 1
        cache, _ = free(with_metadata(cache, counters=full), [7, 7])
        assert refusal_counts(cache)[Status.INVALID_SEQUENCE] == 2**32 + 1

    def test_new_values_reuse_compiled_programs(self):
        """Eager calls with other values, Python ints included, compile nothing."""
        compiled = []

        def listen(event, _, **__):
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
            jax.monitoring.unregister_event_duration_listener(listen)
        assert compiled == []

    def test_a_list_may_hold_arrays_and_traced_values(self):
        cache, result = jax.jit(jkv.allocate)(small_cache(), [5, 6])
        cache, batch = jkv.append(cache, [result.seq_ids[1], 0])
        assert batch.seq_ids.tolist() == [1, 0]


@pytest.mark.one_end
class TestOrderOfCauses:
    """The first of several reasons is reported."""

    def test_append(self):
        cache = with_free_blocks(opened(6), 0)
        _, batch = jkv.append(cache, i32(9, 9, 0), i32(-1, MAX, MAX), capacity=1)
        assert names(batch.status) == [
            "INVALID_SEQUENCE",
            "INVALID_SEQUENCE",
            "CONTEXT_FULL",
        ]
        # 7 more tokens exceed both the rows and the pool, 9 more also the context.
        for count, cause in [(9, "CONTEXT_FULL"), (7, "BATCH_FULL")]:
            _, batch = jkv.append(cache, i32(0, -1, -1), i32(count, 0, 0), capacity=1)
            assert names(batch.status)[0] == cause
        _, step = append(cache, 0, 7)
        assert names(step.status) == ["OUT_OF_BLOCKS"]

    def test_allocate(self):
        full = with_free_blocks(opened(4, 4), 0)
        _, result = allocate(with_free_rows(full, 0), [-2, 15, 1])
        causes = ["INVALID_ARGUMENT", "CONTEXT_FULL", "OUT_OF_SEQUENCES"]
        assert names(result.status) == causes
        _, result = allocate(with_free_blocks(opened(4), 0), [-2, 15, 1])
        causes = ["INVALID_ARGUMENT", "CONTEXT_FULL", "OUT_OF_BLOCKS"]
        assert names(result.status) == causes

    def test_fork(self):
        full = with_free_rows(with_free_blocks(opened(3, 3), 0), 0)
        _, result = fork(full, [7, 0, 1])
        causes = ["INVALID_SEQUENCE", "OUT_OF_SEQUENCES", "OUT_OF_SEQUENCES"]
        assert names(result.status) == causes

    def test_truncate(self):
        _, status = truncate(opened(3), [1, 0, 0], [-1, 4, -1])
        causes = ["INVALID_SEQUENCE", "INVALID_ARGUMENT", "INVALID_SEQUENCE"]
        assert names(status) == causes


@pytest.mark.one_end
class TestWhoGetsTheLastBlocks:
    def test_requests_are_served_in_order(self):
        cache = with_free_blocks(opened(4, 4, 4), 2)
        first, second = range(6, 8)  # the remaining blocks of the ring
        cache, step = append(cache, [2, 0, 1])
        assert names(step.status) == ["OK", "OK", "OUT_OF_BLOCKS"]
        assert table(cache, 2)[-1] == first and table(cache, 0)[-1] == second

    def test_a_request_that_does_not_fit_blocks_later_ones(self):
        cache = with_free_blocks(small_cache(), 3)
        answer = allocate(cache, [13, 1, 4])
        assert_refused(cache, answer, *["OUT_OF_BLOCKS"] * 3)
        assert free_count(answer[0]) == 3
        # A fitting request takes the remaining blocks.
        cache, result = allocate(cache, 12)
        assert names(result.status) == ["OK"] and free_count(cache) == 0

    def test_a_request_that_needs_no_blocks_is_served(self):
        cache, result = allocate(with_free_blocks(opened(1), 3), [13, 0, 4])
        assert names(result.status) == ["OUT_OF_BLOCKS", "OK", "OUT_OF_BLOCKS"]
        cache, step = append(with_free_blocks(opened(4, 3), 0), [0, 1])
        assert names(step.status) == ["OUT_OF_BLOCKS", "OK"]

    def test_other_refusals_do_not_block_later_requests(self):
        cache, result = allocate(with_free_blocks(small_cache(), 3), [MAX, MIN, 12])
        assert names(result.status) == ["CONTEXT_FULL", "INVALID_ARGUMENT", "OK"]
        cache, batch = jkv.append(
            with_free_blocks(opened(4, 4), 1), i32(0, 9, 1), i32(11, 9, 1), capacity=21
        )
        assert names(batch.status) == ["CONTEXT_FULL", "INVALID_SEQUENCE", "OK"]

    def test_a_call_is_judged_by_the_blocks_free_before_it(self):
        # Sequence 1 shares block 0 and needs a copy; sequence 2 releases four blocks.
        cache, _ = fork(opened(4), 0)
        cache, _ = allocate(cache, 14)
        cache = with_free_blocks(cache, 0)
        cache, status = truncate(cache, [2, 1], [0, 3])
        assert names(status) == ["OK", "OUT_OF_BLOCKS"]
        assert free_count(cache) == 4
        assert stored_tokens(cache, 1) == [0, 1, 2, 3]
        cache, status = truncate(cache, 1, 3)
        assert names(status) == ["OK"]
        assert stored_tokens(cache, 1) == [0, 1, 2]
        assert stored_tokens(cache, 0) == [0, 1, 2, 3]
        jkv.check(cache)

    def test_a_request_refused_for_blocks_takes_no_row(self):
        cache = with_free_rows(with_free_blocks(small_cache(), 3), 1)
        cache, result = allocate(cache, [13, 0, 1])
        assert names(result.status) == ["OUT_OF_BLOCKS", "OK", "OUT_OF_SEQUENCES"]
        assert result.seq_ids.tolist() == [-1, 3, -1]

    def test_huge_requests_do_not_overflow(self):
        cache, result = allocate(small_cache(), [MAX, MAX, 4])
        assert names(result.status) == ["CONTEXT_FULL", "CONTEXT_FULL", "OK"]
        # Padding and refused requests own the rows that they request.
        for seq_ids, counts in (([-1, -1, 0], [MAX, MAX, 4]), ([9, 9, 0], [MAX, 2, 1])):
            _, batch = jkv.append(cache, i32(*seq_ids), i32(*counts))
            assert names(batch.status)[2] == "BATCH_FULL"
            assert (np.asarray(batch.query_starts)[1:] >= 3).all()
        _, batch = jkv.append(cache, i32(-1, -1, 0), i32(MAX, MAX, 4))
        assert names(batch.status) == ["OK", "OK", "BATCH_FULL"]


def operations_on(size, jaxpr):
    """Return names of primitives on arrays with a dimension `size`."""
    found = set()
    for equation in jaxpr.eqns:
        inner = [
            getattr(value, "jaxpr", value)
            for value in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda value: hasattr(value, "eqns"),
            )
            if hasattr(value, "eqns")
        ]
        if inner:
            for sub in inner:
                found |= operations_on(size, sub)
            continue
        shapes = [
            variable.aval.shape
            for variable in [*equation.invars, *equation.outvars]
            if hasattr(variable.aval, "shape")
        ]
        if any(size in shape for shape in shapes):
            found.add(equation.primitive.name)
    return found


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache: jkv.allocate(cache, i32(5, 3, 0)),
        lambda cache: jkv.append(cache, i32(0, 1, 2), 1),
        lambda cache: jkv.fork(cache, i32(0, 1, 2)),
        lambda cache: jkv.free(cache, i32(0, 1, 2)),
        lambda cache: jkv.truncate(cache, i32(0, 1, 2), 1),
    ],
    ids=["allocate", "append", "fork", "free", "truncate"],
)
def test_touching_single_ids_is_independent_of_the_pool_size(verb):
    size = 4099  # no other dimension has this size
    cache = jax.eval_shape(
        lambda: jkv.init(small_config(num_blocks=size), storage=False)
    )
    touching = operations_on(size, jax.make_jaxpr(verb)(cache).jaxpr)
    assert touching, "the pool must appear somewhere"
    in_place = {"gather", "scatter", "scatter-add", "scatter_add"}
    assert touching <= in_place | {"dynamic_slice", "dynamic_update_slice"}
