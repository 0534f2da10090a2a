"""Scores with sharded heads: only the sums of layers cross devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import dealt, further
from support.models.sharded_model import (
    AUTO,
    TWO_AXES,
    WIDTH,
    collectives,
    make_weights,
    place_weights,
    run_model,
)
from support.tolerances import assert_close, is_close

import jkv

PROMPTS = np.array([[3, 1, 4, 1], [2, 6, -1, -1]], np.int32)
CONTINUATIONS = np.array([[5, 9, 2], [6, 5, -1]], np.int32)
# The prompts' rows, and the rows of all tokens but the last.
NUM_ROWS = 2 * 4 + 2 * 2


def score(weights, exact=False, **where):
    return jkv.score(
        run_model,
        weights,
        PROMPTS,
        CONTINUATIONS,
        config=AUTO.config,
        exact=exact,
        **where,
    )


def find_loss(weights, **where):
    return jnp.sum(jnp.sin(score(weights, **where)))


@functools.cache
def alone():
    """Return scores and gradients on one device."""
    weights = jax.device_put(make_weights(8, 16))
    return jax.jit(score)(weights), jax.jit(jax.grad(find_loss))(weights)


LAYOUTS = [AUTO, TWO_AXES, TWO_AXES._replace(axis_type=AxisType.Auto)]


@pytest.mark.parametrize("layout", dealt(LAYOUTS, share=3))
def test_each_device_attends_with_its_own_heads(layout):
    """One sum per layer, over the heads; on Explicit axes, too."""
    weights, where = place_weights(layout), dict(mesh=layout.mesh, heads="tp")
    call = jax.jit(functools.partial(score, **where))
    compiled = call.lower(weights).compile(ALL_PASSES)
    found, wanted = compiled(weights), alone()[0]
    assert_close(found, wanted)
    assert not is_close(found[::-1], wanted)
    assert collectives(compiled) == {("all-reduce", f"f32[{NUM_ROWS},{WIDTH}]"): 1}


@pytest.mark.one_end
@pytest.mark.parametrize("layout", [AUTO, *further([TWO_AXES])])
def test_sharded_score_gradients_equal_one_device(layout):
    where = dict(mesh=layout.mesh, heads="tp")
    differentiate = jax.jit(jax.grad(functools.partial(find_loss, **where)))
    found, wanted = differentiate(place_weights(layout)), alone()[1]
    for name, theirs in wanted.items():
        largest = np.abs(theirs).max()
        assert largest > 0.1
        assert_close(found[name] / largest, theirs / largest)


@pytest.mark.one_end
@pytest.mark.further
def test_exact_scores_on_a_mesh():
    """Calls of one shape through an equally sharded cache."""
    where = dict(mesh=AUTO.mesh, heads="tp")
    exact = functools.partial(score, exact=(4, 8))
    found = jax.jit(functools.partial(exact, **where))(place_weights(AUTO))
    assert_close(found, jax.jit(exact)(jax.device_put(make_weights(8, 16))))


@pytest.mark.one_end
def test_mesh_without_heads_and_heads_without_mesh_are_refused():
    for where in (dict(heads="tp"), dict(mesh=AUTO.mesh)):
        with pytest.raises(
            jkv.UsageError, match="mesh and heads must be given together"
        ):
            score(make_weights(8, 16), **where)
