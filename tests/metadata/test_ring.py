"""The running sum and the ring, compared with numpy and a deque."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.metadata import ring
from jkv.operations import running_sum
from jkv.state import Ring

pytestmark = pytest.mark.one_end


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 1024, 1025, 2048, 2049])
def test_running_sum_equals_cumsum(size):
    counts = np.random.default_rng(size).integers(0, 2**19, size).astype(np.int32)
    expected = np.cumsum(counts, dtype=np.int32)
    summed = jax.jit(running_sum)(counts)
    assert summed.dtype == jnp.int32
    np.testing.assert_array_equal(summed, expected)


def test_a_ring_equals_a_deque():
    random = np.random.default_rng(0)
    capacity, batch = 7, 5
    expected = collections.deque(range(capacity))
    state = Ring(
        ids=jnp.arange(capacity, dtype=jnp.int32),
        bounds=jnp.array([0, *[capacity] * 3, *[0] * 4], jnp.int32),
        indices=None,
    )
    fewest, num_taken = capacity, 0
    outside: list[int] = []
    pop, push, peek = jax.jit(ring.pop), jax.jit(ring.push), jax.jit(ring.peek)
    for _ in range(200):
        num = int(random.integers(0, min(batch, len(expected)) + 1))
        taken = peek(state, jnp.arange(batch, dtype=jnp.int32))[:num].tolist()
        assert taken == [expected.popleft() for _ in range(num)]
        outside += taken
        num_taken += num
        state = pop(state, jnp.int32(num))
        fewest = min(fewest, len(expected))

        # Some of the outside ids return, in their order among the others.
        lanes = np.array((outside + [-1] * batch)[:batch], np.int32)
        entering = (random.random(batch) < 0.5) & (lanes >= 0)
        state = push(state, lanes, jnp.asarray(entering))
        expected.extend(lanes[entering].tolist())
        outside = [i for i in outside if i not in expected]
        assert state.bounds[1:4].tolist() == [len(expected), len(expected), fewest]
    assert state.num_taken.tolist() == [num_taken, 0]
