"""First and last of several lanes with equal ids, compared with a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.operations import MOST_COMPARED, find_one, is_first

pytestmark = pytest.mark.one_end

NUM_IDS = 9
SIZES = [1, 7, MOST_COMPARED, MOST_COMPARED + 1, 300]


def named(size):
    """Return ids of `size` lanes, some past the end."""
    return np.random.default_rng(size).integers(0, NUM_IDS + 2, size).astype(np.int32)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_mention_of_each_id(size):
    ids = named(size).tolist()
    found = is_first(jnp.asarray(ids, jnp.int32), NUM_IDS)
    expected = [i >= NUM_IDS or ids.index(i) == lane for lane, i in enumerate(ids)]
    assert found.tolist() == expected


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("size", SIZES)
def test_one_lane_of_each_id(size, last):
    ids = named(size)
    ids[ids > NUM_IDS] = NUM_IDS
    find = jax.jit(find_one, static_argnames="last")
    marks, found = find(jnp.zeros((NUM_IDS,), jnp.int32), ids, last=last)
    chosen = {i: lane for lane, i in enumerate(ids.tolist()) if i < NUM_IDS}
    if not last:
        chosen = {i: ids.tolist().index(i) for i in chosen}
    assert np.flatnonzero(found).tolist() == sorted(chosen.values())
    assert not marks.any()
