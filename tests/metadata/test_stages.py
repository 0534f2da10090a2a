"""Stages: equal values, one computation on a CPU, no effect elsewhere."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled_hlo import ALL_PASSES

import jkv
from jkv.operations import stage, unknown

# Operations that XLA runs in order on a CPU, without another thread.
MOST_OPERATIONS = 8
RUNS = re.compile(r" (?:fusion|copy|call|scatter|while|conditional)\(")


@stage
def _shift(state: dict[str, jax.Array], by: jax.Array, *, times: int = 1) -> object:
    """Change one of three arrays, and return an argument unchanged."""
    return {**state, "changed": jnp.where(by > 0, state["changed"] + times * by, 0)}, by


def _state(size: int = 4) -> dict[str, jax.Array]:
    return {
        "changed": jnp.arange(size),
        "kept": jnp.full((64 * size,), 7),
        "other": jnp.ones((2,), bool),
    }


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_a_stage_equals_its_function(jitted):
    def call(state: dict[str, jax.Array]) -> object:
        return _shift(state, jnp.int32(5), times=2)

    state, by = (jax.jit(call) if jitted else call)(_state())
    chex.assert_trees_all_equal(state, _state() | {"changed": jnp.arange(4) + 10})
    assert int(by) == 5
    with jax.disable_jit():
        chex.assert_trees_all_equal(call(_state()), (state, by))


def test_a_stage_runs_under_transformations():
    by = jnp.array([1, 2, 0])
    batched = jax.vmap(lambda by: _shift(_state(), by)[0]["changed"])(by)
    chex.assert_trees_all_equal(
        batched, jnp.array([[1, 2, 3, 4], [2, 3, 4, 5], [0, 0, 0, 0]])
    )

    def step(state: dict[str, jax.Array], by: jax.Array) -> tuple[object, None]:
        return _shift(state, by)[0], None

    summed, _ = jax.jit(lambda: jax.lax.scan(step, _state(), jnp.array([1, 2])))()
    chex.assert_trees_all_equal(summed["changed"], jnp.arange(4) + 3)


def test_arrays_passed_through_a_stage_stay_outside():
    compiled = (
        jax.jit(_shift).lower(_state(), jnp.int32(1)).compile(ALL_PASSES).as_text()
    )
    (call,) = [line for line in compiled.splitlines() if " call(" in line]
    results, operands = call.split(" call(")
    assert "s32[4]" in results and "s32[256]" not in call
    assert operands.split(")")[0].count("%") == 2, "the array changed and the addend"


def test_only_a_cpu_gets_separate_computations():
    traced = jax.jit(_shift).trace(_state(), jnp.int32(1))
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "rocm", "tpu")
    }
    marked = {platform for platform, text in texts.items() if "inlineable" in text}
    assert marked == {"cpu"}
    # Functions called inside a stage are inlined into it.
    assert texts["cpu"].count("inlineable") == 1


def test_append_runs_on_one_thread():
    # Wide enough for XLA to split work over threads.
    num_sequences = 1024
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=65536,
        max_sequences=num_sequences,
        max_context_length=1024,
    )
    cache = jkv.init(config, storage=False)
    seq_ids = np.arange(num_sequences, dtype=np.int32)
    compiled = (
        jax.jit(jkv.append, donate_argnums=0).lower(cache, seq_ids).compile(ALL_PASSES)
    )
    text = compiled.as_text()
    stages = set(re.findall(r" call\(.*to_apply=%([\w.]+)", text))
    assert len(stages) >= 3, "append has stages"
    seen = set()
    for computation in re.split(r"\n(?=(?:ENTRY |%))", text):
        name = computation[1:].split(" ")[0]
        runs = [line for line in computation.splitlines() if RUNS.search(line)]
        if name in stages:
            seen.add(name)
            assert len(runs) <= MOST_OPERATIONS, computation
        # Shared blocks are searched only if requests share any.
        if "find_shared_prefixes)/cond/branch_1" in computation:
            continue
        for line in runs:
            if "outer_dimension_partitions" in line:
                assert re.search(r"s32\[(1024,64|65536)\]", line.split("fusion(")[0]), (
                    f"only the tables and the counts are that large: {line}"
                )
    assert seen == stages, "each was found and counted"


@pytest.mark.parametrize("platform, is_computed", [("cpu", True), ("rocm", False)])
def test_a_number_is_hidden_from_one_compiler(platform: str, is_computed: bool) -> None:
    """The number stays a constant elsewhere: computing it would be a launch."""

    def find(lengths: jax.Array) -> jax.Array:
        return unknown(jnp.int32(3), lengths)

    traced = jax.jit(find).trace(jnp.ones(2, jnp.int32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.add" in text) == is_computed
    assert int(jax.jit(find)(jnp.zeros(2, jnp.int32))) == 3
