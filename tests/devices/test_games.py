"""Random games on a mesh, against the oracle: heads held twice, and blocks in parts."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.random_operations import SHAPES, Game, make_verbs
from support.random_pruning import PruneGame, make_pruning_verbs
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


@pytest.mark.parametrize("game_of", [PruneGame, OneHeadGame])
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
