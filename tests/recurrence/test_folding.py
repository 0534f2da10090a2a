"""States folded over ragged rows equal a plain loop over each request's tokens.

Padding rows and states without rows are full of NaN, which must not spread.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import few

from jkv.recurrence import (
    Pending,
    Rows,
    fold_alike,
    fold_rows,
    read_ahead,
    replay,
)

B, R, C = 6, 48, 16


def rule(state, given):
    """A decaying sum, and a count of tokens; both are outputs."""
    total = state["total"] * given["decay"] + given["x"][:, None] * given["x"][None, :]
    count = state["count"] + 1
    output = {"read": total @ given["query"], "count": count}
    return {"total": total, "count": count}, output


def chunk_rule(state, inputs, count):
    """The rule for chunks; inputs past the count would change the result."""

    def step(state, given):
        state, output = rule(state, given)
        return state, (state, output)

    past = jnp.arange(C) >= count
    states, outputs = jax.lax.scan(step, state, inputs)[1]
    state = jax.tree.map(lambda each: each[count - 1], states)
    # Inputs past the count must be zeros; outputs may be anything.
    is_clean = jnp.all(jnp.where(past[:, None], inputs["x"] == 0, True))
    state["total"] = jnp.where(is_clean, state["total"], jnp.nan)
    outputs["read"] = jnp.where(past[:, None], jnp.nan, outputs["read"])
    return state, outputs


@functools.lru_cache
def compiled(has_chunks, has_positions, alike=False):
    def fold(state, inputs, starts, counts, positions):
        rows = Rows(starts, counts, positions if has_positions else None)
        if alike:
            return fold_alike(rule, state, inputs, rows)
        return fold_rows(
            rule,
            state,
            inputs,
            rows,
            chunk_rule=chunk_rule if has_chunks else None,
            chunk_size=C,
        )

    return jax.jit(fold)


def make(counts, seed=0):
    """Return states, inputs and starts; unused rows are NaN."""
    generator = np.random.default_rng(seed)
    gaps = generator.multinomial(R - sum(counts), np.ones(B + 1) / (B + 1))
    starts = np.cumsum(gaps[:-1]) + np.cumsum([0, *counts[:-1]])
    owned = np.zeros(R, bool)
    for start, count in zip(starts, counts, strict=True):
        owned[start : start + count] = True

    def draw(*shape):
        return generator.normal(size=shape).astype(np.float32)

    inputs = dict(decay=draw(R) * 0.5, x=draw(R, 3), query=draw(R, 3))
    state = dict(total=draw(B, 3, 3), count=np.arange(B, dtype=np.int32))
    for array in inputs.values():
        array[~owned] = np.nan
    state["total"][np.asarray(counts) == 0] = np.nan
    # A request without rows may start anywhere.
    starts = np.where(np.asarray(counts) == 0, R + 3, starts).astype(np.int32)
    return state, inputs, starts, np.asarray(counts, np.int32)


def fold_plainly(state, inputs, starts, counts):
    """Return outputs and states of a plain loop, in float64."""
    total = state["total"].astype(np.float64)
    outputs = dict(read=np.zeros((R, 3)), count=np.zeros(R, np.int32))
    count = state["count"].copy()
    for b, (start, number) in enumerate(zip(starts, counts, strict=True)):
        for row in range(start, start + number):
            x = inputs["x"][row].astype(np.float64)
            total[b] = total[b] * inputs["decay"][row] + np.outer(x, x)
            count[b] += 1
            outputs["read"][row] = total[b] @ inputs["query"][row]
            outputs["count"][row] = count[b]
    return outputs, dict(total=total, count=count)


def assert_alike(got, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-4, atol=2e-4)


# Single tokens; a prompt beside them; more prompts than lanes; all at once; few rows;
# the chunk size, plus and minus one; nothing.
COUNTS = [
    (1, 1, 1, 1, 1, 1),
    (1, 0, 41, 1, 1, 0),
    (7, 8, 9, 3, 9, 12),
    (48, 0, 0, 0, 0, 0),
    (2, 1, 2, 0, 1, 2),
    (16, 0, 15, 0, 17, 0),
    (0, 0, 0, 0, 0, 0),
]


@pytest.mark.parametrize("has_chunks", few([True, False], True))
@pytest.mark.parametrize("counts", few(COUNTS, COUNTS[2]))
def test_rows_of_every_length(counts, has_chunks):
    call = make(counts)
    positions = np.array([0, 5, 15, 16, 17, 100], np.int32)
    for has_positions in (False, True) if has_chunks else (False,):
        outputs, state = compiled(has_chunks, has_positions)(*call, positions)
        expected = fold_plainly(*call)
        assert_alike(outputs, expected[0])
        assert_alike(state, expected[1])


@pytest.mark.one_end
def test_random_rows():
    generator = np.random.default_rng(5)
    for seed in range(40):
        counts = generator.multinomial(
            generator.integers(R), generator.dirichlet([0.4] * B)
        )
        call = make(counts.tolist(), seed)
        positions = generator.integers(0, 99, B).astype(np.int32)
        outputs, state = compiled(True, True)(*call, positions)
        expected = fold_plainly(*call)
        assert_alike(outputs, expected[0])
        assert_alike(state, expected[1])


@pytest.mark.one_end
def test_folding_is_batch_invariant():
    alone = make((0, 0, 20, 0, 0, 0))
    among = make((9, 1, 20, 1, 17, 0))
    rows = slice(among[2][2], among[2][2] + 20)
    for name, array in alone[1].items():
        array[alone[2][2] : alone[2][2] + 20] = among[1][name][rows]
    alone[0]["total"][2] = among[0]["total"][2]
    positions = np.full(B, 3, np.int32)
    first = compiled(True, True)(*alone, positions)
    second = compiled(True, True)(*among, positions)
    mine = slice(alone[2][2], alone[2][2] + 20)
    np.testing.assert_array_equal(first[0]["read"][mine], second[0]["read"][rows])
    np.testing.assert_array_equal(first[1]["total"][2], second[1]["total"][2])


@pytest.mark.one_end
def test_chunking_does_not_change_equal_rows():
    fold = compiled(True, False, True)
    positions = np.zeros(B, np.int32)
    for counts in COUNTS:
        state, inputs, starts, counts = make(counts)
        outputs, whole = fold(state, inputs, starts, counts, positions)
        expected = fold_plainly(state, inputs, starts, counts)
        assert_alike(outputs, expected[0])
        assert_alike(whole, expected[1])
        first = counts // 3
        begun, state = fold(state, inputs, starts, first, positions)
        rest = state, inputs, starts + first, counts - first, positions
        ended, state = fold(*rest)
        for name, array in whole.items():
            np.testing.assert_array_equal(state[name], array)
        for name, array in outputs.items():
            np.testing.assert_array_equal(begun[name] + ended[name], array)


@pytest.mark.one_end
def test_chunks_end_at_multiples():
    seen = []

    def noting(state, inputs, count):
        jax.debug.callback(lambda c: seen.append(int(c)), count)
        return chunk_rule(state, inputs, count)

    state, inputs, starts, counts = make((40, 0, 0, 0, 0, 0))

    @jax.jit
    def fold(positions):
        rows = Rows(starts, counts, positions)
        return fold_rows(rule, state, inputs, rows, chunk_rule=noting, chunk_size=C)

    for position, sizes in ((0, [16, 16, 8]), (13, [3, 16, 16, 5]), (24, [8, 16, 16])):
        fold(np.full(B, position, np.int32))
        jax.effects_barrier()
        assert [size for size in seen if size] == sizes
        seen.clear()


def test_pending_tokens_are_replayed_and_draft_tokens_are_dropped():
    """Three replayed tokens, three rows and two draft tokens form one sequence."""
    state, inputs, starts, counts = make((8, 5, 0, 1, 1, 0))
    before = np.array([3, 3, 0, 0, 0, 0], np.int32)
    after = np.array([2, 2, 0, 1, 0, 0], np.int32)
    stays = np.array([0, 1, 0, 0, 0, 0], np.int32)
    pending = {
        name: np.full((B, 4, *inputs[name].shape[1:]), np.nan, np.float32)
        for name in ("x", "decay")
    }
    for b, count in enumerate(before):
        for name, array in pending.items():
            array[b, :count] = inputs[name][starts[b] : starts[b] + count]

    @jax.jit
    def fold(state, pending, inputs, starts, counts):
        lacking = {"query": inputs["query"]}
        # One of the three pending tokens stays pending.
        settled = Pending(pending, jnp.zeros_like(starts), before - stays)
        state = replay(rule, state, settled, lacking)
        starts, counts = starts + before, counts - before
        outputs, kept = fold_rows(rule, state, inputs, Rows(starts, counts - after))
        last = Rows(starts + counts - after, after)
        stay = Pending(pending, before - stays, stays)
        return read_ahead(rule, kept, outputs, stay, inputs, last), kept

    outputs, kept = fold(state, pending, inputs, starts, counts)
    expected = fold_plainly(state, inputs, starts, counts)[0]
    for array in expected.values():
        array[starts[0] : starts[0] + 3] = array[starts[1] : starts[1] + 3] = 0
    assert_alike(outputs, expected)
    assert_alike(kept, fold_plainly(state, inputs, starts, counts - after - stays)[1])


@pytest.mark.one_end
def test_a_decode_step_makes_one_pass():
    passes = []

    def noting(state, given):
        jax.debug.callback(lambda _: passes.append(1), given["decay"])
        return rule(state, given)

    state, inputs, *rows = make((1, 1, 0, 1, 1, 1))
    fold_rows(noting, state, inputs, Rows(*rows), chunk_rule=chunk_rule, chunk_size=C)
    jax.effects_barrier()
    assert len(passes) == B
    passes.clear()
    state, inputs, *rows = make((1, 2, 0, 1, 1, 1))
    fold_rows(noting, state, inputs, Rows(*rows), chunk_size=C)
    jax.effects_barrier()
    assert len(passes) == 2 * B


@pytest.mark.one_end
def test_states_keep_their_dtype():
    state, inputs, starts, counts = make((1, 20, 0, 2, 1, 1))
    state["total"] = jnp.asarray(state["total"], jnp.bfloat16)

    def wide(state, given):
        return rule(state | {"total": state["total"].astype(jnp.float32)}, given)

    outputs, new = fold_rows(wide, state, inputs, Rows(starts, counts), chunk_size=C)
    assert new["total"].dtype == jnp.bfloat16
    assert outputs["read"].dtype == jnp.float32


@pytest.mark.one_end
def test_no_rows_and_wrong_sizes():
    state, inputs, starts, counts = make((1, 1, 1, 1, 1, 1))
    empty = {name: array[:0] for name, array in inputs.items()}
    outputs, same = fold_rows(rule, state, empty, Rows(starts, counts * 0))
    assert outputs["read"].shape == (0, 3)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        fold_rows(rule, state, inputs, Rows(starts, counts), chunk_size=0)


@pytest.mark.newest_further
def test_states_of_requests_without_rows_may_be_dropped():
    """The others are bit-identical, with one pass less."""
    rng = np.random.default_rng(5)
    shape, rows = (11, 5, 7), 40
    state = {"s": rng.standard_normal(shape).astype(np.float32)}
    inputs = {"x": rng.standard_normal((rows, 5)).astype(np.float32)}
    counts = np.int32([1, 0, 1, 9, 1, 0, 2, 1, 12, 0, 1])
    starts = np.int32(np.cumsum(counts) - counts)

    def rule(state, given):
        total = 0.5 * state["s"] + given["x"][:, None]
        return {"s": total}, given["x"] @ total

    def pieces(state, given, count):
        def step(t, carry):
            state, outputs = carry
            new, output = rule(state, {"x": given["x"][t]})
            return new, outputs.at[t].set(output)

        outputs = jnp.zeros((4, 7), jnp.float32)
        return jax.lax.fori_loop(0, count, step, (state, outputs))

    def fold(counts, keeps_idle):
        return fold_rows(
            rule,
            state,
            inputs,
            Rows(starts, counts),
            chunk_rule=pieces,
            chunk_size=4,
            keeps_idle=keeps_idle,
        )

    jitted = jax.jit(fold, static_argnums=1)
    for given in (counts, np.minimum(counts, 1)):
        (outputs, kept), (others, new) = (
            jitted(given, keeps) for keeps in (True, False)
        )
        np.testing.assert_array_equal(outputs, others)
        has_rows = given > 0
        np.testing.assert_array_equal(kept["s"][has_rows], new["s"][has_rows])
        np.testing.assert_array_equal(kept["s"][~has_rows], state["s"][~has_rows])

    def count_passes(keeps_idle):
        compiled = jitted.lower(counts, keeps_idle).compile(ALL_PASSES)
        entry = compiled.as_text().partition("ENTRY")[2]
        return len(re.findall(r"= f32\[11,5,7\]\S* (?:fusion|select)\(", entry))

    assert count_passes(True) == count_passes(False) + 1
