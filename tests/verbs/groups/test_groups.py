"""Groups of layers: one cache for each window, behind the verbs of one cache.

What a plain cache says, which keeps all tokens of all layers, is what groups must say:
the same statuses, lengths and positions, and the same attention of each layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.status import UsageError

pytestmark = pytest.mark.one_end

WINDOWS = (8, None, 8, None)  # by layer
SIZES = dict(num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
WIDTH, ROWS = 3, 8


def grouped_config(num_blocks=(48, 16), **changes):
    """Two layers that see everything, and two with a window of eight."""
    sizes = SIZES | dict(num_layers=2, max_sequences=4, max_context_length=48) | changes
    full, windowed = num_blocks
    return jkv.GroupedConfig(
        groups=(
            jkv.CacheConfig(num_blocks=full, **sizes),
            jkv.CacheConfig(num_blocks=windowed, sliding_window=8, **sizes),
        ),
        layer_groups=(1, 0, 1, 0),
    )


def plain_cache():
    config = jkv.CacheConfig(
        num_layers=4,
        num_blocks=48,
        max_sequences=4,
        max_context_length=48,
        **SIZES,
    )
    return jkv.init(config)


def grouped_cache():
    return jkv.init_groups(grouped_config())


@jax.jit
def step(cache, seq_ids, counts, rows):
    """Append, write all layers, and attend in each."""
    cache, batch = jkv.append(cache, seq_ids, counts, capacity=ROWS)
    outputs = []
    for layer, window in enumerate(WINDOWS):
        keys = rows + layer
        cache = jkv.write(cache, layer, batch, keys, -keys)
        outputs.append(jkv.attend(cache, layer, batch, rows, window=window))
    return jkv.commit(cache, batch), batch, jnp.stack(outputs)


@jax.jit
def allocate(cache, counts):
    return jkv.allocate(cache, counts)


@jax.jit
def change(cache, kind, seq_ids, others):
    """One of the verbs, by number: the others get padding."""

    def ids(number):
        return jnp.where(kind == number, seq_ids, -1)

    cache, forked = jkv.fork(cache, ids(0))
    cache, freed = jkv.free(cache, ids(1))
    cache, cut = jkv.truncate(cache, ids(2), others)
    cache, moved = jkv.reorder(cache, ids(3), others)
    cache, touched = jkv.touch(cache, ids(4))
    return cache, (forked.seq_ids, forked.status, freed, cut, moved, touched)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_groups_say_what_one_cache_says():
    """Random steps and changes; only who goes back below a window is refused more."""
    rng = np.random.default_rng(3)
    plain, groups = plain_cache(), grouped_cache()
    assert groups.find_layer(2) == (1, 1) and groups.find_layer(3) == (0, 1)
    num_gone = num_refused = 0
    for turn in range(120):
        seq_ids = rng.integers(-1, 5, WIDTH).astype(np.int32)
        if turn % 6 == 0:
            counts = rng.integers(-1, 6, WIDTH).astype(np.int32)
            (plain, expected), (groups, found) = (
                allocate(cache, counts) for cache in (plain, groups)
            )
            same(found, expected)
        elif turn % 6 == 5:
            kind = np.int32(rng.choice(5, p=[0.25, 0.15, 0.3, 0.15, 0.15]))
            others = rng.integers(0, 5, WIDTH).astype(np.int32)
            if kind == 2:
                seq_ids = rng.permutation(4)[:WIDTH].astype(np.int32)
                lengths = np.asarray(jkv.context_lengths(plain))
                others = lengths[seq_ids] - rng.integers(0, 5, WIDTH)
                others = others.astype(np.int32)
            after, found = change(groups, kind, seq_ids, others)
            # Who would go back below the window is refused by groups alone.
            below = np.asarray(found[3]) == jkv.Status.INVALID_ARGUMENT
            num_refused += below.sum()
            told = np.where(below & (kind == 2), -1, seq_ids).astype(np.int32)
            plain, expected = change(plain, kind, told, others)
            groups = after
            same(found[:3] + found[4:], expected[:3] + expected[4:])
            same(np.where(below, 0, found[3]), expected[3])
        else:
            counts = rng.integers(0, 4, WIDTH).astype(np.int32)
            rows = rng.standard_normal((ROWS, 1, 2)).astype(np.float32)
            (plain, batch, outputs), (groups, planned, attended) = (
                step(cache, seq_ids, counts, rows) for cache in (plain, groups)
            )
            for name in ("seq_ids", "status", "query_starts", "query_lengths"):
                same(getattr(planned, name), getattr(batch, name))
            for name in ("context_lengths", "positions", "valid", "offsets"):
                same(getattr(planned, name), getattr(batch, name))
            np.testing.assert_allclose(attended, outputs, atol=1e-5)
        jkv.check(groups)
        same(jkv.context_lengths(groups), jkv.context_lengths(plain))
        num_gone += int(jkv.kept_from(groups.groups[1]).sum())
    assert num_gone > 100 and num_refused > 0
    refusals = jkv.stats(plain).refusals
    found = jkv.stats(groups.groups[0]).refusals
    for cause in (jkv.Status.INVALID_SEQUENCE, jkv.Status.CONTEXT_FULL):
        assert found[cause] == refusals[cause]


@pytest.mark.parametrize("num_blocks", [(24, 3), (3, 24)], ids=["windowed", "full"])
def test_all_groups_serve_a_request_or_none(num_blocks):
    """One pool has three blocks: the second sequence finds none for its second one."""
    cache = jkv.init_groups(grouped_config(num_blocks), storage=False)
    cache, _ = jkv.allocate(cache, [0] * WIDTH)
    cache, _ = jkv.append(cache, [0, 1, -1], [4, 4, 0], capacity=ROWS)
    after, batch = jkv.append(cache, [0, 1, 2], [1, 1, 0], capacity=ROWS)
    assert batch.status.tolist() == [0, jkv.Status.OUT_OF_BLOCKS, 0]
    assert batch.context_lengths.tolist() == [5, 4, 0]
    assert [plan.query_lengths.tolist() for plan in batch.groups] == [[1, 0, 0]] * 2
    assert batch.valid.tolist() == [True] + [False] * 7
    assert jkv.context_lengths(after).tolist() == [5, 4, 0, 0]
    jkv.check(after)
    assert jkv.stats(after.groups[0]).refusals[jkv.Status.OUT_OF_BLOCKS] == 1


def test_a_pool_for_windows_serves_texts_that_it_could_not_hold():
    config = jkv.GroupedConfig.for_context_length(
        48, max_sequences=4, layer_windows=WINDOWS, step_tokens=2, **SIZES
    )
    assert [group.num_blocks for group in config.groups] == [48, 16]
    assert config.layer_groups == (1, 0, 1, 0)
    cache = jkv.init_groups(config)
    assert cache.nbytes == config.bytes
    cache, _ = allocate(cache, np.zeros(WIDTH, np.int32))
    rows = np.ones((ROWS, 1, 2), np.float32)
    for _ in range(24):
        cache, batch, _ = step(cache, np.int32([0, 1, 2]), np.int32([2, 2, 2]), rows)
        assert batch.status.tolist() == [0, 0, 0]
    assert jkv.context_lengths(cache).tolist() == [48, 48, 48, 0]
    live = [jkv.stats(group).live_blocks for group in cache.groups]
    assert live[0] == 36 and live[1] <= 12


def test_layers_may_be_scanned_by_their_periods():
    cache, _ = allocate(grouped_cache(), np.zeros(WIDTH, np.int32))
    rows = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 1, 2)
    seq_ids, counts = np.int32([0, 1, -1]), np.int32([5, 2, 0])
    expected, batch, outputs = step(cache, seq_ids, counts, rows)

    @jax.jit
    def scanned(cache):
        cache, batch = jkv.append(cache, seq_ids, counts, capacity=ROWS)

        def period(cache, number):
            outputs = []
            for i in range(2):
                layer = cache.find_periodic(i, 2, number)
                keys = rows + (2 * number + i).astype(np.float32)
                cache = jkv.write(cache, layer, batch, keys, -keys)
                attended = jkv.attend(cache, layer, batch, rows, window=WINDOWS[i])
                outputs.append(attended)
            return cache, jnp.stack(outputs)

        return jax.lax.scan(period, cache, jnp.arange(2))

    found, attended = scanned(cache)
    same(found, expected)
    np.testing.assert_allclose(attended.reshape(outputs.shape), outputs, atol=1e-6)
    keys, _, length = jkv.read(found, 3, 0)
    assert np.asarray(keys)[:length, 0, 0].tolist() == [3, 5, 7, 9, 11]
    with pytest.raises(UsageError, match="do not repeat after 3"):
        cache.find_periodic(0, 3, 0)


def test_mistakes_are_answered():
    cache = grouped_cache()
    rows = jnp.ones((WIDTH, 1, 2))
    grown, batch = jkv.append(cache, [-1] * WIDTH)
    with pytest.raises(UsageError, match=r"layer must be in 0\.\.3"):
        jkv.write(grown, 4, batch, rows, rows)
    with pytest.raises(UsageError, match="find_periodic"):
        jax.eval_shape(lambda i: jkv.write(grown, i, batch, rows, rows), np.int32(0))
    with pytest.raises(UsageError, match="what append returned for this cache"):
        jkv.write(grown, 0, batch.groups[0], rows, rows)
    with pytest.raises(ValueError, match="keeps the last 8 tokens"):
        jkv.attend(grown, 0, batch, rows)
    with pytest.raises(UsageError, match=r"pass one of cache\.groups"):
        jkv.num_free_blocks(cache)
    with pytest.raises(UsageError, match="beam_search does not take groups of layers"):
        jkv.beam_search(step, {}, cache, [[1]], num_beams=1, max_new_tokens=1)
    config = grouped_config()
    for changes, said in (
        (dict(layer_groups=(1, 0, 1)), "gives it 1 layers"),
        (dict(layer_groups=(1, 0, 1, 2)), "layer_groups must name one of 2 groups"),
        (
            dict(groups=(config.groups[0], grouped_config(block_size=8).groups[1])),
            "the same block_size",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(config, **changes)
