"""Masks within a step, compared with dense float64 attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.dense_masks import (
    Request,
    as_mask,
    attend_densely,
    random_request,
)
from support.jax_versions import few, further, with_further

import jkv
from jkv import Status

NUM_REQUESTS, CAPACITY, HEADS = 5, 48, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "all": {"window": 9, "soft_cap": 5.0, "sinks": jnp.array([0.5, -1.0, 2.0, 0.0])},
}


def make_cache(dtype: str = "float32", **more: Any) -> jkv.Cache:
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        num_blocks=96,
        block_size=4,
        max_sequences=8,
        max_context_length=96,
        dtype=dtype,
        **more,
    )
    return jkv.init(config)


@functools.partial(jax.jit, static_argnames=("capacity", "max_span"))
def grow(cache, seq_ids, counts, rows, mask, *, capacity, max_span=None):
    """Append rows under a mask and write both layers."""
    cache, batch = jkv.append(
        cache, seq_ids, counts, capacity=capacity, mask=mask, max_span=max_span
    )
    for layer in range(2):
        cache = jkv.write(cache, layer, batch, rows[1] + layer, rows[2])
    return cache, batch


@functools.partial(jax.jit, static_argnames=("implementation", "soft_cap", "causal"))
def look(cache, batch, queries, window=None, sinks=None, **static):
    return jkv.attend(
        cache, 1, batch, queries, window=window, sinks=sinks, return_lse=True, **static
    )


def random_rows(rng, num_rows: int = CAPACITY) -> tuple[jax.Array, ...]:
    shapes = ((num_rows, heads, 16) for heads in (HEADS, 2, 2))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def prefill(rng, cache: jkv.Cache, lengths: list[int]) -> tuple[jkv.Cache, jax.Array]:
    """Open sequences with these context lengths; the last is a fork of the first."""
    cache, opened = jkv.allocate(cache, [0] * (NUM_REQUESTS - 1))
    ids = jnp.append(opened.seq_ids, -1)
    for _ in range(2):
        counts = jnp.array([length // 2 for length in lengths[:-1]] + [0])
        rows = random_rows(rng, 96)
        cache, _ = grow(cache, ids, counts, rows, jkv.CausalMask(), capacity=96)
    cache, forked = jkv.fork(cache, opened.seq_ids[:1])
    return cache, jnp.append(opened.seq_ids, forked.seq_ids)


def check_against_dense(cache, batch, queries, requests, found, **options: Any) -> None:
    """Compare the rows of every served request with dense attention."""
    output, lse = (np.asarray(x) for x in found)
    start = 0
    for request, seq_id, status in zip(
        requests, batch.seq_ids.tolist(), batch.status.tolist(), strict=True
    ):
        rows = slice(start, start + request.num_rows)
        start += request.num_rows
        if status != Status.OK or request.num_rows == 0:
            assert not output[rows].any()
            continue
        keys, values, length = jkv.read(cache, 1, seq_id)
        expected = attend_densely(
            np.asarray(queries[rows]),
            np.asarray(keys.astype(jnp.float32))[: int(length)],
            np.asarray(values.astype(jnp.float32))[: int(length)],
            request,
            **options,
        )
        np.testing.assert_allclose(output[rows], expected[0], rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(lse[rows], expected[1], rtol=3e-5, atol=3e-5)
    assert not output[start:].any()


# Each mix is one program: the mask kinds of its requests.
MIXES = {
    "spans": ("span", "causal", "span", "causal", "span"),
    "all": ("span", "tree", "start", "canvas", "causal"),
    "canvases": ("canvas",) * 5,
    "trees": ("tree",) * 5,
}


@pytest.mark.newest_further
@pytest.mark.parametrize("option", few(with_further(OPTIONS, "window", "all"), "plain"))
@pytest.mark.parametrize("mix", few(with_further(MIXES, "spans", "canvases"), "all"))
def test_masks_agree_with_dense_attention(mix, option):
    options = OPTIONS[option]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        dtype = ("float32", "int8", "float32")[seed] if mix == "all" else "float32"
        past = [[14, 22, 0, 30, 0], [1, 9, 40, 12, 0], [0, 0, 0, 0, 0]][seed]
        cache, ids = prefill(rng, make_cache(dtype), past)
        counts = rng.integers(1, 10, NUM_REQUESTS)
        counts[seed] = 1
        pairs = zip(MIXES[mix], counts, strict=True)
        requests = [random_request(rng, kind, int(n)) for kind, n in pairs]
        rows = random_rows(rng)
        mask = as_mask(requests, CAPACITY)
        given = cache, ids, jnp.asarray(counts), rows, mask
        cache, batch = grow(*given, capacity=CAPACITY)
        assert not batch.status.any()
        found = look(cache, batch, rows[0], **options)
        check_against_dense(cache, batch, rows[0], requests, found, **options)
        causal = [Request(request.num_rows) for request in requests]
        if mix != "trees" and mix != "all":
            found = look(cache, batch, rows[0], causal=True, **options)
            check_against_dense(cache, batch, rows[0], causal, found, **options)


def mixed_step(seed: int, mix: str, cache: jkv.Cache, **flags: bool) -> tuple[Any, ...]:
    """Return a written step of random requests after random contexts."""
    rng = np.random.default_rng(seed)
    cache, ids = prefill(rng, cache, [14, 22, 0, 30, 0])
    counts = rng.integers(1, 10, NUM_REQUESTS)
    pairs = zip(MIXES[mix], counts, strict=True)
    requests = [random_request(rng, kind, int(n)) for kind, n in pairs]
    rows = random_rows(rng)
    mask = as_mask(requests, CAPACITY, **flags)
    cache, batch = grow(cache, ids, jnp.asarray(counts), rows, mask, capacity=CAPACITY)
    return cache, batch, rows[0], requests


@pytest.mark.newest_further
@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
@pytest.mark.parametrize("mix", few(["all", *further(["spans", "canvases"])], "all"))
def test_every_backend_serves_masks(mix, implementation):
    cache, batch, queries, requests = mixed_step(7, mix, make_cache())
    for options in ({}, OPTIONS["all"]):
        found = look(cache, batch, queries, implementation=implementation, **options)
        check_against_dense(cache, batch, queries, requests, found, **options)


@pytest.mark.one_end
@pytest.mark.parametrize("dtype", ["int4", *further(["bfloat16", "float8_e4m3fn"])])
def test_rows_are_read_back_from_their_slots(dtype):
    """A step reads the rounded keys and values that later steps read."""
    cache, batch, queries, requests = mixed_step(3, "all", make_cache(dtype))
    found = look(cache, batch, queries)
    check_against_dense(cache, batch, queries, requests, found)


@pytest.mark.newest_further
def test_latent_caches_serve_masks():
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=24,
        value_head_dim=16,
        values_in_keys=True,
        num_blocks=16,
        block_size=4,
        max_sequences=2,
        max_context_length=32,
    )
    rng = np.random.default_rng(0)
    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    requests = [random_request(rng, "span", 6), random_request(rng, "tree", 5)]
    for mask in (jkv.CausalMask(), as_mask(requests, 12)):
        cache, batch = jkv.append(cache, opened.seq_ids, [6, 5], capacity=12, mask=mask)
        keys = jnp.asarray(rng.normal(size=(12, 1, 24)), jnp.float32)
        cache = jkv.write(cache, 0, batch, keys)
    queries = jnp.asarray(rng.normal(size=(12, 4, 24)), jnp.float32)
    output = np.asarray(jkv.attend(cache, 0, batch, queries))
    start = 0
    for request, seq_id in zip(requests, (0, 1), strict=True):
        keys, values, length = jkv.read(cache, 0, seq_id)
        rows = slice(start, start + request.num_rows)
        start += request.num_rows
        given = np.asarray(keys)[: int(length)], np.asarray(values)[: int(length)]
        expected = attend_densely(np.asarray(queries[rows]), *given, request)[0]
        np.testing.assert_allclose(output[rows], expected, rtol=3e-5, atol=3e-5)


@pytest.mark.one_end
@pytest.mark.parametrize("mix", ["spans", "all"])
def test_batch_invariant_rows_are_bit_identical(mix):
    """With `by_position`, a row's bits do not depend on its place in the batch."""
    rng = np.random.default_rng(5)
    cache, ids = prefill(rng, make_cache(), [14, 22, 0, 30, 0])
    counts = [7, 5, 9, 4, 6]
    pairs = zip(MIXES[mix], counts, strict=True)
    requests = [random_request(rng, kind, n) for kind, n in pairs]
    rows = [random_rows(rng, n) for n in counts]
    found = {}
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        chosen = [requests[i] for i in order]
        pad = random_rows(np.random.default_rng(9), CAPACITY - sum(counts))
        arrays = tuple(
            jnp.concatenate([*(rows[i][k] for i in order), pad[k]]) for k in range(3)
        )
        mask = as_mask(chosen, CAPACITY)
        given = ids[jnp.array(order)], jnp.array([counts[i] for i in order])
        after, batch = grow(cache, *given, arrays, mask, capacity=CAPACITY)
        batch = dataclasses.replace(batch, by_position=True, plan=None)
        output = np.asarray(look(after, batch, arrays[0], window=9)[0])
        start = 0
        for i in order:
            part = output[start : start + counts[i]]
            start += counts[i]
            np.testing.assert_array_equal(part, found.setdefault(i, part))


@pytest.mark.further
@pytest.mark.newest_further
@pytest.mark.parametrize("mix", few(["spans", "all"], "all"))
def test_gradients_agree_with_dense_attention(mix):
    """Queries, keys, values, scale and sinks, through output and log-sum-exp."""
    cache, batch, queries, requests = mixed_step(2, mix, make_cache())
    _, keys, values = random_rows(np.random.default_rng(4))
    weights = np.random.default_rng(1).normal(size=queries.shape).astype(np.float32)
    weights = jnp.where(batch.valid[:, None, None], weights, 0.0)
    ids, past = (
        batch.seq_ids.tolist(),
        [
            int(n) - request.num_rows
            for n, request in zip(batch.context_lengths, requests, strict=True)
        ],
    )
    before = [jkv.read(cache, 1, seq_id)[:2] for seq_id in ids]

    @jax.jit
    def ours(given):
        queries, keys, values, scale, sinks = given
        output, lse = jkv.attend(
            jkv.write(cache, 1, batch, keys, values),
            1,
            batch,
            queries,
            scale=scale,
            sinks=sinks,
            window=9,
            soft_cap=4.0,
            return_lse=True,
        )
        seen = jnp.where(batch.valid[:, None], lse, 0.0)
        return (output * weights).sum() + seen.sum()

    def dense(given):
        queries, keys, values, scale, sinks = given
        total, start = 0.0, 0
        for request, length, old in zip(requests, past, before, strict=True):
            rows = slice(start, start + request.num_rows)
            start += request.num_rows
            whole = (
                jnp.concatenate([each[:length], new[rows]])
                for each, new in zip(old, (keys, values), strict=True)
            )
            output, lse = attend_densely(
                queries[rows],
                *whole,
                request,
                window=9,
                soft_cap=4.0,
                sinks=sinks,
                scale=scale,
                xp=jnp,
            )
            total += (output * weights[rows]).sum() + lse.sum()
        return total

    given = queries, keys, values, jnp.float32(0.3), jnp.array([0.5, 0.0, -1.0, 1.0])
    np.testing.assert_allclose(ours(given), dense(given), rtol=1e-4)
    found, expected = jax.grad(ours)(given), jax.grad(dense)(given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-4)


@pytest.mark.one_end
def test_nan_spreads_only_to_rows_that_attend_to_it():
    cache, ids = prefill(np.random.default_rng(0), make_cache(), [8, 4, 0, 0, 0])
    ends = jnp.array([2, 2, 2, -1, -1, 0, 2, 2] + [-1] * 40)
    mask = jkv.MixedMask(
        jnp.array([0, 1, 0, 0, 0]),
        (
            jkv.SpanMask(ends),
            jkv.TreeMask(jnp.array([-1] * 5 + [-1, 0, 0] + [-1] * 40)),
        ),
    )
    rows = random_rows(np.random.default_rng(1))
    for name, spoiled in {"keys": 1, "values": 2}.items():
        for row, reached in {2: [0, 1, 2, 3, 4], 4: [4], 6: [6]}.items():
            given = list(rows)
            given[spoiled] = given[spoiled].at[row, 0, 3].set(jnp.nan)
            counts = jnp.array([5, 3, 0, 0, 0])
            after, batch = grow(cache, ids, counts, given, mask, capacity=CAPACITY)
            output = look(after, batch, rows[0])[0]
            is_nan = jnp.isnan(output).any(axis=(1, 2))
            assert jnp.flatnonzero(is_nan).tolist() == reached, name


INVALID = {
    "end past the last row": jkv.SpanMask([0, 3, -1, -1]),
    "start after its row": jkv.SpanMask([-1, -1, -1, -1], [0, 2, 0, 0]),
    "span longer than max_span": jkv.SpanMask([2, -1, -1, -1]),
    "parent not before its child": jkv.TreeMask([-1, 1, -1, -1]),
    "parent below -1": jkv.TreeMask([-2, 0, -1, -1]),
    "more rows than max_span": jkv.TreeMask([-1, 0, 1, -1]),
    "unknown mask": jkv.MixedMask([1, 0], (jkv.CausalMask(),)),
}


@pytest.mark.one_end
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_mask_refuses_only_its_request(name):
    cache, opened = jkv.allocate(make_cache(), [0, 0])
    before = jkv.num_free_blocks(cache)
    max_span = 2 if "max_span" in name else None
    cache, batch = jkv.append(
        cache,
        opened.seq_ids,
        [3, 1],
        capacity=4,
        mask=INVALID[name],
        max_span=max_span,
    )
    assert batch.status.tolist() == [Status.INVALID_ARGUMENT, Status.OK]
    assert jkv.context_lengths(cache)[:2].tolist() == [0, 1]
    assert before - jkv.num_free_blocks(cache) == 1
    # The same for a step that was appended before.
    cache, batch = jkv.append(cache, opened.seq_ids, [3, 1], capacity=4)
    seen = jkv.with_mask(batch, INVALID[name], max_span=max_span)
    assert seen.status.tolist() == [Status.INVALID_ARGUMENT, Status.OK]
    assert seen.query_lengths.tolist() == [0, 1]
    assert seen.valid.tolist() == [False] * 3 + [True]


WRONG = {
    "mask must be a jkv.CausalMask": "spans",
    r"mask.ends must be \[R\] with R = 4": jkv.SpanMask([0, 1]),
    "mask.ends must be an int or a one-dim": jkv.SpanMask([0.5] * 4),
    "mask.one_window must be True or False": jkv.SpanMask([-1] * 4, one_window=1),
    r"mask.which must be \[B\] with B = 2": jkv.MixedMask([0], (jkv.CausalMask(),)),
    "mask.masks must be a tuple": jkv.MixedMask([0, 0], ()),
}


@pytest.mark.one_end
@pytest.mark.parametrize("message", WRONG)
def test_masks_of_other_kinds_are_refused_by_name(message):
    cache, opened = jkv.allocate(make_cache(), [0, 0])
    with pytest.raises(ValueError, match=message):
        jkv.append(cache, opened.seq_ids, [3, 1], capacity=4, mask=WRONG[message])
    _, batch = jkv.append(cache, opened.seq_ids, [3, 1], capacity=4)
    with pytest.raises(ValueError, match=message):
        jkv.with_mask(batch, WRONG[message])


@pytest.mark.one_end
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
def test_attend_refuses_sinks_of_another_shape_beside_a_tree(shape):
    """The join with the step's own rows adds the sinks, and could broadcast them."""
    cache, opened = jkv.allocate(make_cache(), [0])
    cache, batch = jkv.append(
        cache, opened.seq_ids, 2, capacity=2, mask=jkv.TreeMask([-1, 0])
    )
    queries = jnp.ones((2, 4, cache.storage[0].head_dim))
    with pytest.raises(ValueError, match=r"sinks must be \[H\] with H = 4"):
        jkv.attend(cache, 0, batch, queries, sinks=jnp.ones(shape))


@pytest.mark.one_end
def test_attend_refuses_causal_trees():
    cache, opened = jkv.allocate(make_cache(), [0])
    tree = jkv.TreeMask([-1, 0, 0])
    cache, batch = jkv.append(cache, opened.seq_ids, 3, capacity=3, mask=tree)
    queries = jnp.zeros((3, HEADS, 16))
    with pytest.raises(ValueError, match="causal must be False with a tree"):
        jkv.attend(cache, 0, batch, queries, causal=True)
    peeked = jkv.peek(cache, opened.seq_ids)
    with pytest.raises(ValueError, match="causal must be False with a batch of"):
        jkv.attend(cache, 0, peeked, queries[:1], causal=True)


@pytest.mark.one_end
def test_padded_rows_take_masks():
    """Request i owns rows from i * Q on, and each mask entry applies to its row."""
    rng = np.random.default_rng(8)
    cache, ids = prefill(rng, make_cache(), [14, 22, 0, 30, 0])
    requests = [random_request(rng, "span", n) for n in (6, 3, 8, 1, 5)]
    ends = np.full((5, 8), -1, np.int32)
    for request, row in zip(requests, ends, strict=True):
        row[: request.num_rows] = request.ends
    counts = [request.num_rows for request in requests]
    mask = jkv.SpanMask(jnp.asarray(ends.reshape(-1)))
    cache, batch = jkv.append(cache, ids, counts, max_query_length=8, mask=mask)
    assert not batch.status.any()
    rows = random_rows(rng, 40)
    for layer in range(2):
        cache = jkv.write(cache, layer, batch, rows[1], rows[2])
    output, lse = look(cache, batch, rows[0])
    for i, (request, n) in enumerate(zip(requests, counts, strict=True)):
        keys, values, length = jkv.read(cache, 1, int(ids[i]))
        own = slice(8 * i, 8 * i + n)
        given = np.asarray(keys)[: int(length)], np.asarray(values)[: int(length)]
        expected = attend_densely(np.asarray(rows[0][own]), *given, request)
        np.testing.assert_allclose(output[own], expected[0], rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(lse[own], expected[1], rtol=3e-5, atol=3e-5)
        assert not np.asarray(output[8 * i + n : 8 * i + 8]).any()


def test_masks_of_equal_shape_share_a_program():
    cache, ids = prefill(np.random.default_rng(0), make_cache(), [8, 4, 0, 0, 0])
    traces = []

    @jax.jit
    def step(cache, ends, starts, which):
        traces.append(1)
        masks = jkv.SpanMask(ends), jkv.SpanMask(ends, starts), jkv.TreeMask(starts)
        mask = jkv.MixedMask(which, masks)
        return jkv.append(cache, ids, 2, capacity=CAPACITY, mask=mask)[1].status

    rows = jnp.full((CAPACITY,), -1, jnp.int32)
    assert not step(cache, rows, rows, jnp.zeros((5,), jnp.int32)).any()
    assert not step(cache, rows.at[0].set(1), rows, jnp.array([0, 1, 2, 0, 1])).any()
    assert len(traces) == 1


@pytest.mark.one_end
def test_a_step_may_be_written_again():
    """A canvas is rewritten under two masks; the last write counts."""
    rng = np.random.default_rng(11)
    cache, batch, queries, requests = mixed_step(6, "canvases", make_cache())
    final = jkv.with_mask(batch, jkv.CausalMask())
    assert final.mask is None and final.positions.tolist() == batch.positions.tolist()
    _, keys, values = random_rows(rng)
    cache = jkv.write(cache, 1, final, keys, values)
    causal = [Request(request.num_rows) for request in requests]
    found = look(cache, final, queries)
    check_against_dense(cache, final, queries, causal, found)
    spans = [random_request(rng, "span", request.num_rows) for request in requests]
    again = jkv.with_mask(final, as_mask(spans, CAPACITY))
    found = look(cache, again, queries)
    check_against_dense(cache, again, queries, spans, found)


def peek_and_compare(cache, ids, num_rows, window=None, **options: Any) -> None:
    """Peeked rows attend to the whole context, or the window of the next token."""
    batch = jkv.peek(cache, ids, num_rows)
    queries = random_rows(np.random.default_rng(2), batch.num_rows)[0]
    output, lse = look(cache, batch, queries, window=window, **options)
    lengths = jkv.context_lengths(cache)
    for i, seq_id in enumerate(ids.tolist()):
        rows = slice(i * num_rows, (i + 1) * num_rows)
        length = int(lengths[seq_id]) if seq_id >= 0 else 0
        visible = min(length, length if window is None else window - 1)
        if not visible:
            assert not np.asarray(output[rows]).any()
            assert np.isneginf(lse[rows]).all()
            continue
        keys, values, _ = jkv.read(cache, 1, seq_id)
        seen = slice(length - visible, length)
        given = (np.asarray(x)[seen] for x in (keys, values))
        expected = attend_rows_to_all(np.asarray(queries[rows]), *given)
        np.testing.assert_allclose(output[rows], expected, rtol=3e-5, atol=3e-5)


def attend_rows_to_all(queries, keys, values):
    keys, values = (np.repeat(np.float64(x), 2, axis=1) for x in (keys, values))
    scores = np.einsum("qhd,thd->qht", queries, keys) * queries.shape[2] ** -0.5
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("qht,thd->qhd", weights, values)


@pytest.mark.newest_further
@pytest.mark.parametrize(
    "implementation", few([None, *further(["xla", "pallas"])], None)
)
def test_peeked_rows_read_the_whole_context(implementation):
    cache, ids = prefill(np.random.default_rng(0), make_cache(), [14, 22, 0, 30, 0])
    free, arrays = jkv.num_free_blocks(cache), jax.tree.leaves(cache)
    for num_rows in (1, 3):
        for window in (None, 9):
            given = {"window": window, "implementation": implementation}
            peek_and_compare(cache, ids, num_rows, **given)
    batch = jkv.peek(cache, ids, 3)
    rows = random_rows(np.random.default_rng(3), 15)
    after = jkv.commit(jkv.write(cache, 1, batch, rows[1], rows[2]), batch)
    for one, other in zip(jax.tree.leaves(after), arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    assert jkv.num_free_blocks(after) == free


@pytest.mark.one_end
def test_peek_needs_no_free_blocks():
    """A full sequence and an empty pool can be peeked."""
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        num_blocks=4,
        block_size=4,
        max_sequences=2,
        max_context_length=16,
    )
    cache, opened = jkv.allocate(jkv.init(config), [0])
    rows = random_rows(np.random.default_rng(0), 16)
    given = jnp.array([16]), rows, jkv.CausalMask()
    cache, _ = grow(cache, opened.seq_ids, *given, capacity=16)
    assert not jkv.num_free_blocks(cache)
    peek_and_compare(cache, opened.seq_ids, 3)
    batch = jkv.peek(cache, [0, 1, -1], 2)
    assert batch.status.tolist() == [Status.OK, Status.INVALID_SEQUENCE, Status.OK]
    assert batch.positions.tolist() == [16, 16, 0, 0, 0, 0]


@pytest.mark.one_end
def test_bidirectional_prefixes_are_not_indexed():
    """A prefix-LM prompt that diverges within its prefix is not found."""
    prompt = jnp.arange(16)
    diverged = prompt.at[14].set(77)

    def fill(cache, mask):
        cache, opened = jkv.allocate(cache, [0])
        cache, batch = jkv.append(
            cache, opened.seq_ids, 16, capacity=16, tokens=prompt, mask=mask
        )
        for layer in range(2):
            rows = random_rows(np.random.default_rng(0), 16)
            cache = jkv.write(cache, layer, batch, rows[1], rows[2])
        cache = jkv.commit(cache, batch)
        # Later causal steps do not extend the index.
        cache, batch = jkv.append(
            cache, opened.seq_ids, 4, capacity=4, tokens=jnp.arange(4)
        )
        return jkv.commit(cache, batch)

    ends = jnp.full((16,), 15)
    found = {
        "private": jkv.SpanMask(ends),
        "cacheable": jkv.SpanMask(ends, cacheable=True),
        "causal rows": jkv.SpanMask(jnp.full((16,), -1)),
        "causal": jkv.CausalMask(),
        "tree": jkv.TreeMask(jnp.arange(16) - 1),
    }
    lengths = {}
    for name, mask in found.items():
        cache = fill(make_cache(prefix_caching=True), mask)
        longer = jnp.concatenate([prompt, jnp.arange(5)])[None]
        lengths[name] = int(jkv.match(cache, longer)[0])
        assert int(jkv.match(cache, diverged[None])[0]) == 14 * bool(lengths[name])
    expected = {"private": 0, "cacheable": 20, "causal rows": 20}
    assert lengths == expected | {"causal": 20, "tree": 0}


def grow_tree(cache, ids, parents, rows, **more: Any):
    """Append one tree per id, and write it."""
    num = len(parents)
    mask = jkv.TreeMask(jnp.tile(jnp.array(parents), len(ids)))
    tokens = jnp.tile(jnp.arange(num) + 50, len(ids))
    cache, batch = jkv.append(
        cache, ids, num, capacity=num * len(ids), tokens=tokens, mask=mask, **more
    )
    for layer in range(2):
        cache = jkv.write(cache, layer, batch, rows[1] + layer, rows[2])
    return cache, batch


@pytest.mark.one_end
@pytest.mark.parametrize("dtype", ["float32", *further(["int8"])])
@pytest.mark.parametrize("has_index", [False, True])
def test_keep_rows_equals_decoding_the_path(dtype, has_index):
    parents, path = [-1, 0, 0, 1, 2, 2, 4, 1], [0, 2, 4, 6]
    cache = make_cache(dtype, prefix_caching=has_index, record_tokens=True)
    cache, opened = jkv.allocate(cache, [0, 0])
    start = random_rows(np.random.default_rng(1), 12)
    tokens = jnp.arange(12)
    cache, batch = jkv.append(cache, opened.seq_ids, 6, capacity=12, tokens=tokens)
    for layer in range(2):
        cache = jkv.write(cache, layer, batch, start[1], start[2])
    cache = jkv.commit(cache, batch)
    rows = random_rows(np.random.default_rng(2), 16)
    grown, batch = grow_tree(cache, opened.seq_ids, parents, rows)
    seen = look(grown, batch, rows[0])[0]
    keep = jnp.array([[*path, -1], [-1] * 5])
    kept, step, status = jax.jit(jkv.keep_rows)(grown, batch, keep)
    assert not status.any() and step.query_lengths.tolist() == [4, 0]
    assert step.positions[:4].tolist() == [6, 7, 8, 9] and step.mask is None
    kept = jkv.commit(kept, step)
    # The same path, appended as a chain.
    chain = cache
    path_tokens = jnp.array(path) + 50
    chain, batch = jkv.append(
        chain, opened.seq_ids[:1], 4, capacity=4, tokens=path_tokens
    )
    own = tuple(array[jnp.array(path)] for array in rows)
    for layer in range(2):
        chain = jkv.write(chain, layer, batch, own[1] + layer, own[2])
    output = look(chain, batch, own[0])[0]
    np.testing.assert_allclose(seen[jnp.array(path)], output, rtol=2e-5, atol=2e-5)
    chain = jkv.commit(chain, batch)
    assert jkv.num_free_blocks(kept) == jkv.num_free_blocks(chain)
    for seq_id in range(2):
        assert jkv.tokens(kept, seq_id).tolist() == jkv.tokens(chain, seq_id).tolist()
        for layer in range(2):
            pairs = zip(
                jkv.read(kept, layer, seq_id),
                jkv.read(chain, layer, seq_id),
                strict=True,
            )
            for one, other in pairs:
                np.testing.assert_array_equal(one, other)
    if has_index:
        whole = jnp.concatenate([jnp.arange(6), path_tokens, jnp.array([9])])[None]
        assert int(jkv.match(kept, whole)[0]) == int(jkv.match(chain, whole)[0]) == 8
    jkv.check(kept)


BAD_ROWS = {
    "not ascending": [2, 1],
    "twice": [1, 1],
    "out of range": [1, 3],
    "a gap": [-1, 1],
}


@pytest.mark.one_end
@pytest.mark.parametrize("name", BAD_ROWS)
def test_keep_rows_refuses_other_rows(name):
    cache, opened = jkv.allocate(make_cache(), [0, 0])
    rows = random_rows(np.random.default_rng(0), 6)
    cache, batch = grow_tree(cache, opened.seq_ids, [-1, 0, 0], rows)
    kept, step, status = jkv.keep_rows(
        cache, batch, jnp.array([BAD_ROWS[name], [0, 2]])
    )
    assert status.tolist() == [Status.INVALID_ARGUMENT, Status.OK]
    assert jkv.context_lengths(kept)[:2].tolist() == [3, 2]
    assert step.query_lengths.tolist() == [0, 2]
    for one, other in zip(jkv.read(kept, 1, 0), jkv.read(cache, 1, 0), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.further
@pytest.mark.one_end
def test_keep_rows_refuses_sequences_that_changed():
    ids, keep = jnp.array([0, 1]), jnp.array([[0, *range(2, 10)]] * 2)
    rows = random_rows(np.random.default_rng(0), 20)
    cache, _ = jkv.allocate(make_cache(prefix_caching=True), [0, 0])
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    cache, batch = grow_tree(cache, ids, parents, rows)
    changed = {
        "appended": jkv.append(cache, [0])[0],
        "truncated": jkv.truncate(cache, [0], 5)[0],
        "freed": jkv.free(cache, [0])[0],
        "forked": jkv.fork(cache, [0])[0],
    }
    for name, other in changed.items():
        kept, _, status = jkv.keep_rows(other, batch, keep)
        assert status.tolist() == [Status.INVALID_ARGUMENT, Status.OK], name
        expected = int(jkv.context_lengths(other)[0])
        assert jkv.context_lengths(kept)[:2].tolist() == [expected, 9]
        jkv.check(kept)
    # Causal rows that are already in the index.
    cache, _ = jkv.allocate(make_cache(prefix_caching=True), [0])
    tokens = jnp.arange(10)
    cache, batch = jkv.append(cache, [0], 10, capacity=10, tokens=tokens)
    cache = jkv.commit(cache, batch)
    _, _, status = jkv.keep_rows(cache, batch, keep[:1])
    assert status.tolist() == [Status.INVALID_ARGUMENT]
    cache, step, status = jkv.keep_rows(cache, batch, jnp.array([[0, 1, 2, 3, 4]]))
    assert status.tolist() == [Status.OK] and step.query_lengths.tolist() == [5]
    jkv.check(cache)


@pytest.mark.one_end
def test_debug_mode_allows_rewriting_a_canvas():
    rows = random_rows(np.random.default_rng(0), 3)
    mask = jkv.SpanMask(jnp.array([2, 2, 2]), one_window=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def denoise(cache):
        cache, batch = jkv.append(cache, [0], 3, capacity=3, mask=mask)
        final = jkv.with_mask(batch, jkv.CausalMask())
        for step in (batch, batch, final):
            for layer in range(2):
                cache = jkv.write(cache, layer, step, rows[1], rows[2])
                jkv.attend(cache, layer, step, rows[0])
        jkv.attend(cache, 0, jkv.peek(cache, [0]), rows[0][:1])
        return jkv.keep_rows(cache, final, jnp.array([[0, 2]]))[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def write_twice(cache):
        cache, batch = jkv.append(cache, [0])
        for _ in range(2):
            cache = jkv.write(cache, 0, batch, rows[1][:1], rows[2][:1])
        return cache

    cache, _ = jkv.allocate(jkv.debug(make_cache()), [0])
    cache = denoise(cache)
    jkv.check(cache)
    cache = write_twice(cache)
    with pytest.raises(jkv.DebugError, match="for the second time in one step"):
        jkv.check(cache)


@pytest.mark.one_end
def test_recurrent_states_refuse_trees_and_second_writes():
    group = jkv.StateConfig(
        num_layers=1,
        arrays={"sum": ((3,), "float32")},
        max_sequences=2,
        max_context_length=16,
    )
    cache, opened = jkv.allocate(jkv.init(group), [0])
    with pytest.raises(ValueError, match="must not be a TreeMask on a cache with rec"):
        jkv.append(cache, opened.seq_ids, 2, capacity=2, mask=jkv.TreeMask([-1, 0]))
    mask = jkv.SpanMask([1, 1])
    cache, batch = jkv.append(cache, opened.seq_ids, 2, capacity=2, mask=mask)
    with pytest.raises(ValueError, match="must not be a TreeMask on a cache with rec"):
        jkv.with_mask(batch, jkv.TreeMask([-1, 0]))
    state = jkv.read_state(cache, 0, batch)
    cache = jkv.write_state(cache, 0, batch, state)
    with pytest.raises(ValueError, match="got a batch of with_mask"):
        jkv.write_state(cache, 0, jkv.with_mask(batch, jkv.CausalMask()), state)
    with pytest.raises(ValueError, match="got a batch of peek"):
        jkv.read_state(cache, 0, jkv.peek(cache, opened.seq_ids))
    with pytest.raises(ValueError, match="keep_rows needs layers with blocks only"):
        jkv.keep_rows(cache, batch, jnp.array([[0]]))
