"""One sequence over several devices: the tokens of each block spread over an axis."""

import collections
import dataclasses
import functools
import math
import re

import chex
import jax
import numpy as np
import pytest
from compiled_modules import pool_sized_operations
from ends import dealt
from jax.sharding import AxisType, PartitionSpec
from places import ROOT
from sharded_model import (
    NUM_HEADS,
    NUM_LAYERS,
    NUM_ROWS,
    WIDTH,
    Layout,
    assert_near,
    collectives,
    place_weights,
    play,
    play_alone,
    take_step,
)
from tolerances import assert_close, is_close

import jkv

ARRAY = re.compile(r"\w+\[[\d,]*\]")


class Spread(Layout):
    """A layout whose blocks of eight tokens lie on several devices."""

    @property
    def config(self):
        return dataclasses.replace(
            super().config, block_size=8, num_blocks=4099, max_context_length=32
        )

    def init(self):
        return jkv.init(self.config, mesh=self.mesh, **self.where)

    @property
    def where(self):
        names = [name for name, _ in self.axes]
        return {"context": "cp"} | ({"heads": "tp"} if "tp" in names else {})


LAYOUTS = {
    "float32, all tokens spread": Spread("sharded", (("cp", 8),), AxisType.Auto),
    "int8, heads too, Explicit": Spread(
        "sharded", (("cp", 2), ("tp", 4)), AxisType.Explicit, "int8"
    ),
    "latent bfloat16": Spread(
        "latent", (("cp", 4), ("tp", 2)), AxisType.Auto, "bfloat16"
    ),
}


def place(layout):
    """Weights: on every device, or their heads spread."""
    if "heads" in layout.where:
        return place_weights(layout)
    one = layout._replace(axes=(("cp", 8), ("tp", 1)))
    return place_weights(one)


@pytest.mark.parametrize("name", dealt(LAYOUTS))
def test_a_donated_step_equals_one_device(name):
    """Chunks of prompts and single tokens; in place; only partial results cross."""
    layout = LAYOUTS[name]
    step = jax.jit(chex.assert_max_traces(take_step, n=1), donate_argnums=0)
    cache, weights = layout.init(), place(layout)
    before = cache.keys.sharding
    rows = np.zeros(3, np.int32), np.zeros(3, np.int32), np.zeros(NUM_ROWS, np.int32)
    compiled = step.lower(cache, weights, *rows).compile()
    cache, logits = play(cache, weights, compiled)
    reference, wanted = play_alone(layout.config)
    assert_near(logits, wanted, layout.dtype)
    jkv.check(cache)
    assert jkv.stats(cache) == jkv.stats(reference)
    for layer in range(NUM_LAYERS):
        found, found_values, length = jax.device_get(jkv.read(cache, layer, 0))
        keys, values, _ = jax.device_get(jkv.read(reference, layer, 0))
        assert length == 7
        assert_near(found[:length], keys[:length], layout.dtype)
        assert_near(found_values[:length], values[:length], layout.dtype)

    # Each device has its share, and the metadata whole.
    assert cache.keys.sharding.is_equivalent_to(before, cache.keys.ndim)
    pools = cache.storage.values()
    for pool, alone in zip(pools, reference.storage.values(), strict=True):
        assert pool.nbytes == alone.nbytes * cache.sharding.copies
        for shard in pool.addressable_shards:
            assert shard.data.nbytes * 8 == pool.nbytes
    for leaf in jax.tree.leaves(cache.metadata):
        assert leaf.sharding.is_fully_replicated
    layer_size = min(math.prod(pool.shape[1:]) for pool in pools) // 8
    assert pool_sized_operations(compiled, layer_size) == []

    # In the loop over layers, each once: what is joined, and the model's own sum.
    num_heads = NUM_HEADS // layout.mesh.shape.get("tp", 1)
    wanted = joined(NUM_ROWS, num_heads, cache.value_head_dim)
    if "tp" in layout.mesh.shape:
        wanted[f"f32[{NUM_ROWS},{WIDTH}]"] += 1
    assert brought(compiled) == wanted


def brought(compiled):
    """What all-reduces bring, array by array: XLA does those of one time together."""
    found = collectives(compiled)
    assert {name for name, _ in found} == {"all-reduce"}
    return collections.Counter(
        array for (_, kind) in found.elements() for array in ARRAY.findall(kind)
    )


def joined(num_rows, num_heads, value_dim):
    """Collectives of a call of attend: maxima, then totals beside weighted values."""
    rows = f"f32[{num_rows},{num_heads}]"
    values = f"f32[{num_rows},{num_heads},{value_dim + 1}]"
    return collections.Counter({rows: 1, values: 1})


@functools.cache
def make_rows(config, num_rows=NUM_ROWS):
    """Keys and values, queries of four times as many heads, and sinks."""
    rng = np.random.default_rng(1)
    heads, width = config.num_kv_heads, config.head_dim
    shapes = [(num_rows, heads, width)] * 2 + [(num_rows, 4 * heads, width)]
    return [rng.standard_normal(each, np.float32) for each in [*shapes, (4 * heads,)]]


def attend_shared(cache, keys, values, queries, sinks, implementation=None):
    """A chunk and a token of each of two, behind a prompt that they share and cut."""
    cache, _ = jkv.allocate(cache, [0])
    cache, batch = jkv.append(cache, [0], [11], capacity=NUM_ROWS)
    cache = jkv.write(cache, 1, batch, values, -keys)
    cache, _ = jkv.fork(cache, [0])
    cache, _ = jkv.truncate(cache, [0], [9])
    cache, batch = jkv.append(cache, [0, 1], [7, 1], capacity=NUM_ROWS)
    cache = jkv.write(cache, 1, batch, keys, -values)
    options = dict(soft_cap=2.0, sinks=sinks, implementation=implementation)
    full, lse = jkv.attend(cache, 1, batch, queries, return_lse=True, **options)
    return full, lse, jkv.attend(cache, 1, batch, queries, window=6, **options)


IMPLEMENTATIONS = {"plain": None, "kernel": "pallas"}


@pytest.mark.parametrize("is_manual", dealt([False, True]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_windows_caps_and_sinks_join_exactly(implementation, is_manual):
    """Under jit, and in the user's own `shard_map`; a sink is counted once."""
    layout = LAYOUTS["float32, all tokens spread"]
    implementation = IMPLEMENTATIONS[implementation]
    cache, rows = layout.init(), make_rows(layout.config)
    function = functools.partial(attend_shared, implementation=implementation)
    if is_manual:
        whole = PartitionSpec()
        specs = jkv.partition_specs(cache), *[whole] * 4
        function = jax.shard_map(
            function, mesh=layout.mesh, in_specs=specs, out_specs=whole
        )
    compiled = jax.jit(function).lower(cache, *rows).compile()
    found = compiled(cache, *rows)
    alone = attend_alone(layout.config)
    for here, there in zip(found, alone, strict=True):
        assert_close(here, there)
    assert not is_close(found[0], alone[2])
    num_heads, width = rows[2].shape[1:]
    twice = joined(NUM_ROWS, num_heads, width)
    assert brought(compiled) == twice + twice


@functools.cache
def attend_alone(config):
    return jax.jit(attend_shared)(jkv.init(config), *make_rows(config))


@pytest.mark.one_end
def test_a_context_of_100k_tokens_on_eight_devices():
    """A chunk and a step of decoding at its end, against a sum in float64."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=800,
        block_size=128,
        max_sequences=2,
        max_context_length=102_400,
        dtype="float32",
    )
    mesh = LAYOUTS["float32, all tokens spread"].mesh
    cache = jkv.init(config, mesh=mesh, context="cp")
    assert {shard.data.nbytes for shard in cache.keys.addressable_shards} == {
        config.num_blocks * config.block_size * config.head_dim * 4 // 8
    }

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(cache, keys, values):
        cache, batch = jkv.append(cache, [0], [len(keys)], capacity=len(keys))
        return jkv.write(cache, 0, batch, keys, values)

    @functools.partial(jax.jit, donate_argnums=0)
    def extend(cache, keys, values, queries):
        cache, batch = jkv.append(cache, [0], [15], capacity=15)
        cache = jkv.write(cache, 0, batch, keys[:15], values[:15])
        chunk = jkv.attend(cache, 0, batch, queries[:15], window=90_000)
        cache, batch = jkv.append(cache, [0])
        cache = jkv.write(cache, 0, batch, keys[15:], values[15:])
        return cache, chunk, jkv.attend(cache, 0, batch, queries[15:])

    rng = np.random.default_rng(0)
    size = 99_984
    keys, values = rng.standard_normal((2, size + 16, 1, 8), np.float32)
    queries = rng.standard_normal((16, 2, 8), np.float32)
    cache, _ = jkv.allocate(cache, [0])
    for start in range(0, size, size // 8):
        stop = start + size // 8
        cache = fill(cache, keys[start:stop], values[start:stop])
    assert jkv.num_free_blocks(cache) == 800 - 782
    compiled = extend.lower(cache, keys[size:], values[size:], queries).compile()
    cache, chunk, last = compiled(cache, keys[size:], values[size:], queries)

    assert brought(compiled) == joined(15, 2, 8) + joined(1, 2, 8)
    assert_close(chunk[3], attend_dense(queries[3], keys[: size + 4], values, 90_000))
    assert_close(last[0], attend_dense(queries[15], keys, values))
    cut = attend_dense(queries[15], keys[:-128], values)
    assert not is_close(last[0], cut)


def attend_dense(query, keys, values, window=0):
    """One row over the last tokens of one kv head, in float64."""
    values = values[: len(keys)][-window:, 0].astype(np.float64)
    keys = keys[-window:, 0].astype(np.float64)
    weights = np.exp(query.astype(np.float64) @ keys.T / np.sqrt(8))
    return weights @ values / weights.sum(axis=1, keepdims=True)


@pytest.mark.one_end
def test_groups_and_debug_mode_on_a_mesh():
    """Layers with windows and without, and a mistake that is found."""
    layers = dict(layer_windows=[8, None], num_kv_heads=2, head_dim=8, step_tokens=8)
    config = jkv.GroupedConfig.for_context_length(
        64, max_sequences=2, block_size=4, dtype="float32", **layers
    )
    axes = (("tp", 2), ("cp", 2))
    mesh = LAYOUTS["int8, heads too, Explicit"]._replace(axes=axes).mesh
    rng = np.random.default_rng(4)
    keys, queries = (rng.standard_normal((8, n, 8), np.float32) for n in (2, 4))

    def step(cache, attends_to=1, writes=True):
        cache, batch = jkv.append(cache, [0, 1], [5, 3], capacity=8)
        if writes:
            for layer in range(2):
                cache = jkv.write(cache, layer, batch, keys, keys * layer)
        return cache, jkv.attend(cache, attends_to, batch, queries)

    found = []
    for where in ({}, dict(mesh=mesh, heads="tp", context="cp")):
        cache, _ = jkv.allocate(jkv.init_groups(config, **where), [0, 0])
        cache, outputs = jax.jit(step)(cache)
        jkv.check(cache)
        found.append(np.asarray(outputs))
    assert_close(found[1], found[0])
    for group in cache.groups:
        assert group.keys.sharding.shard_shape(group.keys.shape)[2:4] == (1, 2)
        assert tuple(jkv.partition_specs(group).keys) == (None, None, "tp", "cp")
    with pytest.raises(ValueError, match="each of cache.groups"):
        jkv.partition_specs(cache)

    watched, forget = jkv.debug(cache.groups[0]), dict(attends_to=0, writes=False)
    watched, _ = jax.jit(functools.partial(step, **forget))(watched)
    with pytest.raises(jkv.DebugError, match="before this step is written"):
        jkv.check(watched)


@pytest.mark.one_end
def test_the_example_of_the_page_runs():
    """What docs/how-to/devices.md shows of one sequence over several devices."""
    page = (ROOT / "docs" / "how-to" / "devices.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if 'context="cp"' in block)
    exec(compile(block, "devices.md", "exec"), {})
