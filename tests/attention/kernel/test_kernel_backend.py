"""Backends of attention: the kernel's language, and adding another backend.

Nothing here imports the language, so that this file names the missing parts on the
first
JAX without it, when the kernel's other tests cannot be imported.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import small_config
from support.tolerances import assert_close

import jkv
from jkv.attention import choice, paged_attention
from jkv.attention.backend import Backend, DeviceType, Gradients
from jkv.attention.kernel import backend
from jkv.attention.xla.gradients import differentiate_plainly
from jkv.attention.xla.interface import attend_xla


def require_backend():
    reason = backend.why_missing()
    assert reason is None, (
        f"JAX {jax.__version__} ships without Pallas's Triton lowering: {reason}. On "
        "GPUs the kernel is not chosen any more, and all attention takes the plain "
        "path. What to do is in docs/kernel.md, 'The next backend'."
    )


def test_this_jax_has_the_pallas_lowering():
    require_backend()


@pytest.mark.one_end
def test_a_jax_without_the_lowering_is_reported(monkeypatch):
    require_backend()  # imports it before it is removed
    monkeypatch.delattr(sys.modules["jax.experimental.pallas"], "triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    backend._pallas.cache_clear()
    try:
        with pytest.raises(AssertionError, match="without Pallas's Triton lowering"):
            require_backend()
    finally:
        backend._pallas.cache_clear()


@dataclasses.dataclass(frozen=True)
class Toy(Backend):
    """Negated attention of the plain path, with a derivative of its own.

    For at most one query row, on CPUs.
    """

    name = "toy"
    platforms = default_platforms = ("cpu",)

    def why_not(self, call, device):
        assert device == DeviceType("cpu", None)
        return None if call.num_rows == 1 else f"it takes 1 row, not {call.num_rows}"

    def attend(self, call, device):
        del device
        output, lse = attend_xla(call)
        return -output * call.plans.get("toy", 1), lse

    def why_not_derived(self, call, device):
        return self.why_not(call, device)

    def differentiate(self, call, cotangents, device):
        del device
        of_queries, *others = differentiate_plainly(call, cotangents)
        return Gradients(jnp.full_like(of_queries, 7.0), *others)

    def plan(self, pools, requests, reference_counts, step, past):
        del pools, requests, reference_counts, past
        return jnp.full((1, 1, 1), step.num_rows + 1.0)


@pytest.fixture
def toy(monkeypatch):
    """The toy backend, registered before all others."""
    monkeypatch.setattr(choice, "BACKENDS", (Toy(), *choice.BACKENDS))


def attend(num_rows, **options):
    """Attend with `num_rows` sequences of two tokens, in shapes of this test only."""
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
@pytest.mark.usefixtures("toy")
def test_a_backend_is_registered_as_a_value():
    call, queries = attend(1)
    plain = attend(1, implementation="reference")[0](queries)
    # On its platform it serves the calls that it supports.
    assert_close(call(queries), -plain)
    assert np.asarray(plain).any()
    named = attend(1, implementation="toy")[0]
    assert_close(jax.jit(named)(queries), -plain)

    def differentiate(function):
        return jax.grad(lambda queries: function(queries).sum())(queries)

    for function in (call, named):  # of the scaled queries
        assert_close(differentiate(function), jnp.full_like(queries, 7 / 48**0.5))
    # Unsupported calls and calls by position use the plain path.
    call, rows = attend(3)
    assert_close(call(rows), attend(3, implementation="xla")[0](rows))
    exact = attend(1, by_position=True)[0](queries)
    assert_close(exact, plain)


@pytest.mark.one_end
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the toy is for CPUs")
@pytest.mark.usefixtures("toy")
def test_a_named_backend_refuses_unsupported_calls():
    named, rows = attend(3, implementation="toy")
    with pytest.raises(
        NotImplementedError, match="'toy' does not support this call: it takes"
    ):
        named(rows)
    call, queries = attend(1, implementation="toy", by_position=True)
    with pytest.raises(ValueError, match="is not batch-invariant"):
        call(queries)
    with pytest.raises(ValueError, match="'toy'"):
        attend(1, implementation="tyo")[0](queries)
    named = attend(1, implementation="toy")[0]
    with pytest.raises(NotImplementedError, match="supports CPU only"):
        jax.jit(named).trace(queries).lower(lowering_platforms=("rocm",))


@pytest.mark.one_end
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the toy is for CPUs")
@pytest.mark.usefixtures("toy")
def test_a_backend_plans_its_own_steps():
    """The plan is used in a step of a cache, and in its derivative."""
    cache, opened = jkv.allocate(jkv.init(small_config(head_dim=16)), [0])
    cache, batch = jkv.append(cache, opened.seq_ids)
    assert [{*each} for each in batch.plan] == [{"toy"}]
    rows = jnp.linspace(-1, 2, 16).reshape(1, 1, 16)
    cache = jkv.write(cache, 0, batch, rows, rows)

    def weigh(queries, implementation):
        found = jkv.attend(cache, 0, batch, queries, implementation=implementation)
        return jnp.sum(found)

    found, gradient = jax.value_and_grad(weigh)(rows, "toy")
    # A single token has all the weight: its negated values times the plan's number.
    assert abs(rows.sum()) > 1
    assert_close(found, -2 * rows.sum())
    assert np.isfinite(gradient).all()
