"""Work lists of a step: made by `append` on a GPU, used by all layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.kernel_lowering import find_kernels, lower, shape
from support.jax_versions import dealt
from support.small_caches import small_config
from support.tolerances import assert_close

import jkv
from jkv.attention import backend
from jkv.attention.backend import DeviceType
from jkv.attention.kernel import interface
from jkv.attention.kernel.launches import attention as launches
from jkv.attention.kernel.tiles.table import INTERPRETED
from jkv.attention.kernel.work import planning
from jkv.attention.kernel.work.lists import DecodeSizes, PositionSizes, PrefillSizes
from jkv.verbs.attending import plan_attention

# Two kv heads, so that pieces are divided among them.
CONFIG = small_config(num_kv_heads=2, head_dim=16, num_layers=2)


@pytest.fixture
def with_card(monkeypatch):
    """A fake GPU whose kernels are tuned as if interpreted."""
    monkeypatch.setattr(interface, "find_gpu", lambda: DeviceType("cpu", "interpreted"))
    monkeypatch.setattr(planning, "find_local_tuning", lambda _: INTERPRETED)


@pytest.fixture
def with_mi300x(monkeypatch):
    """A fake MI300X, on which nothing runs."""
    monkeypatch.setattr(backend, "find_target", {"rocm": "gfx942", "cuda": None}.get)


@pytest.fixture
def num_listed(monkeypatch):
    """The number of work lists that calls of attention made themselves."""
    made = []

    def list_work(function, *arguments, **options):
        made.append(1)
        return function(*arguments, **options)

    listing = functools.partial(list_work, planning.list_work)
    monkeypatch.setattr(launches, "list_work", listing)
    return made


def step(
    *,
    window=None,
    num_tokens=1,
    implementation="pallas",
    group=2,
    is_exact=False,
    **sizes,
):
    """Take a step after 6, 0 and 3 tokens; return a layer's attention."""
    config = small_config(num_kv_heads=2, head_dim=16, num_layers=2, **sizes)
    cache, opened = jkv.allocate(jkv.init(config), np.zeros(3, np.int32))
    rng = np.random.default_rng(0)
    for lengths in ([6, 0, 3, 0], num_tokens):
        # The last request is padding.
        ids = np.append(np.asarray(opened.seq_ids), -1).astype(np.int32)
        capacity = None if lengths == 1 else 16
        cache, batch = jkv.append(cache, ids, lengths, capacity=capacity)
        rows = rng.standard_normal((batch.num_rows, 2, 16)).astype(np.float32)
        cache = jkv.write(cache, 1, batch, rows, rows[::-1])
    queries = rng.standard_normal((batch.num_rows, 2 * group, 16)).astype(np.float32)
    if is_exact:
        batch = dataclasses.replace(batch, by_position=True, plan=None)
        batch = plan_attention(cache, batch)
    options = {"window": window, "implementation": implementation}
    answer = jkv.attend(cache, 1, batch, queries, return_lse=True, **options)
    return batch, jax.device_get(answer)


def sizes_of(lists, kind):
    """Return the sizes of the lists of one kind."""
    return [each.sizes for each in lists if isinstance(each.sizes, kind)]


# Options of a step with one token each, or more, of three sequences.
CALLS = {
    "decode": {},
    "mixed": {"num_tokens": [1, 2, 1, 0]},
    "windows": {"num_tokens": [1, 2, 1, 0], "window": 3},
    "a cache with a window": {"window": 4, "sliding_window": 4},
    "less than its window": {"window": 2, "sliding_window": 4},
    "nothing": {"num_tokens": [1, 2, 1, 0], "window": jnp.int32(0)},
}


@pytest.mark.newest_further
@pytest.mark.parametrize("call", dealt(CALLS, share=6))
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
@pytest.mark.usefixtures("with_card")
def test_layers_use_the_lists_of_the_step(num_listed, call):
    expected = step(**CALLS[call], implementation="reference")[1]
    batch, answer = step(**CALLS[call])
    assert batch.plan is not None and not num_listed
    for one, other in zip(answer, expected, strict=True):
        assert_close(one, other)
    assert expected[0].any() == (call != "nothing")
    lists = batch.plan[0]["pallas"]
    is_windowed = "sliding_window" in CALLS[call]
    assert {each.is_windowed for each in sizes_of(lists, DecodeSizes)} == {is_windowed}
    assert bool(sizes_of(lists, PrefillSizes)) == ("num_tokens" in CALLS[call])


@pytest.mark.one_end
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
@pytest.mark.usefixtures("with_card")
def test_pieces_by_position_are_listed_once(num_listed):
    call = {"num_tokens": [1, 2, 1, 0], "window": 3}
    expected = step(**call, implementation="reference")[1]
    batch, answer = step(**call, is_exact=True)
    lists = batch.plan[0]["pallas"]
    assert len(sizes_of(lists, PositionSizes)) == len(lists) > 0 and not num_listed
    for one, other in zip(answer, expected, strict=True):
        assert_close(one, other)


@pytest.mark.one_end
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
@pytest.mark.usefixtures("with_card")
def test_other_calls_make_their_own_lists(num_listed):
    batch, answer = step(group=17)
    assert batch.plan is not None and num_listed
    expected = step(group=17, implementation="reference")[1]
    assert_close(answer[0], expected[0])


def score(implementation):
    """Score two prompts with two completions each, by two attention layers."""

    def model(rows_of_tokens, tokens, cache, batch):
        rows = rows_of_tokens[tokens]
        for layer in range(2):
            cache = jkv.write(cache, layer, batch, rows, rows[:, ::-1])
            rows = jkv.attend(cache, layer, batch, rows, implementation=implementation)
        last = jnp.minimum(batch.last_rows, batch.num_rows - 1)
        return rows.reshape(-1, 32)[last], cache

    weights = np.random.default_rng(1).standard_normal((9, 2, 16)).astype(np.float32)
    continuations = [[5, 6], [7], [8, 8], [1, 5]]
    prompts = [[1, 2, 3], [4]]
    return jkv.score(model, weights, prompts, continuations, config=CONFIG)


@pytest.mark.further
@pytest.mark.one_end
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
@pytest.mark.usefixtures("with_card")
def test_scoring_uses_the_lists_of_its_step(num_listed):
    assert_close(score("pallas"), score("reference"))
    assert not num_listed


@pytest.mark.one_end
@pytest.mark.usefixtures("with_mi300x")
def test_plans_use_the_tuning_of_the_gpu():
    cache = jax.eval_shape(lambda: jkv.init(CONFIG))
    batch = jax.eval_shape(lambda cache: jkv.append(cache, [0, 1])[1], cache)
    # As many programs as an MI300X runs at once, for two kv heads.
    (sizes, *_) = sizes_of(batch.plan[0]["pallas"], DecodeSizes)
    assert sizes.least == 8 * 304 // 2 // 2


@pytest.mark.one_end
def test_without_a_gpu_no_work_is_listed():
    cache = jax.eval_shape(lambda: jkv.init(CONFIG))
    batch = jax.eval_shape(lambda cache: jkv.append(cache, [0, 1])[1], cache)
    assert batch.plan is None


@pytest.mark.one_end
@pytest.mark.usefixtures("with_mi300x")
def test_lists_are_not_recomputed():
    """Layers read them through a barrier, which XLA does not duplicate.

    `benchmarks/rocm_compile.py` counts the result.
    """
    cache = jax.eval_shape(lambda: jkv.init(CONFIG))
    traced = jax.jit(lambda cache: jkv.append(cache, [0, 1])[1].plan).trace(cache)
    # The last equation lists the work; its results are the plan.
    outer = traced.jaxpr.jaxpr
    listing = outer.eqns[-1]
    jaxpr = listing.params["jaxpr"].jaxpr
    assert [*map(id, listing.outvars)] == [*map(id, outer.outvars)]
    (barrier,) = [x for x in jaxpr.eqns if x.primitive.name == "optimization_barrier"]
    lists = {id(each) for each in barrier.outvars}
    assert jaxpr.outvars and all(id(each) in lists for each in jaxpr.outvars)


LATENT = {"num_kv_heads": 1, "head_dim": 576, "value_head_dim": 512}
# Changes of the cache, and the number of query heads.
MODELS = {
    "bytes, 3 of each": ({"num_kv_heads": 2, "head_dim": 64, "dtype": "int8"}, 6),
    "latent, 128 heads": (LATENT | {"values_in_keys": True}, 128),
}


@pytest.mark.one_end
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("with_mi300x")
def test_plans_for_all_head_layouts(num_listed, model):
    """Prefill chunks and single tokens in a window, and first rows of a step."""
    changes, num_heads = MODELS[model]
    config = small_config(num_layers=2, **{"dtype": "bfloat16"} | changes)
    cache = jax.eval_shape(lambda: jkv.init(config))
    queries = shape(16, num_heads, config.head_dim, dtype=jnp.bfloat16)

    def attend(cache, window, queries):
        cache, batch = jkv.append(cache, [0, 1], [9, 1], capacity=16)
        first = plan_attention(cache, batch.first_rows(12))
        one = jkv.attend(cache, 0, batch, queries, window=window)
        return one, jkv.attend(cache, 1, first, queries[:12])

    lowered = lower(attend, (cache, shape(), queries), "rocm")
    assert len(find_kernels(lowered)) == 8 and not num_listed


@pytest.mark.one_end
@pytest.mark.usefixtures("with_mi300x")
def test_each_group_has_its_own_lists():
    config = jkv.GroupedConfig.for_context_length(
        4096, max_sequences=2, layer_windows=[None, 64], num_kv_heads=1, head_dim=16
    )
    cache = jax.eval_shape(lambda: jkv.init(config))

    def plan(cache):
        cache, batch = jkv.append(cache, [0, 1], [9, 1], capacity=16)
        first = plan_attention(cache, batch.first_rows(12))
        return [[each["pallas"] for each in step.plan] for step in (batch, first)]

    for groups in jax.eval_shape(plan, cache):
        decode = [sizes_of(lists, DecodeSizes)[0] for lists in groups]
        assert [each.is_windowed for each in decode] == [False, True]
        assert all(sizes_of(lists, PrefillSizes) for lists in groups)
