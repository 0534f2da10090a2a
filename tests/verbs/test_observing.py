"""Tests of observed queries: each sequence keeps its newest ones."""

import numpy as np
import pytest

import jkv
from jkv.status import UsageError

pytestmark = pytest.mark.one_end
WIDTH, LAYERS, HEADS, DIM = 4, 2, 4, 8
CONFIG = jkv.CacheConfig.toy(
    num_layers=LAYERS,
    num_kv_heads=2,
    num_query_heads=HEADS,
    observed_queries=WIDTH,
    max_context_length=32,
    num_blocks=64,
    dtype="float32",
    pruning=True,
)


def draw(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_rows, HEADS, DIM)).astype(np.float32)


def observe(cache, seq_ids, counts, queries):
    cache, batch = jkv.append(cache, seq_ids, counts, capacity=len(queries))
    for layer in range(LAYERS):
        cache = jkv.observe(cache, layer, batch, queries + layer)
    return cache


def assert_observed(cache, expected):
    """Assert that each sequence keeps the newest expected queries in each layer."""
    for layer in range(LAYERS):
        found, num = jkv.read_queries(cache, layer, list(expected))
        for i, queries in enumerate(expected.values()):
            count = min(len(queries), WIDTH)
            assert int(num[i]) == count
            newest = np.reshape(queries[len(queries) - count :], (count, HEADS, DIM))
            np.testing.assert_array_equal(found[i, WIDTH - count :], newest + layer)
            assert not np.asarray(found[i, : WIDTH - count]).any()


def test_the_newest_queries_of_each_sequence_are_kept():
    """Chunks wrap around the ring; refused requests and padding store nothing."""
    cache, _ = jkv.allocate(jkv.init(CONFIG), [0, 0])
    known = {0: [], 1: []}
    for step, counts in enumerate([(3, 7), (2, 0), (1, 1), (0, 5)]):
        queries = draw(16, step)
        cache = observe(cache, [0, -1, 1, 3], [counts[0], 2, counts[1], 1], queries)
        known[0] += [*queries[: counts[0]]]
        start = counts[0] + 2
        known[1] += [*queries[start : start + counts[1]]]
        assert_observed(cache, known)


def test_verbs_keep_drop_and_copy_queries():
    cache, _ = jkv.allocate(jkv.init(CONFIG), [0, 0])
    first, second = draw(9), draw(6, 1)
    cache = observe(cache, [0, 1], [9, 6], np.concatenate([first, second]))
    cache, forked = jkv.fork(cache, [0])
    assert_observed(cache, {2: first})
    cache = observe(cache, [2], [1], second[:1])
    assert_observed(cache, {0: first, 2: [*first, second[0]]})
    # Truncation keeps older queries that newer ones have not overwritten.
    cut, _ = jkv.truncate(cache, 0, 8)
    assert int(jkv.read_queries(cut, 0, 0).num[0]) == WIDTH - 1
    cache, _ = jkv.reorder(cache, [0, 1], [1, 0])
    assert_observed(cache, {0: second, 1: first})
    # Positions continue after a prune, and so do the queries.
    cache, _ = jkv.prune(cache, 1, [[0, 7, 8]], 3)
    cache = observe(cache, [1], [1], second[:1])
    assert_observed(cache, {1: [*first, second[0]]})
    cache, _ = jkv.free(cache, [0])
    cache, _ = jkv.allocate(cache, 0)
    assert_observed(cache, {0: np.zeros((0, HEADS, DIM))})
    jkv.check(cache)


def append_tree(cache, seq_id):
    """Append a path of three rows as a tree, which observes nothing."""
    tree = jkv.TreeMask(np.int32([-1, 0, 1]))
    cache, batch = jkv.append(cache, [seq_id], 3, capacity=3, mask=tree)
    cache = jkv.observe(cache, 0, batch, draw(3))
    return jkv.keep_rows(cache, batch, np.int32([[0, 1, 2]]))[0]


def test_other_tokens_at_old_positions_have_no_queries():
    """Not after `truncate`, `fork` to a length, a rotating `prune` and `keep_rows`."""
    cache, _ = jkv.allocate(jkv.init(CONFIG), [0])
    queries = draw(12)
    cache = observe(cache, [0], 12, queries)
    cache, forked = jkv.fork(cache, [0], [9])
    child = int(forked.seq_ids[0])
    assert_observed(cache, {0: queries, child: queries[8:9]})
    assert_observed(append_tree(cache, child), {0: queries, child: []})

    shorter, _ = jkv.truncate(cache, [0], [9])
    assert_observed(shorter, {0: queries[8:9]})
    assert_observed(append_tree(shorter, 0), {0: []})

    kept = [[*range(4), *range(6, 12)]]
    rotated, status = jkv.prune(cache, [0], kept, 10, rotate=lambda keys, *_: keys)
    assert status.tolist() == [0]
    assert_observed(rotated, {0: []})

    cache, batch = jkv.append(cache, [0], 3, capacity=3)
    for layer in range(LAYERS):
        cache = jkv.observe(cache, layer, batch, draw(3) + layer)
    moved, _, status = jkv.keep_rows(cache, batch, np.int32([[0, 2, -1]]))
    assert status.tolist() == [0]
    assert_observed(moved, {0: []})
    moved, _, _ = jkv.keep_rows(cache, batch, np.int32([[0, 1, -1]]))
    assert_observed(moved, {0: [*queries[11:], *draw(3)[:2]]})


def test_caches_without_observed_queries_are_returned():
    windowed = jkv.CacheConfig.toy(observed_queries=2, sliding_window=8)
    for config in (jkv.CacheConfig.toy(), windowed):
        cache, _ = jkv.allocate(jkv.init(config), [0])
        cache, batch = jkv.append(cache, [0])
        assert jkv.observe(cache, 0, batch, np.ones((1, 3, 8))) is cache
        with pytest.raises(UsageError, match="observed_queries"):
            jkv.read_queries(cache, 0, 0)


def test_debug_mode_observes():
    cache, _ = jkv.allocate(jkv.debug(jkv.init(CONFIG)), [0])
    queries = draw(3)
    cache, batch = jkv.append(cache, [0], [3], capacity=3)
    cache = jkv.observe(cache, 0, batch, queries)
    found, num = jkv.read_queries(cache, 0, 0)
    np.testing.assert_array_equal(found[0, -3:], queries)
    assert int(num[0]) == 3


def test_wrong_queries_are_refused_by_name():
    cache, _ = jkv.allocate(jkv.init(CONFIG), [0])
    cache, batch = jkv.append(cache, [0])
    with pytest.raises(ValueError, match="num_query_heads"):
        jkv.observe(cache, 0, batch, np.ones((1, 2, DIM)))
    for fields, message in (
        (dict(observed_queries=-1), "observed_queries"),
        (dict(num_query_heads=3, num_kv_heads=2), "multiple of num_kv_heads"),
    ):
        with pytest.raises(ValueError, match=message):
            jkv.CacheConfig.toy(**fields)
