"""Tests that states and snapshots are updated in place, by the compiled module.

A layer's states have more elements than any other array of a step, so an operation of
that size that is not an in-place update is a copy of them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from support.compiled_hlo import ALL_PASSES, pool_sized_operations
from support.jax_versions import further

import jkv

BATCH_SIZE, MAX_SEQUENCES, NUM_LAYERS, WIDTH, ROWS = 4, 512, 2, 211, 24
NUM_SNAPSHOTS = MAX_SEQUENCES + 1
IDS = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
TOKENS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
PROMPTS = jax.ShapeDtypeStruct((BATCH_SIZE, 32), jnp.int32)

pytestmark = pytest.mark.one_end


@functools.cache
def make_cache():
    """Return the shapes of a cache with states, pending tokens and snapshots."""
    group = jkv.StateConfig(
        num_layers=NUM_LAYERS,
        arrays={"sum": ((WIDTH,), "float32"), "past": ((3, WIDTH), "bfloat16")},
        inputs={"x": ((WIDTH,), "float32")},
        max_sequences=MAX_SEQUENCES,
        max_context_length=64,
        block_size=8,
        max_pending=2,
        num_snapshots=NUM_SNAPSHOTS,
        snapshot_every=8,
    )
    config = jkv.GroupedConfig(
        groups=(group,), layer_groups=(0,) * NUM_LAYERS, prefix_caching=True
    )
    return jax.eval_shape(lambda: jkv.init(config))


def fold_token(state, given):
    total = state["sum"] * 0.5 + given["x"]
    newest = given["x"].astype(jnp.bfloat16)[None]
    past = jnp.concatenate([state["past"][1:], newest])
    return {"sum": total, "past": past}, total + past.sum(0).astype(jnp.float32)


def fold_piece(state, given, count):
    """Fold a chunk; not equal to token by token, as only the layout matters."""
    sums = state["sum"][None] + jnp.cumsum(given["x"], axis=0)
    every = jnp.concatenate([state["past"], given["x"].astype(jnp.bfloat16)])
    past = jax.lax.dynamic_slice_in_dim(every, count, 3)
    return {"sum": sums[-1], "past": past}, sums


def take_step(cache, seq_ids, counts, tokens, layers):
    """Take a step of prompts and single tokens, some of them pending."""
    cache, batch = jkv.append(cache, seq_ids, counts, capacity=ROWS, tokens=tokens)
    x = tokens.astype(jnp.float32)[:, None] * jnp.ones((1, WIDTH))
    for layer in layers:
        x, cache = jkv.fold_state(
            cache, layer, batch, fold_token, {"x": x}, chunk_rule=fold_piece
        )
    return jkv.commit(cache, batch), x


def step_unrolled(cache, seq_ids, counts, tokens):
    return take_step(cache, seq_ids, counts, tokens, range(NUM_LAYERS))


def step_in_a_loop(cache, seq_ids, counts, tokens):
    def step(_, carry):
        cache, total = carry
        cache, x = take_step(cache, seq_ids, counts, tokens, [0, 1])
        return cache, total + x

    return jax.lax.fori_loop(0, 5, step, (cache, jnp.zeros((ROWS, WIDTH))))


def move(cache, seq_ids, counts, prompts):
    """Fork, truncate, reorder, and find sequences in the prefix cache."""
    cache, _ = jkv.fork(cache, seq_ids)
    cache, _ = jkv.truncate(cache, seq_ids, counts)
    cache, _ = jkv.reorder(cache, seq_ids, seq_ids[::-1])
    cache, opened = jkv.allocate(cache, counts, tokens=prompts)
    return cache, opened.seq_ids


def read_old_states(cache, seq_ids, counts, tokens):
    """Return the states before a step as well."""
    after, x = step_unrolled(cache, seq_ids, counts, tokens)
    return after, x, cache.storage[0].rows["sum"]


def list_copies(function, *arguments):
    """Return operations of a donated call that copy a layer's states or snapshots.

    Also assert that the states are aliased to their inputs.
    """
    cache = make_cache()
    compiled = (
        jax.jit(function, donate_argnums=0).lower(cache, *arguments).compile(ALL_PASSES)
    )
    arrays = [a for n, a in cache.storage[0].arrays.items() if n != "bases"]
    layer_size = min(math.prod(array.shape[1:]) for array in arrays)
    assert layer_size == MAX_SEQUENCES * WIDTH
    num_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes
    return pool_sized_operations(compiled, layer_size)


@pytest.mark.parametrize("step", [step_unrolled, *further([step_in_a_loop])])
def test_a_donated_step_copies_no_states(step):
    assert list_copies(step, IDS, IDS, TOKENS) == []


def test_donated_verbs_copy_no_states():
    assert list_copies(move, IDS, IDS, PROMPTS) == []


def test_copies_of_states_are_detected():
    assert list_copies(read_old_states, IDS, IDS, TOKENS) != []
