"""Save and load every kind of cache that can be configured.

Each cache has two sequences that diverged, one of which was freed, a truncated one if
possible, and one with only reserved blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import with_further
from support.small_caches import small_config

import jkv

pytestmark = pytest.mark.one_end

WIDTH, ROWS, PENDING = 3, 16, 2
SHARED = dict(max_sequences=4, max_context_length=14, block_size=4)
WINDOW = dict(sliding_window=5)
# The order of names differs from that of sizes: a file stores the largest elements
# first.
STATE = {
    "count": ((2,), "int16"),
    "past": ((3, 2), "bfloat16"),
    "sum": ((2,), "float32"),
}
INPUT = {"at": ((), "int8"), "token": ((2,), "bfloat16")}


def grouped(*groups, layers, **options):
    return jkv.GroupedConfig(groups=groups, layer_groups=layers, **options)


def state(pending=0, snapshots=0, **changes):
    fields = dict(
        num_layers=2,
        arrays=STATE,
        max_pending=pending,
        inputs=INPUT if pending else None,
        num_snapshots=snapshots,
        snapshot_every=8 if snapshots else None,
        heads_axes={"sum": 0},
    )
    return jkv.StateConfig(**(SHARED | fields | changes))


def with_state(*keys, pending=0, snapshots=0, **options):
    """Return recurrent layers; one of them also has keys."""
    layers = ((0, 1), (), 0) if keys else (0, 0)
    groups = state(pending, snapshots), *keys
    return grouped(*groups, layers=layers, **options)


INDEX = dict(prefix_caching=True)
KINDS = {
    **{
        dtype: small_config(dtype=dtype, value_head_dim=3)
        for dtype in (
            *("float32", "float16", "bfloat16"),
            *("int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
        )
    },
    "int8, int4": small_config(dtype="int8", value_dtype="int4"),
    "latent": small_config(dtype="int8", value_head_dim=1, values_in_keys=True),
    "pruning, queries": small_config(
        dtype="bfloat16", pruning=True, observed_queries=2
    ),
    "classes": small_config(keep_classes=3, **INDEX),
    "tokens": small_config(record_tokens=True),
    "index": small_config(**INDEX),
    "window": small_config(**WINDOW),
    "window, sinks, tokens": small_config(
        **WINDOW, num_sink_tokens=1, record_tokens=True
    ),
    "window, index": small_config(**WINDOW, **INDEX),
    "groups": grouped(
        small_config(**WINDOW, num_layers=2, dtype="fp8"),
        small_config(num_kv_heads=2, record_tokens=True),
        layers=(0, (), 1, 0),
    ),
    "groups, index": grouped(
        small_config(**WINDOW, num_sink_tokens=1),
        small_config(),
        layers=(1, 0),
        **INDEX,
    ),
    "state alone": state(),
    "snapshots without index": state(snapshots=3),
    "two states": grouped(
        state(PENDING),
        state(PENDING, num_layers=1, arrays={"sum": ((2,), "uint8")}),
        layers=(0, 1, 0),
    ),
    "state": with_state(),
    "state, index": with_state(snapshots=3, **INDEX),
    "state, pending": with_state(pending=PENDING),
    "state, pending, index": with_state(pending=PENDING, snapshots=3, **INDEX),
    "state, keys": with_state(small_config()),
    "state, keys, pending, no index": with_state(
        small_config(), pending=PENDING, snapshots=3
    ),
    "state, window, pending, index": with_state(
        small_config(**WINDOW, dtype="int8"), pending=PENDING, snapshots=3, **INDEX
    ),
}


# Kinds that `make test` runs in full; of the others it only loads an empty cache.
FIRST = (
    *("groups", "two states", "state"),
    "state, keys, pending, no index",
)
LATER = [kind for kind in KINDS if kind not in FIRST]


@jax.jit
def step(cache, seq_ids, counts, tokens):
    """Append tokens, and write rows computed from them in each layer."""
    pending = cache.metadata.max_pending
    cache, batch = jkv.append(
        cache, seq_ids, counts, capacity=ROWS, tokens=tokens, num_pending=pending
    )
    numbers = (tokens + batch.positions).astype(jnp.float32)
    for layer, groups in enumerate(cache.layer_groups):
        for group in groups:
            write_group = (
                write if cache.storage[group].kind == "blocks" else write_state
            )
            cache = write_group(cache, layer, batch, numbers)
    return jkv.commit(cache, batch)


def write(cache, layer, batch, numbers):
    storage = cache.storage[cache.find_layer(layer).group]
    widths = storage.head_dim, storage.value_head_dim
    rows = [
        numbers[:, None, None] + jnp.ones((ROWS, storage.num_kv_heads, width))
        for width in widths
    ]
    cache = jkv.observe(cache, layer, batch, rows[0])
    if storage.value_pool is None:
        rows[1] = None
    return jkv.write(cache, layer, batch, *rows)


def write_state(cache, layer, batch, numbers):
    def add(array, numbers):
        spread = numbers.reshape(-1, *[1] * (array.ndim - 1))
        return array + spread.astype(array.dtype)

    storage = cache.storage[cache.find_state(layer).group]
    states = jkv.read_state(cache, layer, batch)
    states = {name: add(array, batch.context_lengths) for name, array in states.items()}
    inputs = {
        name: add(jnp.zeros((ROWS, *array.shape[3:]), dtype), numbers)
        for (name, array), dtype in zip(
            sorted(storage.inputs.items()), storage.input_dtypes, strict=True
        )
    }
    return jkv.write_state(cache, layer, batch, states, inputs)


@jax.jit
def live(cache):
    """Return a cache with diverged, truncated, freed and reserved sequences."""
    tokens = jnp.arange(WIDTH * ROWS, dtype=jnp.int32).reshape(WIDTH, ROWS)
    counts = jnp.array([0, 0, 7], jnp.int32)
    prompts = tokens if cache.metadata.index is not None else None
    cache, opened = jkv.allocate(cache, counts, tokens=prompts)
    ids = opened.seq_ids
    cache = step(cache, ids, jnp.array([8, 6, 0]), tokens[0])
    cache, _ = jkv.fork(cache, ids[:1])
    cache, _ = jkv.truncate(cache, ids[1:2], 5)
    cache, _ = jkv.free(cache, ids[:1])
    return cache


def go_on(cache):
    ids, counts = np.array([1, 2, 3], np.int32), np.array([3, 0, 5], np.int32)
    return step(cache, ids, counts, np.arange(20, 20 + ROWS, dtype=np.int32))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in (map(np.asarray, pair) for pair in pairs):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def apart(cache, seq_ids):
    """Return the contents of sequences, without their ids and the index."""
    swapped = jkv.swap_out(cache, seq_ids)[1]
    return {**vars(swapped), "seq_ids": None, "committed": None}


@pytest.mark.parametrize("kind", with_further(KINDS, *LATER))
def test_load_restores_the_saved_cache(tmp_path, kind):
    cache = live(jkv.init(KINDS[kind]))
    jkv.check(cache)
    jkv.save(tmp_path / "cache", cache)
    loaded = jkv.load(tmp_path / "cache")
    jkv.check(loaded)
    assert_same(loaded, cache)
    assert_same(go_on(loaded), go_on(cache))
    other, back = jkv.load(tmp_path / "cache", jkv.init(KINDS[kind]))
    jkv.check(other)
    open_ids = np.flatnonzero(cache.metadata.is_open)
    assert_same(apart(other, back.seq_ids), apart(cache, open_ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", [True, False])
def test_an_empty_cache(tmp_path, kind, storage):
    cache = jkv.init(KINDS[kind], storage=storage)
    jkv.save(tmp_path / "cache", cache)
    loaded = jkv.load(tmp_path / "cache")
    jkv.check(loaded)
    assert_same(loaded, cache)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_a_state_dtype_without_a_file_format_is_refused(dtype):
    with pytest.raises(ValueError, match=f"of whole bytes, got {dtype}"):
        state(arrays={"sum": ((2,), dtype)})
