"""Tests of groups of layers: one block pool per window, the same sequences in all.

Groups must agree with a plain cache that keeps all tokens of all layers: statuses,
lengths, positions and the attention of each layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import free_count

import jkv
from jkv.status import UsageError

pytestmark = pytest.mark.one_end

WINDOWS = (8, None, 8, None)  # by layer
SIZES = dict(num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
WIDTH, ROWS = 3, 8


def grouped_config(num_blocks=(48, 16), **changes):
    """Return two full-attention layers and two with a window of eight."""
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
    return jkv.init(grouped_config())


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
    """Call one of the verbs by number; the other verbs get padding."""

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


def test_groups_agree_with_one_cache():
    """Random steps and verbs; only truncation below a window is refused more often."""
    rng = np.random.default_rng(3)
    plain, groups = plain_cache(), grouped_cache()
    assert groups.find_layer(2) == (1, 1) and groups.find_layer(3) == (0, 1)
    assert groups.num_layers == 4
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
            # Only groups refuse to truncate below the window.
            below = np.asarray(found[3]) == jkv.Status.INVALID_ARGUMENT
            num_refused += below.sum()
            ids = np.where(below & (kind == 2), -1, seq_ids).astype(np.int32)
            plain, expected = change(plain, kind, ids, others)
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
        num_gone += int(jkv.kept_from(groups, group=1).sum())
    assert num_gone > 100 and num_refused > 0
    refusals = jkv.stats(plain).refusals
    found = jkv.stats(groups).refusals
    for cause in (jkv.Status.INVALID_SEQUENCE, jkv.Status.CONTEXT_FULL):
        assert found[cause] == refusals[cause]


@pytest.mark.parametrize("num_blocks", [(24, 3), (3, 24)], ids=["windowed", "full"])
def test_all_groups_serve_a_request_or_none(num_blocks):
    """One pool has three blocks: sequence 1 cannot get its second one."""
    cache = jkv.init(grouped_config(num_blocks), storage=False)
    cache, _ = jkv.allocate(cache, [0] * WIDTH)
    cache, _ = jkv.append(cache, [0, 1, -1], [4, 4, 0], capacity=ROWS)
    after, batch = jkv.append(cache, [0, 1, 2], [1, 1, 0], capacity=ROWS)
    assert batch.status.tolist() == [0, jkv.Status.OUT_OF_BLOCKS, 0]
    assert batch.context_lengths.tolist() == [5, 4, 0]
    assert batch.query_lengths.tolist() == [1, 0, 0]
    assert batch.valid.tolist() == [True] + [False] * 7
    assert jkv.context_lengths(after).tolist() == [5, 4, 0, 0]
    jkv.check(after)
    assert jkv.stats(after).refusals[jkv.Status.OUT_OF_BLOCKS] == 1


@pytest.mark.parametrize("num_blocks", [(24, 2), (2, 24)], ids=["windowed", "full"])
def test_out_of_blocks_releases_the_row(num_blocks):
    """One pool has two blocks and two rows are free: the statuses of a plain cache."""
    config = grouped_config(num_blocks, max_sequences=2)
    _, opened = jkv.allocate(jkv.init(config), [12, 0, 0])
    assert opened.status.tolist() == [jkv.Status.OUT_OF_BLOCKS, 0, 0]
    assert opened.seq_ids.tolist() == [-1, 0, 1]


def test_truncation_below_the_window_releases_the_row():
    """Of 24 tokens the windowed layers keep those from 12 on."""
    cache, _ = jkv.allocate(grouped_cache(), [0, 0, 0])
    for _ in range(6):
        cache, _ = jkv.append(cache, 0, 4, capacity=4)
    assert jkv.kept_from(cache, group=1).tolist() == [12, 0, 0, 0]
    cache, forked = jkv.fork(cache, [0, 0], [4, 24])
    assert forked.status.tolist() == [jkv.Status.INVALID_ARGUMENT, 0]
    assert forked.seq_ids.tolist() == [-1, 3]
    jkv.check(cache)


def test_a_shortage_in_one_group_refuses_blocks_of_another():
    """Sequence 0 needs blocks of both groups; 1 only those of its window."""
    cache, _ = jkv.allocate(jkv.init(grouped_config((12, 16)), storage=False), [0, 40])
    cache, _ = jkv.append(cache, [0, 1], [8, 12], capacity=20)
    assert [free_count(cache, group) for group in range(2)] == [0, 11]
    _, batch = jkv.append(cache, [0, 1], [1, 1])
    assert batch.status.tolist() == [jkv.Status.OUT_OF_BLOCKS] * 2
    after, batch = jkv.append(cache, [1, 0], [1, 1])
    assert batch.status.tolist() == [0, jkv.Status.OUT_OF_BLOCKS]
    _, batch = jkv.append(after, [0, 1], [1, 1])  # now sequence 1 needs no block
    assert batch.status.tolist() == [jkv.Status.OUT_OF_BLOCKS, 0]
    jkv.check(after)


def test_a_windowed_pool_serves_sequences_longer_than_it():
    config = jkv.GroupedConfig.for_context_length(
        48, max_sequences=4, layer_windows=WINDOWS, step_tokens=2, **SIZES
    )
    assert [group.num_blocks for group in config.groups] == [48, 16]
    assert config.layer_groups == (1, 0, 1, 0)
    cache = jkv.init(config)
    assert cache.nbytes == config.bytes
    cache, _ = allocate(cache, np.zeros(WIDTH, np.int32))
    rows = np.ones((ROWS, 1, 2), np.float32)
    for _ in range(24):
        cache, batch, _ = step(cache, np.int32([0, 1, 2]), np.int32([2, 2, 2]), rows)
        assert batch.status.tolist() == [0, 0, 0]
    assert jkv.context_lengths(cache).tolist() == [48, 48, 48, 0]
    free = [free_count(cache, group) for group in range(2)]
    assert free[0] == 48 - 36 and free[1] >= 4
    assert int(jkv.num_free_blocks(cache)) == min(free)


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


def test_sequences_are_swapped_out_and_in_in_all_groups():
    """Blocks released in one group and kept in the other are swapped together."""
    cache, _ = allocate(grouped_cache(), np.zeros(WIDTH, np.int32))
    rows = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 1, 2)
    for _ in range(5):
        cache, _, _ = step(cache, np.int32([0, 1, 2]), np.int32([4, 2, 2]), rows)
    before = [jkv.read(cache, layer, 0) for layer in range(4)]
    gone = int(jkv.kept_from(cache, group=1)[0])
    cache, swapped = jkv.swap_out(cache, [0, 2])
    jkv.check(cache)
    assert jkv.context_lengths(cache).tolist() == [0, 10, 0, 0] and gone > 0
    back, entered = jkv.swap_in(cache, swapped)
    jkv.check(back)
    seq_id = int(entered.seq_ids[0])
    same([jkv.read(back, layer, seq_id) for layer in range(4)], before)
    assert int(jkv.kept_from(back, group=1)[seq_id]) == gone

    # Another sequence takes ten more blocks of the window pool; the other pool has
    # enough.
    full, held = jkv.allocate(cache, [0])
    full, batch = jkv.append(full, held.seq_ids, 40, capacity=40)
    assert batch.status.tolist() == [0]
    after, refused = jkv.swap_in(full, swapped)
    assert refused.seq_ids.tolist() == [-1, -1]
    assert set(refused.status.tolist()) == {jkv.Status.OUT_OF_BLOCKS}
    jkv.check(after)
    same(jkv.context_lengths(after), jkv.context_lengths(full))
    plain = jkv.init(grouped_config().groups[0])
    with pytest.raises(ValueError, match="group"):
        jkv.swap_in(plain, swapped)


def test_eviction_continues_until_every_group_has_enough():
    """Each sequence has two blocks in both pools, of 9 and of 7 blocks."""
    cache, _ = jkv.allocate(jkv.init(grouped_config((9, 7)), storage=False), [0] * 3)
    for seq_id in (2, 0, 1):
        cache, _ = jkv.append(cache, seq_id, 8, capacity=8)
    assert [free_count(cache, group) for group in range(2)] == [3, 1]
    cache, evicted = jkv.evict(cache, 3)
    assert evicted.tolist() == [2, -1, -1, -1]
    assert [free_count(cache, group) for group in range(2)] == [5, 3]
    jkv.check(cache)


def test_host_operations_accept_groups(tmp_path):
    """Operations on a whole cache also accept one with groups."""
    cache, _ = allocate(grouped_cache(), np.zeros(WIDTH, np.int32))
    rows = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 1, 2)
    cache, _, _ = step(cache, np.int32([0, 1, 2]), np.int32([4, 2, 2]), rows)
    jkv.save(tmp_path / "cache", cache)
    same(jkv.load(tmp_path / "cache"), cache)
    assert jkv.stats(cache).tokens == 8
    grown = jkv.resize(cache, (50, 20))
    assert [group.num_blocks for group in grown.metadata.groups] == [50, 20]
    watched, _ = jkv.append(jkv.debug(cache), [0], 1)
    assert watched.interceptor is not None
    indexed = jkv.init(dataclasses.replace(grouped_config(), prefix_caching=True))
    assert jkv.match(indexed, [[1, 2]]).tolist() == [0]
    cache = jkv.compact(cache)
    cache, evicted = jkv.evict_older_than(cache, 0, protect=1)
    assert evicted.tolist() == [-1] * 4  # the last call used all open sequences
    jkv.check(cache)


def test_a_layer_may_be_in_no_group():
    config = dataclasses.replace(grouped_config(), layer_groups=(1, (), 0, (), 1, 0))
    cache, _ = jkv.allocate(jkv.init(config), [0])
    cache, batch = jkv.append(cache, [0], 1)
    assert cache.num_layers == 6 and cache.find_layer(4) == (1, 1)
    rows = jnp.ones((1, 1, 2))
    cache = jkv.write(cache, 5, batch, rows, rows)
    assert np.asarray(jkv.read(cache, 5, 0)[0])[0].tolist() == [[1, 1]]
    for call in (
        lambda: jkv.write(cache, 1, batch, rows, rows),
        lambda: jkv.attend(cache, 1, batch, rows),
        lambda: jkv.read(cache, 3, 0),
    ):
        with pytest.raises(ValueError, match="keeps no keys and values"):
            call()


def test_invalid_arguments_raise():
    cache = grouped_cache()
    rows = jnp.ones((WIDTH, 1, 2))
    grown, batch = jkv.append(cache, [-1] * WIDTH)
    with pytest.raises(UsageError, match=r"layer must be in 0\.\.3"):
        jkv.write(grown, 4, batch, rows, rows)
    with pytest.raises(UsageError, match="find_periodic"):
        jax.eval_shape(lambda i: jkv.write(grown, i, batch, rows, rows), np.int32(0))
    _, of_another = jkv.append(plain_cache(), [-1] * WIDTH)
    with pytest.raises(ValueError, match="planned by append on another cache"):
        jkv.write(grown, 0, of_another, rows, rows)
    with pytest.raises(ValueError, match="window must be at most 8"):
        jkv.attend(grown, 0, batch, rows)
    for name in ("num_blocks", "num_kv_heads", "head_dim", "value_head_dim", "dtype"):
        with pytest.raises(UsageError, match=f"cache.{name} needs one group"):
            getattr(cache, name)
    with pytest.raises(UsageError, match="slots_of"):
        _ = batch.block_ids
    for verb, arguments in ((jkv.block_ids, [0]), (jkv.slots, [0, 0])):
        with pytest.raises(UsageError, match="group"):
            verb(cache, *arguments)
    config = grouped_config()
    for changes, message in (
        (dict(layer_groups=(1, 0, 1)), "gives it 1 layers"),
        (dict(layer_groups=(1, 0, 1, 2)), "layer_groups must name one of 2 groups"),
        (
            dict(groups=(config.groups[0], grouped_config(block_size=8).groups[1])),
            "the same block_size",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
