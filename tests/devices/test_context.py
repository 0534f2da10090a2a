"""Context parallelism: the tokens of each block are sharded over an axis."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import dealt
from support.models.sharded_model import (
    NUM_ROWS,
    TOKENS,
    TWO_AXES,
    arrays_joined,
    joined,
)
from support.paths import ROOT
from support.tolerances import assert_close, is_close

import jkv


@functools.cache
def make_rows(config, num_rows=NUM_ROWS):
    """Return keys and values, queries of four times as many heads, and sinks."""
    rng = np.random.default_rng(1)
    heads, width = config.num_kv_heads, config.head_dim
    shapes = [(num_rows, heads, width)] * 2 + [(num_rows, 4 * heads, width)]
    return [rng.standard_normal(each, np.float32) for each in [*shapes, (4 * heads,)]]


@jax.jit
def share(cache, keys, values):
    """Return a prompt shared by two sequences, one of which is truncated."""
    cache, _ = jkv.allocate(cache, [0])
    cache, batch = jkv.append(cache, [0], [11], capacity=NUM_ROWS)
    cache = jkv.write(cache, 1, batch, values, -keys)
    cache, _ = jkv.fork(cache, [0])
    return jkv.truncate(cache, [0], [9])[0]


LAYOUT = TOKENS._replace(heads="repeated")


@functools.cache
def make_call(is_alone):
    """Return two sequences on one device or on the mesh, and rows to attend with."""
    rows = make_rows(LAYOUT.config)
    cache = jkv.init(LAYOUT.config) if is_alone else LAYOUT.init()
    return share(cache, *rows[:2]), *rows


def attend_shared(cache, keys, values, queries, sinks, implementation=None):
    """Attend with a chunk and a single token after the shared prefix."""
    cache, batch = jkv.append(cache, [0, 1], [7, 1], capacity=NUM_ROWS)
    cache = jkv.write(cache, 1, batch, keys, -values)
    options = dict(soft_cap=2.0, sinks=sinks, implementation=implementation)
    full, lse = jkv.attend(cache, 1, batch, queries, return_lse=True, **options)
    return full, lse, jkv.attend(cache, 1, batch, queries, window=6, **options)


WAYS = [(None, False), (None, True), ("pallas", True)]


@pytest.mark.parametrize("implementation, is_manual", dealt(WAYS, share=3))
def test_windows_caps_and_sinks_equal_one_device(implementation, is_manual):
    """Under jit, and in the user's own `shard_map`; a sink is counted once."""
    call = make_call(is_alone=False)
    function = functools.partial(attend_shared, implementation=implementation)
    if is_manual:
        whole = PartitionSpec()
        specs = jkv.partition_specs(call[0]), *[whole] * 4
        function = jax.shard_map(
            function, mesh=LAYOUT.mesh, in_specs=specs, out_specs=whole
        )
    compiled = jax.jit(function).lower(*call).compile(ALL_PASSES)
    found, alone = compiled(*call), attend_alone()
    for here, there in zip(found, alone, strict=True):
        assert_close(here, there)
    assert not is_close(found[0], alone[2])
    num_heads, width = call[3].shape[1:]
    twice = joined(NUM_ROWS, num_heads, width)
    assert arrays_joined(compiled) == twice + twice


@pytest.mark.one_end
@pytest.mark.parametrize("sizes", [(), (1,), (3,)])
def test_sinks_of_another_shape_are_refused(sizes):
    """The join of the devices' results adds the sinks, and could broadcast them."""
    cache, *rows, _ = make_call(is_alone=False)
    with pytest.raises(ValueError, match=r"sinks must be \[H\] with H = "):
        jax.eval_shape(attend_shared, cache, *rows, np.ones(sizes, np.float32))


@functools.cache
def attend_alone():
    return jax.jit(attend_shared)(*make_call(is_alone=True))


@pytest.mark.one_end
def test_a_context_of_100k_tokens_on_eight_devices():
    """A chunk and a decode step at its end, compared with float64."""
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
    mesh = TOKENS._replace(axes=(("cp", 8),)).mesh
    cache = jkv.init(config, mesh=mesh, context="cp")
    assert {
        shard.data.nbytes for shard in cache.storage[0].key_pool.addressable_shards
    } == {config.num_blocks * config.block_size * config.head_dim * 4 // 8}

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
    compiled = extend.lower(cache, keys[size:], values[size:], queries).compile(
        ALL_PASSES
    )
    cache, chunk, last = compiled(cache, keys[size:], values[size:], queries)

    assert arrays_joined(compiled) == joined(15, 2, 8) + joined(1, 2, 8)
    assert_close(chunk[3], attend_dense(queries[3], keys[: size + 4], values, 90_000))
    assert_close(last[0], attend_dense(queries[15], keys, values))
    cut = attend_dense(queries[15], keys[:-128], values)
    assert not is_close(last[0], cut)


def attend_dense(query, keys, values, window=0):
    """Attend with one row to the last tokens of one kv head, in float64."""
    values = values[: len(keys)][-window:, 0].astype(np.float64)
    keys = keys[-window:, 0].astype(np.float64)
    weights = np.exp(query.astype(np.float64) @ keys.T / np.sqrt(8))
    return weights @ values / weights.sum(axis=1, keepdims=True)


@pytest.mark.one_end
def test_groups_and_debug_mode_on_a_mesh():
    """Layers with and without windows, and an error that is detected."""
    layers = dict(layer_windows=[8, None], num_kv_heads=2, head_dim=8, step_tokens=8)
    config = jkv.GroupedConfig.for_context_length(
        64, max_sequences=2, block_size=4, dtype="float32", **layers
    )
    axes = (("tp", 2), ("cp", 2))
    mesh = TWO_AXES._replace(axes=axes).mesh
    rng = np.random.default_rng(4)
    keys, queries = (rng.standard_normal((8, n, 8), np.float32) for n in (2, 4))

    def step(cache, attends_to=1, writes=True):
        cache, batch = jkv.append(cache, [0, 1], [5, 3], capacity=8)
        if writes:
            for layer in range(2):
                cache = jkv.write(cache, layer, batch, keys, keys * layer)
        return cache, jkv.attend(cache, attends_to, batch, queries)

    cache = jkv.init(config, mesh=mesh, heads="tp", context="cp")
    cache, found = jax.jit(step)(jkv.allocate(cache, [0, 0])[0])
    outputs = np.asarray(found)
    jkv.check(cache)
    for row, head in itertools.product(range(8), range(2)):
        # Five rows of one sequence, three of another; two query heads per kv head.
        seen = keys[5 * (row >= 5) : row + 1, head : head + 1]
        mine = slice(2 * head, 2 * head + 2)
        assert_close(outputs[row, mine], attend_dense(queries[row, mine], seen, seen))
    specs = jkv.partition_specs(cache)
    for group, spec in zip(cache.storage, specs.storage, strict=True):
        pool = group.key_pool
        assert pool.sharding.shard_shape(pool.shape)[2:4] == (1, 2)
        assert tuple(spec.key_pool) == (None, None, "tp", "cp")

    watched, forget = jkv.debug(cache), dict(writes=False)
    watched, _ = jax.jit(functools.partial(step, **forget))(watched)
    with pytest.raises(jkv.DebugError, match="before this step is written"):
        jkv.check(watched)


@pytest.mark.one_end
def test_the_example_of_the_page_runs():
    """Context parallelism in docs/how-to/sharding.md."""
    page = (ROOT / "docs" / "how-to" / "sharding.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if 'context="cp"' in block)
    exec(compile(block, "sharding.md", "exec"), {})
