"""Rows with any sharding, in every call of attention, on both kinds of axes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.jax_versions import dealt, further
from support.models.sharded_model import AUTO, TWO_AXES, place_weights, run_model
from support.tolerances import assert_close

import jkv
from jkv.attention import paged_attention

CONFIG = dataclasses.replace(TWO_AXES.config, num_blocks=30, block_size=16)
CONFIG = dataclasses.replace(CONFIG, max_context_length=64, num_layers=1)
# Rows of a step: single tokens, a prompt beside one, two prompts of several blocks.
STEPS = {"tokens": [1, 1], "mixed": [5, 1], "long": [40, 40]}
SPECS = {
    "whole": PartitionSpec(),
    "rows": PartitionSpec("dp"),
    "heads": PartitionSpec(None, "tp"),
    "dims": PartitionSpec(None, None, "tp"),
}


def make_rows(num_rows):
    """Return queries, keys and values."""
    rng = np.random.default_rng(num_rows)
    heads = (2 * CONFIG.num_kv_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)
    shapes = [(num_rows, each, CONFIG.head_dim) for each in heads]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def call_attention(cache, rows, counts):
    """Call attention in each form: causal, windowed, with spans, on plain arrays."""
    queries, keys, values = rows
    num_rows = queries.shape[0]
    cache, opened = jkv.allocate(cache, [0, 0])
    cache, batch = jkv.append(cache, opened.seq_ids, counts, capacity=num_rows)
    cache = jkv.write(cache, 0, batch, keys, values)
    span = jkv.SpanMask(np.zeros(num_rows, np.int32))
    found = [
        *jkv.attend(cache, 0, batch, queries, return_lse=True),
        jkv.attend(cache, 0, batch, queries, window=6, soft_cap=2.0),
        jkv.attend(cache, 0, jkv.with_mask(batch, span), queries),
    ]
    pools = cache.storage[0]
    if pools.sharding is None or not pools.sharding.axes:
        found += paged_attention(
            queries,
            pools.key_pool,
            pools.value_pool,
            0,
            cache.metadata.block_groups[0].block_tables,
            batch.seq_ids,
            batch.query_starts,
            batch.query_lengths,
            batch.context_lengths,
            return_lse=True,
        )
    return cache, found


@functools.cache
def call_alone(step):
    counts = np.asarray(STEPS[step], np.int32)
    rows = make_rows(int(counts.sum()))
    return jax.jit(call_attention)(jkv.init(CONFIG), rows, counts)[1]


# Types of the axes dp and tp.
EXPLICIT, AUTOMATIC = (AxisType.Explicit,) * 2, (AxisType.Auto,) * 2
EXPLICIT_ROWS = AxisType.Explicit, AxisType.Auto
CASES = [
    *further([(EXPLICIT, "nowhere", "long", "whole")]),
    (EXPLICIT, "nowhere", "mixed", "heads"),
    (EXPLICIT, "nowhere", "tokens", "dims"),
    (EXPLICIT, "mesh", "tokens", "rows"),
    (EXPLICIT, "heads", "mixed", "rows"),
    (EXPLICIT, "heads", "tokens", "dims"),
    (AUTOMATIC, "nowhere", "tokens", "rows"),
    (AUTOMATIC, "mesh", "mixed", "heads"),
    (EXPLICIT_ROWS, "heads", "mixed", "rows"),
    *further([(EXPLICIT_ROWS, "mesh", "long", "heads")]),
    *further([(EXPLICIT_ROWS[::-1], "heads", "tokens", "rows")]),
]


@pytest.mark.parametrize("axis_types, where, step, spec", dealt(CASES, turn=1, share=3))
def test_rows_with_any_sharding(axis_types, where, step, spec):
    """Rows on Explicit axes need not match the cache's sharding."""
    devices, names = TWO_AXES.mesh.devices, TWO_AXES.mesh.axis_names
    mesh = jax.sharding.Mesh(devices, names, axis_types)
    at = {"nowhere": {}, "mesh": dict(mesh=mesh), "heads": dict(mesh=mesh, heads="tp")}
    cache, counts = jkv.init(CONFIG, **at[where]), np.asarray(STEPS[step], np.int32)
    rows = [
        jax.device_put(each, NamedSharding(mesh, SPECS[spec]))
        for each in make_rows(int(counts.sum()))
    ]
    after, found = jax.jit(call_attention)(cache, rows, counts)
    for here, there in zip(found, call_alone(step), strict=where != "heads"):
        assert_close(here, there)
    if where != "nowhere":
        pool, old = (each.storage[0].key_pool for each in (after, cache))
        assert pool.sharding.is_equivalent_to(old.sharding, pool.ndim)
    typed = {
        name
        for name, kind in zip(names, axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    if typed:
        parts = jax.typeof(found[0]).sharding.spec
        is_divided = spec == "rows", "heads" in (spec, where)
        assert parts[0] == ("dp" if is_divided[0] and "dp" in typed else None)
        assert parts[1] == ("tp" if is_divided[1] and "tp" in typed else None)


@pytest.mark.one_end
@pytest.mark.parametrize("spec", ["rows", "heads", "dims"])
def test_observed_queries_of_any_sharding(spec):
    """`observe` stores queries on Explicit axes like those of one device."""
    heads = dict(num_query_heads=2 * CONFIG.num_kv_heads, observed_queries=2)
    config = dataclasses.replace(CONFIG, pruning=True, **heads)
    counts = np.asarray([3, 5], np.int32)
    mesh = TWO_AXES.mesh
    queries = make_rows(8)[0]

    @jax.jit
    def observe(cache, queries):
        cache, opened = jkv.allocate(cache, [0, 0])
        cache, batch = jkv.append(cache, opened.seq_ids, counts, capacity=8)
        cache = jkv.observe(cache, 0, batch, queries)
        return jkv.read_queries(jkv.commit(cache, batch), 0, opened.seq_ids)

    placed = jax.device_put(queries, NamedSharding(mesh, SPECS[spec]))
    found = observe(jkv.init(config, mesh=mesh, heads="tp"), placed)
    alone = observe(jkv.init(config), queries)
    np.testing.assert_array_equal(found.queries, alone.queries)
    np.testing.assert_array_equal(found.num, alone.num)


PLACES = {
    "Auto": (AUTO, {}),
    "Explicit": (TWO_AXES, {}),
    "Explicit, heads": (TWO_AXES, {"heads": "tp"}),
}


@pytest.mark.parametrize("layout, where", dealt(PLACES.values()))
def test_a_generation_keeps_the_cache_in_place(layout, where):
    """Sharded weights do not move the pools, so a second call compiles nothing."""

    @functools.partial(jax.jit, donate_argnums=0)
    def generate(cache, weights):
        return jkv.generate(
            run_model, weights, cache, [[3, 1, 4], [2]], max_new_tokens=2
        )

    config = dataclasses.replace(layout.config, num_blocks=40)
    cache, weights = jkv.init(config, mesh=layout.mesh, **where), place_weights(layout)
    for _ in range(2):
        cache, _ = generate(cache, weights)
    assert generate._cache_size() == 1
