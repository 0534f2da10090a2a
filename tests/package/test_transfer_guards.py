"""Public functions and the engine under `jax.transfer_guard("disallow")`.

They transfer lists, ints and numpy arrays explicitly. A guard set in the caller's
thread does not stop an engine.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import with_further
from support.serving.small_engines import make_engine, pool
from support.small_caches import copied
from test_wrong_kinds import FUNCTIONS, NAMED, calls

import jkv
from jkv.arguments import GUARDS
from jkv.grammar import Vocabulary, from_choices

pytestmark = pytest.mark.one_end
# Missing files, pools that this cache does not have, results without arrays.
OTHERS = {"load", "save", "check_exact", "debug", "measure_formats", "spill"}
OTHERS |= {"over_pools", "split_pools", "keep_compiled_programs", "model_of"}


@pytest.mark.parametrize(
    "name", with_further(sorted({*FUNCTIONS} - OTHERS), "beam_search", "generate")
)
def test_functions_transfer_their_arguments(name):
    function, args, options = getattr(jkv, name), calls(), NAMED.get(name, {})
    args = args.get(name, args["free"][:1])
    expected = function(*args, **options)
    with jax.transfer_guard("disallow"):
        found = function(*args, **options)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if isinstance(one, jax.Array | np.ndarray):
            np.testing.assert_array_equal(
                np.asarray(one, float), np.asarray(other, float)
            )


def test_loops_with_a_donated_cache():
    cache = jkv.init(calls()["init"][0])
    with jax.transfer_guard("disallow"):
        model, params, _, prompts = calls()["generate"]
        _, found = jkv.jitted.generate(
            model, params, cache, prompts, max_new_tokens=2, stop_tokens=[7]
        )
    assert found.tokens.tolist() == [[3, 4]]


def test_other_transfers_stay_forbidden():
    with (
        jax.transfer_guard("disallow_explicit"),
        pytest.raises(Exception, match="Disallowed"),
    ):
        jkv.allocate(calls()["free"][0], [3])


def test_an_error_under_a_guard_keeps_its_message():
    cache = calls()["free"][0]
    with jax.transfer_guard("disallow"), pytest.raises(ValueError, match="seq_ids"):
        jkv.free(cache, "5")


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_an_engine_runs_under_a_guard(level):
    cache = copied(pool())
    with jax.transfer_guard(level):
        engine = make_engine(cache=cache)
        (guarded,) = engine.generate([[5, 3]], limits=3)
        engine.update_params(np.uint32(0))
    (again,) = engine.generate([[5, 3]], limits=3)
    assert guarded.tokens == again.tokens and not engine.has_failed


def test_an_engines_thread_runs_under_a_global_guard():
    before = {name: getattr(jax.config, name) for name in GUARDS}
    with contextlib.ExitStack() as after:
        for name, level in before.items():
            after.callback(jax.config.update, name, level)
            jax.config.update(name, "disallow")
        with make_engine() as engine:
            number = engine.submit([5, 3], max_new_tokens=3)
            assert len(engine.results(number)[0].tokens) == 3
    jnp.zeros(2) + 1


def test_values_are_created_under_a_guard():
    with jax.transfer_guard("disallow"):
        sampling = jkv.Sampling(temperature=[0.5, 1.0], seeds=3)
        prompts = jkv.decoding.Prompts.of([[1, 2], [3]], stop_tokens=[5])
        tree = jkv.TrajectoryTree.of([[1, 2], [1, 3]])
        logits_processor = jkv.logits_processors.TokenBias(
            np.array([1]), np.array([1.0], np.float32)
        )
        grammar = from_choices(["a", "b"], Vocabulary([b"a", b"b", None], [2]))
        store = jkv.BlockStore(1 << 20)
    assert sampling and prompts and tree and logits_processor and grammar and store
