"""The random game on a mesh: one kv head held by two devices, against the oracle."""

import jax
import pytest
from games import SHAPES, Game, make_verbs
from jax.sharding import AxisType


@pytest.mark.one_end
def test_random_operations_on_a_mesh(tmp_path):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("tp",), (AxisType.Explicit,))
    game = Game(
        SHAPES["roomy"],
        make_verbs("donated"),
        seed=13,
        donate=True,
        folder=tmp_path,
        where=dict(mesh=mesh, heads="tp"),
    )
    game.play(num_operations=60)
    assert game.cache.sharding.copies == 2
    assert len(game.num_requests) > 4
