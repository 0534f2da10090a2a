"""Functions on a cache with several pools: each works as its table entry states."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jkv
import jkv.decoding

pytestmark = pytest.mark.one_end
MESH = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
CONFIG = jkv.CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    num_blocks=24,
    block_size=4,
    max_sequences=6,
    max_context_length=24,
    dtype="float32",
    prefix_caching=True,
)
IDS = np.int32([[0, 1], [1, -1]])
ONE = np.int32([0, 1])  # a number for each rank
OBSERVED = dict(pruning=True, observed_queries=2)
# Functions that accept a cache with pools.
WHOLE = {"generate", "load", "partition_specs", "raise_for_status", "save"}
# Called through over_pools: arguments of each rank, and arguments of all.
OF_RANKS = {
    "allocate": ([np.int32([[3, 9], [5, -1]])], {}),
    "append": ([IDS, np.int32([[5, 3], [4, 0]])], dict(capacity=8)),
    "block_ids": ([ONE], {}),
    "block_info": ([ONE], {}),
    "can_allocate": ([IDS], {}),
    "clear_prefixes": ([], {}),
    "clock": ([], {}),
    "compact": ([], {}),
    "context_lengths": ([], {}),
    "evict": ([ONE], dict(protect=-1)),
    "evict_cached": ([ONE], {}),
    "evict_older_than": ([ONE], {}),
    "fork": ([IDS, IDS], {}),
    "free": ([IDS], {}),
    "demote": ([ONE], {}),
    "invalidate": ([ONE], {}),
    "kept_from": ([], {}),
    "least_recently_used": ([], dict(num_sequences=2)),
    "match": ([np.ones((2, 1, 6), np.int32)], dict(salts=3)),
    "next_positions": ([], {}),
    "num_free_blocks": ([], {}),
    "overwrite": (
        [0 * ONE, IDS, 0 * IDS, *[np.ones((2, 2, 1, 8), np.float32)] * 2],
        {},
    ),
    "peek": ([IDS], dict(num_rows=2)),
    "prune": ([IDS, np.int32([[[0, 2]] * 2] * 2), IDS], {}),
    "read": ([0 * ONE, ONE], dict(return_start=True)),
    "read_queries": ([0 * ONE, IDS], {}),
    "read_slot": ([0 * ONE, ONE, ONE], {}),
    "reorder": ([IDS, IDS], {}),
    "scrub": ([], {}),
    "slots": ([IDS, IDS], {}),
    "snapshots": ([ONE], {}),
    "split_pools": None,
    "tokens": ([ONE], {}),
    "touch": ([IDS], {}),
    "truncate": ([IDS, IDS], {}),
}
ON_HOST = {
    "check": (),
    "debug": (),
    "fragmentation": (),
    "memory_profile": (),
    "resize": (30,),
    "restore": None,
    "should_compact": (),
    "spill": (1,),
    "stats": (),
    "check_exact": None,
    "swap_in": None,
    "swap_out": ([-1],),
}
# Called in a step, below.
IN_STEPS = {
    "write",
    "attend",
    "page_table",
    "commit",
    "keep_rows",
    "observe",
    "record",
    "add_prompts",
    "cancel",
    "preempt",
}
# Functions of recurrent layers: `test_states_on_devices.py` has a model's steps.
IN_STEPS |= {"fold_state", "read_state", "read_pending", "write_state"}
CACHE_LATER = {"beam_search", "extend", "begin", "prefill", "decode"}


def find_functions():
    """Return the public functions with a cache argument, by name."""
    both = {name: getattr(jkv, name) for name in jkv.__all__}
    both |= {name: getattr(jkv.decoding, name) for name in jkv.decoding.__all__}
    return {
        name: function
        for name, function in both.items()
        if inspect.isfunction(function)
        and "cache" in inspect.signature(function).parameters
    }


def init(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jkv.init(config, mesh=MESH, pools="dp")


def test_every_public_function_is_covered():
    named = WHOLE | OF_RANKS.keys() | ON_HOST.keys() | IN_STEPS | CACHE_LATER
    assert named == find_functions().keys()


@pytest.mark.parametrize("name", [name for name, how in OF_RANKS.items() if how])
def test_a_verb_is_called_through_over_pools(name):
    function, (arguments, whole) = find_functions()[name], OF_RANKS[name]
    changes = {"prune": dict(pruning=True), "read_queries": OBSERVED}.get(name, {})
    cache = jax.eval_shape(functools.partial(init, **changes))
    over = jkv.over_pools(function)
    answer = jax.eval_shape(functools.partial(over, **whole), cache, *arguments)
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(answer))
    with pytest.raises(ValueError, match=rf"jkv.over_pools\({name}\)\(cache, ...\)"):
        function(cache, *arguments, **whole)


@pytest.mark.parametrize(
    "name", [n for n, given in ON_HOST.items() if given is not None]
)
def test_a_host_function_accepts_a_split_pool(name):
    function, arguments = find_functions()[name], ON_HOST[name]
    cache = init()
    with pytest.raises(ValueError, match=r"jkv.split_pools\(cache\) returns a copy"):
        function(cache, *arguments)
    for pool in jkv.split_pools(cache):
        function(pool, *arguments)


def count_on(params, tokens, cache, batch):
    """A model that writes and attends, and whose next token is the token plus one."""
    rows = params["rows"].at[tokens].get(mode="clip")[:, None]
    cache = jkv.write(cache, 0, batch, rows, rows)
    seen = jkv.attend(cache, 0, batch, rows)
    logits = 9.0 * jax.nn.one_hot(tokens + 1, 16) + 1e-6 * seen.sum()
    return logits[batch.last_rows], cache


def place_params():
    """Return weights on the mesh, sharded over its other axis."""
    rows = np.arange(128, dtype=np.float32).reshape(16, 8) / 64
    where = NamedSharding(MESH, PartitionSpec("tp"))
    return {"rows": jax.device_put(rows, where)}


def play_beams(cache, prompts, *, params, model):
    options = dict(num_beams=2, max_new_tokens=3)
    return jkv.beam_search(model, params, cache, prompts, **options)


def play_extend(cache, prompts, *, params, model):
    cache, opened = jkv.allocate(cache, [0, 0])
    return jkv.extend(model, params, cache, opened.seq_ids, prompts, max_new_tokens=3)


def play_windows(cache, prompts, *, params, model):
    """Call the other functions that take their cache later, and functions of states."""
    options = dict(max_new_tokens=3, max_running=2)
    state = jkv.decoding.begin(model, params, cache, prompts, **options)
    state = jkv.decoding.add_prompts(cache, state, [0], prompts[:1] + 1)
    cache, state = jkv.decoding.cancel(cache, state, jnp.array([False, True]))
    return jkv.decoding.decode(model, params, cache, state)


def play_prefill(cache, prompts, *, params, model):
    return jkv.decoding.prefill(model, params, cache, prompts, max_new_tokens=3)


PROMPTS = np.int32([[[1, 2, 3], [4, 5, -1]], [[6, 7, 8], [9, -1, -1]]])


@pytest.mark.parametrize("step", [play_beams, play_extend, play_windows, play_prefill])
def test_cache_last_functions_run_over_pools_in_a_step(step):
    whole = dict(params=place_params(), model=count_on)
    over = functools.partial(jkv.over_pools(step), **whole)
    cache = jax.eval_shape(functools.partial(init, prefix_caching=False))
    cache, *answer = jax.eval_shape(over, cache, PROMPTS)
    assert cache.pools is not None
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(answer))


@pytest.mark.parametrize("name", sorted(CACHE_LATER - {"decode"}))
def test_cache_last_functions_suggest_a_step(name):
    with pytest.raises(
        ValueError, match=r"jkv.over_pools\(step\)\(cache, prompts, par"
    ):
        find_functions()[name](count_on, None, init(), PROMPTS, max_new_tokens=3)


def take_step(cache, tokens, *, params, capacity):
    """Append three tokens to one sequence and two to another."""
    cache, opened = jkv.allocate(cache, [0, 0])
    counts = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
    cache, batch = jkv.append(cache, opened.seq_ids, counts, capacity=capacity)
    rows = params["rows"].at[tokens.reshape(-1)].get(mode="clip")[:, None]
    cache = jkv.write(cache, 0, batch, rows, 2 * rows)
    cache = jkv.observe(cache, 0, batch, rows)
    seen = jkv.attend(cache, 0, batch, rows)
    cache = jkv.record(cache, batch, tokens.reshape(-1))
    pages = jkv.page_table(cache, batch)
    numbers = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    kept = jnp.where(numbers[None] < counts[:, None], numbers[None], -1)
    cache, batch, _ = jkv.keep_rows(cache, batch, kept)
    return jkv.commit(cache, batch), seen, pages


@pytest.mark.further
def test_a_step_receives_sharded_weights_whole():
    """Compared with numpy, for causal rows of two sequences."""
    params = place_params()
    step = jax.jit(
        jkv.over_pools(take_step), static_argnames="capacity", donate_argnums=0
    )
    cache, found, pages = step(init(), PROMPTS, params=params, capacity=6)
    assert np.diff(pages.query_indptr).tolist() == [[3, 2], [3, 1]]
    rows = np.asarray(params["rows"])
    for prompts, seen in zip(PROMPTS, np.asarray(found), strict=True):
        expected = []
        for prompt in prompts:
            own = rows[prompt[prompt >= 0]]
            for place, row in enumerate(own):
                weights = np.exp(own[: place + 1] @ row / np.sqrt(8))
                expected.append(weights / weights.sum() @ own[: place + 1] * 2)
        np.testing.assert_allclose(seen[: len(expected), 0], expected, rtol=1e-5)
    assert cache.metadata.context_lengths[:, :2].tolist() == [[3, 2], [3, 1]]

    def close_over(cache, tokens):
        return take_step(cache, tokens, params=params, capacity=6)

    with pytest.raises(ValueError, match="mesh"):  # as documented
        jax.eval_shape(jkv.over_pools(close_over), jax.eval_shape(init), PROMPTS)


def test_mismatched_arguments_are_refused():
    over, cache = jkv.over_pools(take_step), init()
    with pytest.raises(
        ValueError, match=r"argument 1 .* \[3, 2\].* the 2 ranks of mesh"
    ):
        over(cache, np.zeros((3, 2), np.int32), params=None, capacity=6)
    with pytest.raises(ValueError, match=r"argument 1 has an array of shape \[\]"):
        jkv.over_pools(jkv.free)(cache, [0])
    with pytest.raises(ValueError, match="capacity holds a set, neither an array"):
        over(cache, PROMPTS, params=None, capacity={6})
