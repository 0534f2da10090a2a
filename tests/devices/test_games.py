"""Random operations on a mesh against the oracle: replicated heads, sharded blocks."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.caches.random_operations import SHAPES, Game, make_verbs
from support.caches.random_pruning import PruneGame, make_pruning_verbs
from support.jax_versions import further
from support.small_caches import small_config

import jkv


@pytest.mark.one_end
def test_random_operations_on_a_mesh(tmp_path):
    """One kv head on two pairs of devices; each device has half of every block."""
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("tp", "cp"), (AxisType.Explicit,) * 2)
    game = Game(
        SHAPES["roomy"],
        make_verbs("donated"),
        seed=13,
        donate=True,
        folder=tmp_path,
        where=dict(mesh=mesh, heads="tp", context="cp"),
    )
    game.play(num_operations=60)
    assert game.cache.sharding.copies == game.cache.sharding.num_parts == 2
    assert len(game.num_requests) > 4


class OneHeadGame(PruneGame):
    num_kv_heads = 1


@pytest.mark.parametrize("game_of", further([PruneGame, OneHeadGame]))
@pytest.mark.one_end
def test_random_pruning_on_a_mesh(game_of, tmp_path):
    """Two heads on a device each, or one on both: each keeps its own tokens."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("tp",))
    game = game_of(
        SHAPES["roomy"],
        make_pruning_verbs("donated"),
        seed=17,
        donate=True,
        record_tokens=True,
        folder=tmp_path,
        where=dict(mesh=mesh, heads="tp"),
    )
    game.play(num_operations=60)
    assert game.cache.sharding.copies == 2 // game.num_kv_heads
    assert sum(game.num_pruned.values()) > 10


@pytest.mark.one_end
def test_a_context_axis_refuses_to_prune():
    config = small_config(pruning=True)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("cp",))
    cache = jkv.init(config, mesh=mesh, context="cp")
    with pytest.raises(NotImplementedError, match="context='cp'"):
        jkv.prune(cache, 0, [[0]], 1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_end
def test_heads_keep_their_own_tokens_in_jit_on_a_mesh(axis_type):
    """No collective is compiled, and rows equal those of one device."""
    config = small_config(num_kv_heads=2, pruning=True)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("tp",), (axis_type,))
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((9, 2, 2), np.float32)
    kept = np.sort([[rng.permutation(9)[:5]] * 2])[:, None]
    kept[0, 0, 1] = [0, 2, 5, 7, 8]

    def run(cache, rows, kept):
        cache, _ = jkv.allocate(cache, [0])
        cache, batch = jkv.append(cache, [0], [9], capacity=9)
        cache = jkv.write(cache, 0, batch, rows, rows)
        return jkv.prune(cache, [0], kept, 5)[0]

    found = [
        jax.jit(run)(jkv.init(config, **where), rows, kept)
        for where in ({}, dict(mesh=mesh, heads="tp"))
    ]
    plain, sharded = (np.asarray(jkv.read(each, 0, 0)[0][:5]) for each in found)
    np.testing.assert_array_equal(plain, sharded)
    whole = jkv.init(config, mesh=mesh, heads="tp")
    compiled = jax.jit(jkv.prune).lower(whole, np.int32([0]), kept, 5).compile()
    assert not re.findall(
        r"all-(?:reduce|gather|to-all)|collective", compiled.as_text()
    )


@pytest.mark.one_end
def test_each_pool_prunes_its_own_sequences():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("dp",))
    cache = jkv.init(small_config(pruning=True), mesh=mesh, pools="dp")
    cache, _ = jkv.over_pools(jkv.allocate)(cache, np.zeros((2, 1), np.int32))
    ids, counts = np.zeros((2, 1), np.int32), np.full((2, 1), 8, np.int32)
    cache, _ = jkv.over_pools(jkv.append)(cache, ids, counts, capacity=8)
    kept = np.int32([[[0, 1, 2, 3]], [[0, 4, 6, 7]]])
    cache, status = jax.jit(jkv.over_pools(jkv.prune))(cache, ids, kept, counts // 2)
    assert np.asarray(status).tolist() == [[0], [0]]
    for each in jkv.split_pools(cache):
        assert jkv.next_positions(each)[0] == 8 and jkv.context_lengths(each)[0] == 4
        jkv.check(each)
