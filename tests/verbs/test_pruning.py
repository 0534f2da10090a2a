"""Tests of prune: sequences that keep only some of their tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled_hlo import ALL_PASSES, pool_sized_operations
from support.small_caches import (
    append,
    assert_refused,
    fork,
    names,
    opened,
    small_cache,
    small_config,
    table,
    truncate,
)

import jkv
from jkv.blocks import row_copies
from jkv.status import UsageError

pytestmark = pytest.mark.one_end
THETAS = jnp.asarray([100.0, 10.0])  # by layer


def turn(rows, positions, theta):
    """Rotate neighbouring pairs of [..., D] by positions [...] (RoPE)."""
    pairs = rows.reshape(*rows.shape[:-1], -1, 2)
    exponents = jnp.arange(pairs.shape[-2], dtype=jnp.float32) / pairs.shape[-2]
    angles = positions[..., None] * (theta**-exponents).reshape(
        (1,) * positions.ndim + exponents.shape
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(rows.shape)


def rotate(keys, delta, layer):
    """`turn` with the signature of `prune`'s argument."""
    delta = jnp.broadcast_to(delta, keys.shape[:-1]).astype(jnp.float32)
    return turn(keys, delta, THETAS[layer])


@functools.cache
def two_layers(dtype, **changes):
    """Return twelve tokens in two layers of two heads, keys rotated by position."""
    config = small_config(
        num_layers=2, num_kv_heads=2, head_dim=4, dtype=dtype, pruning=True, **changes
    )
    cache, _ = jkv.allocate(jkv.init(config), [0])
    cache, batch = jkv.append(cache, [0], [12], capacity=12)
    rng = np.random.default_rng(3)
    raw = rng.standard_normal((2, 12, 2, 4), np.float32)
    for layer, rows in enumerate(raw):
        at = jnp.broadcast_to(batch.positions[:, None], rows.shape[:2])
        keys = turn(jnp.asarray(rows), at.astype(jnp.float32), THETAS[layer])
        values = None if config.values_in_keys else rows
        cache = jkv.write(cache, layer, batch, keys, values)
    return cache, raw


KEPT = [0, 3, 4, 5, 6, 7, 9, 11]


def read_layer(cache, layer, length=8):
    keys, values, _ = jkv.read(cache, layer, 0)
    return np.asarray(keys[:length]), np.asarray(values[:length])


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int4"]
)
@pytest.mark.filterwarnings("ignore:keys in int4")
def test_rows_are_moved_as_stored(dtype):
    before, _ = two_layers(dtype)
    after, status = jkv.prune(before, 0, [KEPT], len(KEPT))
    assert names(status) == ["OK"]
    for layer in range(2):
        for old, new in zip(
            read_layer(before, layer, 12), read_layer(after, layer), strict=True
        ):
            np.testing.assert_array_equal(new, old[KEPT])


def test_latent_rows_are_moved():
    before, _ = two_layers("float32", values_in_keys=True, value_head_dim=2)
    after, _ = jkv.prune(before, 0, [KEPT], len(KEPT))
    np.testing.assert_array_equal(
        read_layer(after, 1)[0], read_layer(before, 1, 12)[0][KEPT]
    )


def test_each_layer_and_head_keeps_its_own_tokens():
    before, _ = two_layers("float32")
    rng = np.random.default_rng(0)
    kept = np.sort([rng.permutation(12)[:7] for _ in range(4)]).reshape(1, 2, 2, 7)
    after, _ = jkv.prune(before, 0, kept, 7)
    for layer in range(2):
        old, new = read_layer(before, layer, 12)[0], read_layer(after, layer, 7)[0]
        for head in range(2):
            np.testing.assert_array_equal(new[:, head], old[kept[0, layer, head], head])


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("int8", 0.08)])
def test_rotation_moves_keys_to_the_positions_of_their_slots(dtype, error):
    cache, raw = two_layers(dtype)
    cache, status = jkv.prune(cache, 0, [KEPT], len(KEPT), rotate=rotate)
    assert names(status) == ["OK"]
    assert jkv.next_positions(cache)[0] == len(KEPT)
    slots = jnp.broadcast_to(jnp.arange(8, dtype=jnp.float32)[:, None], (8, 2))
    for layer in range(2):
        keys, values = read_layer(cache, layer)
        wanted = turn(jnp.asarray(raw[layer][KEPT]), slots, THETAS[layer])
        np.testing.assert_allclose(keys, wanted, atol=error)
        np.testing.assert_allclose(values, raw[layer][KEPT], atol=error)
    # Positions equal slots again: another rotation works, but not after gaps.
    again, status = jkv.prune(cache, 0, [[0, 5]], 2, rotate=rotate)
    assert names(status) == ["OK"]
    keys, _ = read_layer(again, 0, 2)
    wanted = turn(jnp.asarray(raw[0][[KEPT[0], KEPT[5]]]), slots[:2], THETAS[0])
    np.testing.assert_allclose(keys, wanted, atol=error)
    gaps, _ = jkv.prune(cache, 0, [[0, 5]], 2)
    assert_refused(
        gaps, jkv.prune(gaps, 0, [[0]], 1, rotate=rotate), "INVALID_ARGUMENT"
    )


def test_whole_blocks_are_moved_without_a_copy():
    cache = opened(14, pruning=True)
    kept = [[*range(4), *range(8, 14)]]
    after, status = jkv.prune(cache, 0, kept, 10)
    assert names(status) == ["OK"]
    assert table(after, 0) == [0, 2, 3]
    # Outside jit the storage is untouched.
    pools = [each.storage[0].key_pool for each in (cache, after)]
    assert pools[0].unsafe_buffer_pointer() == pools[1].unsafe_buffer_pointer()


def test_shared_blocks_are_copied_to_fresh_ones():
    cache, _ = fork(opened(12, pruning=True), [0])
    after, _ = jkv.prune(cache, 0, [[0, 1, 2, 3, 5, 6, 7, 8]], 8)
    assert table(after, 0) == [0, 3]
    assert table(after, 1) == [0, 1, 2]


def test_a_shared_tail_is_copied():
    cache, _ = fork(opened(12, pruning=True), [0])
    after, _ = jkv.prune(cache, 0, [[0, 1, 2, 3, 4, 5]], 6)
    assert table(after, 0) == [0, 3]


def test_a_window_moves_over_released_blocks(monkeypatch):
    """Its first row moves into the block of the second column, so it is copied last."""
    monkeypatch.setattr(row_copies, "COLUMNS_PER_TRIP", 1)
    config = small_config(sliding_window=10, max_context_length=24, pruning=True)
    cache, _ = jkv.allocate(jkv.init(config), [0])
    step = jax.jit(lambda cache, rows: append_rows(cache, rows), donate_argnums=0)
    for position in range(18):
        cache = step(cache, jnp.full((1, 1, 2), float(position)))
    assert jkv.kept_from(cache)[0] == 8
    cache, status = jkv.prune(cache, 0, [[*range(12)]], 12)
    assert names(status) == ["OK"]
    keys, _, _ = jkv.read(cache, 0, 0)
    assert keys[3:12, 0, 0].tolist() == [*range(9, 18)]


def append_rows(cache, rows):
    cache, batch = jkv.append(cache, [0])
    return jkv.write(cache, 0, batch, rows, rows)


def test_a_sequence_is_truncated_to_its_kept_tokens_or_to_nothing():
    cache = opened(12, pruning=True)
    cache, _ = jkv.prune(cache, 0, [[0, 1, 8, 9, 10]], 5)
    cache, _ = append(cache, [0], [3])
    assert_refused(cache, truncate(cache, [0], [4]), "INVALID_ARGUMENT")
    assert_refused(cache, fork(cache, [0], [4]), "INVALID_ARGUMENT")
    cut, status = truncate(cache, [0], [5])
    assert names(status) == ["OK"]
    assert jkv.next_positions(cut)[0] == 12
    emptied, _ = truncate(cache, [0], [0])
    assert jkv.next_positions(emptied)[0] == 0
    child, result = fork(cache, [0, 0], [6, 0])
    assert jkv.next_positions(child)[result.seq_ids].tolist() == [13, 0]


def test_an_empty_sequence_keeps_its_position():
    cache, _ = jkv.prune(opened(5, pruning=True), 0, [[0]], 0)
    cache, result = fork(cache, [0])
    assert jkv.next_positions(cache)[:2].tolist() == [5, 5]
    cache, batch = append(cache, result.seq_ids, [2])
    assert batch.positions[:2].tolist() == [5, 6]
    assert jkv.context_lengths(cache)[1] == 2


def test_positions_past_the_last_integer_are_refused():
    cache = opened(5, pruning=True)
    pruned = cache.metadata.sequences.pruned
    far = dataclasses.replace(pruned, num_dropped=pruned.num_dropped + (2**31 - 16))
    cache = cache.with_metadata(cache.metadata.with_pruned(far))
    assert_refused(cache, jkv.prune(cache, 0, [[0]], 1), "CONTEXT_FULL")
    _, status = jkv.prune(cache, 0, [[0, 1, 2, 3]], 4)
    assert names(status) == ["OK"]


def test_swapped_sequences_need_a_cache_with_pruning():
    cache, _ = jkv.prune(opened(12, pruning=True), 0, [[0, 1]], 2)
    cache, swapped = jkv.swap_out(cache, 0)
    with pytest.raises(UsageError, match="pruning=True"):
        jkv.swap_in(small_cache(), swapped)
    cache, result = jkv.swap_in(cache, swapped)
    assert jkv.next_positions(cache)[result.seq_ids].tolist() == [12]
    # Unpruned sequences can be swapped into any cache.
    _, whole = jkv.swap_out(opened(12, pruning=True), 0)
    assert names(jkv.swap_in(small_cache(), whole)[1].status) == ["OK"]


GROUPS = jkv.GroupedConfig(
    groups=(small_config(pruning=True), small_config(pruning=True, head_dim=4)),
    layer_groups=(0, 1),
)


@pytest.mark.parametrize(
    "config, kept, message",
    [
        (small_config(), [[0]], "pruning=True"),
        (small_config(pruning=True), [[0.5]], "integer slots"),
        (small_config(pruning=True), 3, "integer slots"),
        (small_config(pruning=True), [[0], [1]], r"kept must be i32\[1, C\]"),
        (small_config(pruning=True), [[0, 1], [1]], "rows of different lengths"),
        (small_config(pruning=True), np.zeros((1, 2, 1, 3), int), r"i32\[1, 1, 1, C\]"),
        (GROUPS, np.zeros((1, 1, 1, 3), int), "a tuple with one array per group"),
        (GROUPS, ([[0]],), "a tuple of 2"),
        (GROUPS, ([[0]], [[0, 1]]), "one width"),
    ],
)
def test_wrong_selections_are_refused_by_name(config, kept, message):
    cache, _ = jkv.allocate(jkv.init(config), [0])
    with pytest.raises(ValueError, match=message):
        jkv.prune(cache, 0, kept, 0)


def test_groups_need_the_same_pruning():
    with pytest.raises(ValueError, match="need the same pruning"):
        jkv.GroupedConfig(
            groups=(small_config(pruning=True), small_config()), layer_groups=(0, 1)
        )


def test_a_rotation_of_another_shape_is_refused():
    cache, _ = two_layers("float32")
    with pytest.raises(ValueError, match="rotate must return"):
        jkv.prune(cache, 0, [[1]], 1, rotate=lambda keys, *_: keys[0])


def test_a_call_without_requests_changes_nothing():
    cache = opened(5, pruning=True)
    after, status = jkv.prune(cache, np.zeros(0, int), np.zeros((0, 3), int), 1)
    assert after is cache and status.shape == (0,)


def test_debug_mode_accepts_pruned_sequences():
    cache = jkv.debug(jkv.init(small_config(pruning=True, prefix_caching=True)))
    cache, _ = jkv.allocate(cache, [0])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, rows, tokens):
        cache, batch = jkv.append(cache, [0], [6], capacity=6, tokens=tokens)
        cache = jkv.write(cache, 0, batch, rows, rows)
        return jkv.prune(jkv.commit(cache, batch), [0], [[0, 4, 5]], 3)

    for _ in range(2):
        cache, status = step(cache, jnp.ones((6, 1, 2)), jnp.arange(6))
        assert names(status) == ["OK"]
        jkv.check(cache)


@pytest.mark.parametrize("own", [False, True])
def test_a_donated_prune_is_in_place(own):
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        num_blocks=4099,
        block_size=8,
        max_sequences=64,
        max_context_length=100,
        dtype="float32",
        pruning=True,
    )
    cache = jax.eval_shape(lambda: jkv.init(config))
    kept = jax.ShapeDtypeStruct((4, 2, 2, 96) if own else (4, 96), jnp.int32)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = (
        jax.jit(jkv.prune, donate_argnums=0)
        .lower(cache, ids, kept, ids)
        .compile(ALL_PASSES)
    )
    pool = np.prod(cache.storage[0].key_pool.shape)
    assert pool_sized_operations(compiled, pool // 2) == []
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2**20
    assert memory.alias_size_in_bytes >= 2 * 4 * pool
