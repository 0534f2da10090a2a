"""Random games on a mesh, against the oracle: heads held twice, and blocks in parts."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.random_operations import SHAPES, Game, make_verbs


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
