"""Groups of layers on a mesh: each with its own kv heads and pools."""

import functools

import jax
import numpy as np
import pytest
from support.models.sharded_model import Layout

import jkv

pytestmark = pytest.mark.one_end

# Two ranks with pools; four devices over the heads of each.
LAYOUT = Layout("sharded", (("dp", 2), ("tp", 4)), jax.sharding.AxisType.Auto)
AXES = dict(heads="tp", pools="dp")


def config_of(**changes):
    """Return a windowed layer with two kv heads, and a full one with four."""
    sizes = dict(
        num_layers=1,
        head_dim=8,
        block_size=4,
        max_sequences=2,
        max_context_length=16,
        dtype="float32",
    )
    windowed = jkv.CacheConfig(num_kv_heads=2, num_blocks=6, sliding_window=6, **sizes)
    full = jkv.CacheConfig(num_kv_heads=4, num_blocks=8, **sizes)
    fields = dict(groups=(windowed, full), layer_groups=(0, (), 1))
    return jkv.GroupedConfig(**fields | changes)


def grow(cache, seq_ids, keys):
    """Append five tokens to the first sequence, three to the other."""
    cache, batch = jkv.append(cache, seq_ids, np.int32([5, 3]), capacity=8)
    for layer, heads in ((0, 2), (2, 4)):
        rows = keys[:, :heads]
        cache = jkv.write(cache, layer, batch, rows, 2 * rows)
    return jkv.commit(cache, batch), batch.status


@functools.cache
def pools_and_rows():
    """Return a cache with different tokens on each rank, and their keys."""
    cache = jkv.init(config_of(), mesh=LAYOUT.mesh, **AXES)
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((2, 8, 4, 8), np.float32)
    cache, opened = jkv.over_pools(jkv.allocate)(cache, np.zeros((2, 2), np.int32))
    cache, status = jkv.over_pools(grow)(cache, opened.seq_ids, keys)
    assert not status.any()
    return cache, keys


def test_each_group_is_sharded_by_its_own_heads():
    cache, _ = pools_and_rows()
    windowed, full = cache.storage
    assert [each.sharding.copies for each in cache.storage] == [2, 1]
    for each in (windowed, full):
        pool = each.key_pool
        assert pool.shape[3] == 4  # two heads, each twice
        assert pool.sharding.shard_shape(pool.shape)[:4] == (1, *pool.shape[1:3], 1)
    tables = cache.metadata.groups[0].block_tables
    assert tables.sharding.shard_shape(tables.shape) == (1, 2, 4)


def test_each_rank_is_a_separate_grouped_cache():
    cache, keys = pools_and_rows()
    alone = jkv.init(config_of())
    ranks = jkv.split_pools(cache)
    for rank, of_rank in zip(ranks, keys, strict=True):
        jkv.check(rank)
        assert jax.tree.structure(rank) == jax.tree.structure(alone)
        assert jkv.context_lengths(rank).tolist() == [5, 3]
        for layer, heads in ((0, 2), (2, 4)):
            found, values, length = jkv.read(rank, layer, 0)
            np.testing.assert_array_equal(found[:length], of_rank[:5, :heads])
            np.testing.assert_array_equal(values[:length], 2 * of_rank[:5, :heads])


@pytest.mark.further
def test_each_rank_has_its_own_prefix_cache():
    config = config_of(prefix_caching=True)
    cache = jkv.init(config, mesh=LAYOUT.mesh, **AXES)
    prompts = np.int32([[[1, 2, 3, 4, 5, 6]], [[7, 8, 9, 10, 11, 12]]])

    @jkv.over_pools
    def open_prompt(cache, prompt):
        return jkv.allocate(cache, 6, tokens=prompt)

    @jkv.over_pools
    def fill(cache, seq_ids, prompt):
        cache, batch = jkv.append(cache, seq_ids, 6, capacity=6, tokens=prompt[0])
        return jkv.free(jkv.commit(cache, batch), seq_ids)

    cache, opened = open_prompt(cache, prompts)
    cache, _ = fill(cache, opened.seq_ids, prompts)
    for prompt, num_cached in ((prompts, 4), (prompts + 1, 0)):
        cache, opened = open_prompt(cache, prompt)
        assert opened.num_cached.tolist() == [[num_cached]] * 2
    for rank in jkv.split_pools(cache):
        jkv.check(rank)


def test_partition_specs_match_the_cache():
    cache, _ = pools_and_rows()
    for specs in (
        jkv.partition_specs(cache),
        jkv.partition_specs(config_of(), mesh=LAYOUT.mesh, **AXES),
    ):
        assert jax.tree.structure(specs) == jax.tree.structure(cache)
        for leaf, spec in zip(
            jax.tree.leaves(cache), jax.tree.leaves(specs), strict=True
        ):
            where = jax.sharding.NamedSharding(LAYOUT.mesh, spec)
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)


def test_indivisible_heads_are_refused_by_group():
    full = jkv.CacheConfig(
        **dict(num_layers=1, num_kv_heads=3, head_dim=8, num_blocks=8, block_size=4),
        **dict(max_sequences=2, max_context_length=16),
    )
    config = config_of(groups=(config_of().groups[0], full))
    with pytest.raises(ValueError, match="'tp' has 4 devices, .* 3 kv heads"):
        jkv.init(config, mesh=LAYOUT.mesh, heads="tp")
