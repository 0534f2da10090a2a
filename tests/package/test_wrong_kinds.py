"""Every argument of every public function reports values of a wrong type."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import opened, small_config

import jkv
from jkv.arguments import expect, fits

pytestmark = pytest.mark.one_end


class Wrapped:
    """An array in a wrapper that JAX accepts, such as flax's `nnx.Param`."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def count_on(_params, tokens, cache, batch):
    return jax.nn.one_hot(tokens + 1, 9)[batch.last_rows], cache


def add(state, rows):
    state = {"h": state["h"] + rows["h"]}
    return state, state["h"]


def call(function, bound):
    function(*bound.args, **bound.kwargs)


@functools.cache
def calls():
    """Return arguments of a valid call of each function, by name."""
    cache = opened(3, 3, prefix_caching=True, pruning=True)
    ids = np.array([0, 1], np.int32)
    stepped, batch = jkv.append(cache, ids)
    rows = jnp.ones((2, 1, cache.head_dim), jnp.bfloat16)
    pool, one = jnp.ones((1, 4, 1, 4, 8)), jnp.ones(2, jnp.int32)
    of_requests = (jnp.zeros((2, 2), jnp.int32), jnp.arange(2), jnp.arange(2), one, one)
    of_prompts = count_on, None, cache, [[1, 2]]
    of_states = jkv.init(
        jkv.StateConfig(
            num_layers=1,
            arrays={"h": ((2,), jnp.float32)},
            max_sequences=2,
            max_context_length=8,
        )
    )
    state_batch = jkv.append(jkv.allocate(of_states, [0])[0], [0])[1]
    observing = jkv.init(small_config(observed_queries=2))
    return {
        **dict.fromkeys(("append", "free", "fork", "touch", "swap_out"), (cache, ids)),
        **dict.fromkeys(("allocate", "can_allocate"), (cache, [3])),
        **dict.fromkeys(("block_ids", "block_info", "tokens"), (cache, 0)),
        **dict.fromkeys(
            ("evict_older_than", "evict_cached", "demote", "invalidate"), (cache, 1)
        ),
        **dict.fromkeys(("least_recently_used", "snapshots", "evict"), (cache, 1)),
        **dict.fromkeys(("truncate", "reorder", "slots"), (cache, ids, ids)),
        **dict.fromkeys(("generate", "beam_search", "check_exact"), of_prompts),
        "attend": (stepped, 0, batch, rows),
        "write": (stepped, 0, batch, rows, rows),
        "commit": (stepped, batch),
        "page_table": (stepped, batch),
        "keep_rows": (stepped, batch, np.array([[0], [0]], np.int32)),
        "peek": (cache, ids),
        "record": (stepped, batch, np.zeros((batch.num_rows,), np.int32)),
        "with_drafter": (small_config(), jkv.PromptLookup()),
        "with_mask": (batch, jkv.CausalMask()),
        "match": (cache, [[1, 2, 3, 4]]),
        "overwrite": (cache, 0, ids, [0, 0], rows, rows),
        "prune": (cache, ids, [[0], [1]], 1),
        "scrub": (cache,),
        "top_tokens": (jnp.ones((1, 3)), 1, [2], 2),
        "observe": (stepped, 0, batch, rows),
        "read_queries": (observing, 0, 0),
        "read": (cache, 0, 0),
        "read_slot": (cache, 0, 0, 0),
        "resize": (cache, 16),
        "init": (small_config(),),
        "load": ("a file that is not there",),
        "save": ("no folder/file", cache),
        "swap_in": (cache, jkv.swap_out(cache, [0])[1]),
        "spill": (cache, 1),
        "restore": (cache, jkv.spill(cache, 1)[1]),
        "extend": (count_on, None, cache, [0], [[1, 2]]),
        "score": (count_on, None, [[1]], [[2]]),
        "measure_formats": (count_on, None, [1, 2, 3], small_config(), ["int8"]),
        "paged_attention": (jnp.ones((2, 1, 8)), pool, pool, 0, *of_requests),
        "raise_for_status": (jnp.int32(0),),
        "over_pools": (jkv.free,),
        "read_state": (of_states, 0, state_batch),
        "read_pending": (of_states, 0, state_batch),
        "write_state": (of_states, 0, state_batch, {"h": jnp.ones((1, 2))}),
        "fold_state": (of_states, 0, state_batch, add, {"h": jnp.ones((1, 2))}),
    }


NAMED = {
    "generate": dict(max_new_tokens=2),
    "beam_search": dict(num_beams=2, max_new_tokens=2),
    "check_exact": dict(max_new_tokens=2),
    "extend": dict(max_new_tokens=2),
    "score": dict(config=small_config()),
}
FUNCTIONS = [
    name for name in jkv.__all__ if inspect.isroutine(getattr(jkv, name, None))
]
WRONG = (
    *("5", object(), {"a": 1}, [object()], np.array(["x"]), 10**30),
    *((1, 2, "3"), np.ones((3, 3, 3, 3), np.float32), float("nan"), 1j, None),
)
# Arguments without wrong values, such as a model's parameters.
FREE = {"params"}
EXPECTED = (ValueError, NotImplementedError, jkv.CacheError, OSError)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_wrong_types_are_reported(name):
    function = getattr(jkv, name)
    signature = inspect.signature(inspect.unwrap(function))
    cache = calls()["free"][0]
    good = signature.bind(*calls().get(name, (cache,)), **NAMED.get(name, {}))
    hints = inspect.get_annotations(function, eval_str=True)
    for argument in {*signature.parameters} - FREE - {"fields"}:
        for value in WRONG:
            if fits(value, hints[argument]):
                continue
            wrong = signature.bind(*good.args, **good.kwargs)
            wrong.arguments[argument] = value
            # Some are accepted, such as a str as a list of names.
            with contextlib.suppress(*EXPECTED):
                jax.eval_shape(functools.partial(call, function, wrong))


def test_array_wrappers_are_accepted():
    """Verbs, functions without a cache, and functions inside jit accept them."""
    plain = dict.fromkeys(
        ("attend", "write", "append", "paged_attention", "fold_state")
    )
    for name in plain:
        args = calls()[name]
        wrapped = [Wrapped(a) if isinstance(a, jax.Array) else a for a in args]
        jax.eval_shape(functools.partial(getattr(jkv, name), *wrapped))
    stepped, _, batch, rows = calls()["attend"]
    expected = jkv.attend(stepped, 0, batch, rows, sinks=jnp.ones(1))
    found = jax.jit(
        lambda rows: jkv.attend(
            stepped, 0, batch, Wrapped(rows), sinks=Wrapped(jnp.ones(1))
        )
    )(rows)
    np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            lambda: attend(sinks=[1.0]),
            "sinks must be an array, [H] with H = ",
        ),
        (lambda: attend(soft_cap="5"), "soft_cap must be a number or None"),
        (lambda: attend(scale=np.ones(2)), "scale must be one number"),
        (lambda: attend(window=10**30), "in 1..2^31-1"),
        (
            lambda: paged(4, [[0, 1], [0, 1]]),
            "block_tables must be an array, int32[S, M]",
        ),
        (
            lambda: paged(8, [1, 1]),
            "context_lengths must be an array, int32[B]",
        ),
        (lambda: paged(3, 0.5), "layer must be an int or i32[]"),
        (lambda: free("5"), "seq_ids must be an int or a one-dimensional integer"),
        (lambda: swap_in_a_pair(), "swapped must be Swapped, got tuple"),
        (lambda: jkv.init(small_config(), device="cpu"), "device must be"),
    ],
)
def test_error_messages(mistake, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mistake()


def attend(**options):
    return jkv.attend(*calls()["attend"], **options)


def paged(place, value):
    args = [*calls()["paged_attention"]]
    args[place] = value
    return jkv.paged_attention(*args)


def free(seq_ids):
    return jkv.free(calls()["free"][0], seq_ids)


def swap_in_a_pair():
    cache = calls()["free"][0]
    return jkv.swap_in(cache, jkv.swap_out(cache, [0]))


def test_errors_of_other_causes_are_unchanged():
    def broken(_params, _tokens, _cache, _batch):
        raise TypeError("of the model")

    cache = jkv.init(small_config())
    with pytest.raises(TypeError, match="of the model"):
        jkv.generate(broken, None, cache, [[1]], max_new_tokens=1)
    with pytest.raises(TypeError, match="missing 1 required"):
        jkv.free(cache)


@pytest.mark.parametrize(
    ("axes", "sizes", "kind", "words"),
    [
        ("R H D", {}, jnp.floating, None),
        ("R 3 D", {"R": 2}, None, None),
        ("R ...", {"R": 2}, np.dtype(np.float32), None),
        ("A | R H D", {}, None, None),
        ("R H", {}, jnp.floating, "x must be float[R, H], got float32[2, 3, 4]"),
        ("R H R", {}, None, "x must be [R, H, R], got"),
        ("R 2 D", {}, None, "x must be [R, 2, D], got"),
        ("R ...", {"R": 5}, None, "x must be [R, ...] with R = 5, got"),
        ("A |", {"A": 7}, None, "x must be [A] or [] with A = 7, got"),
        ("R H D", {}, jnp.integer, "x must be int32[R, H, D], got float32[2, 3, 4]"),
        ("R H D", {}, np.dtype(np.float16), "x must be float16[R, H, D], got"),
    ],
)
@pytest.mark.one_end
def test_arrays_with_wrong_axes_are_named(axes, sizes, kind, words):
    array = np.zeros((2, 3, 4), np.float32)
    if words is None:
        found = expect("x", array, axes, sizes, kind)
        assert found["R"] == 2 and found.get("D", 4) == 4
        return
    with pytest.raises(jkv.UsageError, match=re.escape(words)):
        expect("x", array, axes, sizes, kind)
    with pytest.raises(jkv.UsageError, match="x must be an array, .*, as y, got list"):
        expect("x", [1], axes, sizes, kind, why="as y")
