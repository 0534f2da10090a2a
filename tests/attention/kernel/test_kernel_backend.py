"""What the kernel is written in: whether JAX still has it, and where another goes.

Nothing here imports it, so that this file says what is missing on the first JAX that
ships without it, when the kernel's other tests cannot even be imported.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tolerances import assert_close

from jkv.attention import choice, paged_attention
from jkv.attention.derivative import Implementation, attend_differentiably
from jkv.attention.kernel import backend
from jkv.attention.xla.gradients import differentiate_plainly
from jkv.attention.xla.plain_path import attend_plainly


def require_backend():
    reason = backend.why_missing()
    assert reason is None, (
        f"JAX {jax.__version__} ships without Pallas's Triton lowering: {reason}. On "
        "GPUs the kernel is not chosen any more, and all attention takes the plain "
        "path. What to do is in docs/kernel.md, 'The next backend'."
    )


def test_this_jax_has_the_lowering():
    require_backend()


@pytest.mark.one_end
def test_a_jax_without_it_is_named(monkeypatch):
    require_backend()  # imports it, and then it is taken away
    monkeypatch.delattr(sys.modules["jax.experimental.pallas"], "triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    backend._pallas.cache_clear()
    try:
        with pytest.raises(AssertionError, match="without Pallas's Triton lowering"):
            require_backend()
    finally:
        backend._pallas.cache_clear()


class Toy:
    """A second backend, for one platform: attention of the plain path, in negative."""

    def __init__(self):
        self.asked = []

    def find(self, call, platform, *, by_position=False):
        """Take calls of one row of queries at most, as `find_kernel` would answer."""
        self.asked.append((platform, by_position))
        return self.attend if call.num_rows == 1 and not by_position else None

    def attend(self, call):
        output, lse = attend_plainly(call)
        return -output, lse


@pytest.fixture
def toy(monkeypatch):
    """The toy's rows in `choice.py`: by its platform, and by its name."""
    made = Toy()
    monkeypatch.setitem(choice._KERNELS, "cpu", made.find)
    implementation = Implementation(made.attend, differentiate_plainly)
    attend = functools.partial(attend_differentiably, implementation)
    monkeypatch.setitem(choice._IMPLEMENTATIONS, "toy", attend)
    yield made
    jax.clear_caches()  # of traces that chose it


def attend(num_rows, **options):
    """Rows of as many sequences of two tokens, with shapes that no other test has."""
    pool = jnp.arange(1, 1 + num_rows * 2 * 48, dtype=jnp.float32)
    pool = jnp.sin(pool).reshape(1, num_rows, 1, 2, 48)
    ones = jnp.ones((num_rows,), jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)

    def call(queries):
        tables = rows[:, None]
        return paged_attention(
            queries, pool, pool, 0, tables, None, rows, ones, 2 * ones, **options
        )

    return call, jnp.linspace(-1, 1, num_rows * 96).reshape(num_rows, 2, 48)


@pytest.mark.one_end
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the toy is for CPUs")
def test_a_second_backend_is_a_row(toy):
    call, queries = attend(1)
    plain = attend(1, implementation="reference")[0](queries)
    # Where its platform is, it serves the calls that it takes.
    assert_close(call(queries), -plain)
    assert toy.asked == [("cpu", False)] and np.asarray(plain).any()
    # By name, on any platform, with the derivative that all implementations have.
    named = attend(1, implementation="toy")[0]
    assert_close(jax.jit(named)(queries), -plain)
    gradient = jax.grad(lambda queries: named(queries).sum())(queries)
    assert np.isfinite(gradient).all() and np.asarray(gradient).any()
    # What it does not take goes to the plain path, and so do calls by position.
    call, rows = attend(3)
    assert_close(call(rows), attend(3, implementation="xla")[0](rows))
    exact = attend(1, by_position=True)[0](queries)
    assert_close(exact, plain)
    assert ("cpu", True) in toy.asked
    # By position it has no row, and an error lists it among the names.
    with pytest.raises(ValueError, match="depends on the step"):
        attend(1, implementation="toy", by_position=True)[0](queries)
    with pytest.raises(ValueError, match="'toy'"):
        attend(1, implementation="tyo")[0](queries)
