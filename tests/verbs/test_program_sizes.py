"""Instruction counts of compiled verbs: absent parts of a cache add none.

Layers, index and window are values that the verbs use. Absent ones return constants,
which XLA folds, so a plain cache's programs contain none of their instructions. The
counts for a plain cache, with the oldest JAX, predate these values; if they shrink,
update the table.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.compiled_hlo import ALL_PASSES, OPERATION
from support.jax_versions import IS_NEWEST
from support.small_caches import small_config

import jkv

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(IS_NEWEST, reason="each version of XLA has its own numbers"),
]
IDS, FEW = jnp.arange(4), jnp.array([3, 1, 0, 2])
VERBS = {
    "allocate": lambda cache: jkv.allocate(cache, FEW),
    "append": lambda cache: jkv.append(cache, IDS, 1),
    "fork": lambda cache: jkv.fork(cache, IDS, FEW),
    "free": lambda cache: jkv.free(cache, IDS),
    "truncate": lambda cache: jkv.truncate(cache, IDS, FEW),
    "reorder": lambda cache: jkv.reorder(cache, IDS, FEW),
}


@functools.cache
def fresh(kind):
    """Create a cache of blocks, also with an index, or one with a recurrent state."""
    sizes = dict(max_sequences=4, max_context_length=32, block_size=4)
    of_blocks = dict(num_blocks=32, head_dim=8, **sizes)
    if kind != "states":
        return jkv.init(small_config(prefix_caching=kind == "index", **of_blocks))
    arrays, inputs = {"sum": ((3,), "float32")}, {"x": ((3,), "float32")}
    states = jkv.StateConfig(
        num_layers=1, arrays=arrays, max_pending=2, inputs=inputs, **sizes
    )
    groups = small_config(**of_blocks), states
    return jkv.init(jkv.GroupedConfig(groups=groups, layer_groups=(0, 1)))


# The passes that suites disable for compile time change these counts.
OPTIONS = ALL_PASSES | {"xla_cpu_use_fusion_emitters": True}
MOST = {
    "plain": {
        "allocate": 571,
        "append": 585,
        "fork": 871,
        "free": 651,
        "truncate": 1034,
        "reorder": 1727,
    },
    "index": {"allocate": 1106},
    "states": {"append": 628, "fork": 1253, "reorder": 1940},
}


@pytest.mark.parametrize(
    ("kind", "verb"), [(kind, verb) for kind in MOST for verb in MOST[kind]]
)
def test_no_more_instructions_than_before(kind, verb):
    compiled = jax.jit(VERBS[verb]).lower(fresh(kind)).compile(OPTIONS)
    assert len(OPERATION.findall(compiled.as_text())) <= MOST[kind][verb]
