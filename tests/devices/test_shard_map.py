"""Verbs inside the user's own `shard_map` with its defaults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import dealt
from support.models.sharded_model import (
    AUTO,
    HEAD_DIM,
    NUM_HEADS,
    NUM_ROWS,
    TWO_AXES,
    collectives,
    place_weights,
    play,
    play_alone,
    run_model,
)
from support.tolerances import assert_close

import jkv

# Eight ranks, each with prompts of other lengths.
COUNTS = np.array([[3 + rank % 4, rank % 3, 1] for rank in range(8)], np.int32)


def rows_of(seed):
    """Return keys, values and queries of a step with one kv head."""
    rng = np.random.default_rng(seed)
    heads = [1, 1, 2]
    return [rng.standard_normal((NUM_ROWS, n, HEAD_DIM), np.float32) for n in heads]


def serve(counts, keys, values, queries, *, prefix_caching=False):
    """Take two steps on the rank's own pool, of prompts and of single tokens."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        num_blocks=12,
        block_size=4,
        max_sequences=4,
        max_context_length=16,
        dtype="float32",
        prefix_caching=prefix_caching,
    )
    tokens = jnp.arange(NUM_ROWS, dtype=jnp.int32)
    prompts = jnp.broadcast_to(tokens[None, :8], (3, 8))
    prompts = jnp.where(prompts < counts[:, None], prompts, -1)
    cache, opened = jkv.allocate(
        jkv.init(config), counts, tokens=prompts if prefix_caching else None
    )
    cache, batch = jkv.append(
        cache, opened.seq_ids, counts, capacity=NUM_ROWS, tokens=tokens
    )
    cache = jkv.write(cache, 0, batch, keys, values)
    found = jkv.attend(cache, 0, batch, queries)
    cache = jkv.commit(cache, batch)
    cache, _ = jkv.fork(cache, opened.seq_ids[:1])
    cache, batch = jkv.append(cache, opened.seq_ids, tokens=tokens[:3])
    cache = jkv.write(cache, 0, batch, keys[:3], values[:3])
    return cache, (found, jkv.attend(cache, 0, batch, queries[:3], return_lse=True))


def call_all_verbs(counts, *rows):
    """Call every verb that changes a cache, with a prefix index."""
    cache, found = serve(counts, *rows, prefix_caching=True)
    ids = jnp.arange(2, dtype=jnp.int32)
    cache, _ = jkv.truncate(cache, ids, counts[:2] // 2)
    cache, _ = jkv.reorder(cache, ids, ids[::-1])
    cache, _ = jkv.free(cache, counts[:1])
    cache, _ = jkv.evict(cache, counts[0])
    cache, _ = jkv.evict_older_than(cache, counts[0])
    cache, _ = jkv.touch(jkv.evict_cached(cache, counts[0]), ids)
    cache = jkv.compact(cache)
    cache = jkv.clear_prefixes(jkv.invalidate(cache, counts[0]))
    return cache, found, jkv.read(cache, 0, ids[0])


def on_ranks(function):
    """Map a function over eight ranks, each with its own counts and the same rows."""

    def on_rank(counts, *rows):
        return jax.tree.map(lambda array: array[None], function(counts[0], *rows))

    ranks, whole = PartitionSpec("dp"), PartitionSpec()
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    in_specs = ranks, whole, whole, whole
    return jax.shard_map(on_rank, mesh=mesh, in_specs=in_specs, out_specs=ranks)


@pytest.mark.one_end
def test_ranks_with_their_own_pools_equal_solo_runs():
    """Rows are replicated and counts are not: loop carries need matching types."""
    compiled = jax.jit(on_ranks(serve)).lower(COUNTS, *rows_of(0)).compile(ALL_PASSES)
    assert collectives(compiled) == {}
    cache, outputs = jax.device_get(compiled(COUNTS, *rows_of(0)))
    alone = jax.jit(serve)
    for rank in range(8):
        mine = jax.tree.map(lambda array, rank=rank: array[rank], (cache, outputs))
        wanted = jax.device_get(alone(COUNTS[rank], *rows_of(0)))
        leaves = zip(jax.tree.leaves(mine), jax.tree.leaves(wanted), strict=True)
        for one, other in leaves:
            if one.dtype == np.float32:
                assert_close(one, other)
            else:
                np.testing.assert_array_equal(one, other)
    lengths = cache.metadata.context_lengths
    assert not np.array_equal(lengths[0], lengths[1])


def test_verbs_trace_with_the_defaults_of_shard_map():
    found = jax.eval_shape(on_ranks(call_all_verbs), COUNTS, *rows_of(0))
    assert found[1][0].shape == (8, NUM_ROWS, 2, HEAD_DIM)


@pytest.mark.parametrize(
    "layout", dealt([AUTO, TWO_AXES]), ids=lambda layout: layout.axis_type.name
)
def test_a_rank_has_its_heads_of_one_cache(layout):
    """Metadata is and stays replicated: `out_specs` would refuse it otherwise."""
    cache, weights = layout.init(), place_weights(layout)
    specs = jkv.partition_specs(cache)
    of_weights = jax.tree.map(lambda array: array.sharding.spec, weights)
    seen = []

    def step(cache, weights, seq_ids, counts, tokens):
        seen.append((cache.num_kv_heads, cache.storage[0].key_pool.shape[2]))
        cache, batch = jkv.append(cache, seq_ids, counts, capacity=NUM_ROWS)
        logits, cache = run_model(weights, tokens, cache, batch, axis="tp")
        return jkv.commit(cache, batch), logits

    whole = PartitionSpec()
    on_all = jax.shard_map(
        step,
        mesh=layout.mesh,
        in_specs=(specs, of_weights, whole, whole, whole),
        out_specs=(specs, whole),
    )
    cache, logits = play(cache, weights, jax.jit(on_all, donate_argnums=0))
    num_shares = layout.mesh.shape["tp"]
    assert seen == [(8 // num_shares, 8 // num_shares)]
    _, wanted = play_alone(layout.config)
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    assert NUM_HEADS % num_shares == 0
