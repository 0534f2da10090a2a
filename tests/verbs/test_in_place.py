"""Tests that donated steps update the pool in place, by their compiled modules.

XLA shows every copy it makes. The element count of these pools occurs nowhere else, so
an operation of that size that is not an in-place update is a copy of the pool, under
any name. Each verb is compiled once for all checks.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from support.compiled_hlo import ALL_PASSES, pool_sized_operations
from support.jax_versions import dealt, few, further, with_further
from support.small_caches import small_cache, small_config, with_metadata

import jkv
from jkv.formats.table import FORMATS

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 2, 16, 8, 4099
BATCH_SIZE, NUM_HEADS = 4, 4
MAX_SEQUENCES = 512  # times 13 columns: block tables exceed the pool's lists
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn]
IDS = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)


@functools.cache
def make_cache(dtype, **changes):
    """Return the shapes of a cache whose pool dwarfs a step's working memory."""
    config = jkv.CacheConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=MAX_SEQUENCES,
        max_context_length=100,
        dtype=dtype,
        **changes,
    )
    return jax.eval_shape(lambda: jkv.init(config))


def pools_of(cache):
    return [pool for storage in cache.storage for pool in storage.arrays.values()]


def pool_bytes(cache):
    pool = cache.storage[0].key_pool
    return math.prod(pool.shape) * pool.dtype.itemsize


@functools.cache
def compile_donated(function, cache, *arguments):
    """Compile a function with its first argument donated; cached by identity."""
    return (
        jax.jit(function, donate_argnums=0).lower(cache, *arguments).compile(ALL_PASSES)
    )


def assert_in_place(function, *arguments):
    """Assert that no operation makes another copy of the donated pool."""
    cache, compiled = arguments[0], compile_donated(function, *arguments)
    layer_size = min(math.prod(pool.shape[1:]) for pool in pools_of(cache))
    assert pool_sized_operations(compiled, layer_size) == []
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pool_bytes(cache) / 4
    # All pools are aliased to their inputs.
    storage = sum(
        math.prod(pool.shape) * pool.dtype.itemsize for pool in pools_of(cache)
    )
    assert memory.alias_size_in_bytes >= storage


def copied_metadata(function, *arguments):
    """Return the compiled function's copies of tables and of per-block arrays."""
    compiled = compile_donated(function, *arguments)
    operations = pool_sized_operations(compiled, NUM_BLOCKS)
    return [each for each in operations if each.startswith("copy")]


def attend_layer(cache, layer, batch, hidden):
    """A model's work per layer: project, write, attend, add."""
    kv = (BATCH_SIZE, NUM_KV_HEADS, HEAD_DIM)
    keys = hidden[:, :NUM_KV_HEADS].reshape(kv)
    cache = jkv.write(cache, layer, batch, keys, keys * 2)
    return cache, hidden + jkv.attend(cache, layer, batch, hidden)


def step_unrolled(cache, seq_ids, hidden):
    cache, batch = jkv.append(cache, seq_ids)
    for layer in range(NUM_LAYERS):
        cache, hidden = attend_layer(cache, layer, batch, hidden)
    return jkv.commit(cache, batch), hidden


def step_with_independent_keys(cache, seq_ids, hidden):
    """Take a step in which no layer's keys depend on another layer."""
    cache, batch = jkv.append(cache, seq_ids)
    step, keys = jkv.Step(cache, batch), hidden[:, :NUM_KV_HEADS]
    heads = [step.attend(hidden, keys, keys) for _ in range(NUM_LAYERS)]
    return jkv.commit(step.cache, batch), sum(heads)


def step_scanned(cache, seq_ids, hidden):
    cache, batch = jkv.append(cache, seq_ids)

    def body(carry, layer):
        return attend_layer(carry[0], layer, batch, carry[1]), None

    layers = jnp.arange(NUM_LAYERS, dtype=jnp.int32)
    (cache, hidden), _ = jax.lax.scan(body, (cache, hidden), layers)
    return jkv.commit(cache, batch), hidden


def step_in_a_loop(cache, seq_ids, hidden):
    """Generate in one jit: steps in a loop, layers in a loop."""
    return jax.lax.fori_loop(
        0,
        5,
        lambda _, carry: step_scanned(carry[0], seq_ids, carry[1]),
        (cache, hidden),
    )


# Layers in sequence, for the dtypes with different write paths.
CASES = [(step_scanned, dtype) for dtype in DTYPES]
CASES += [(step_unrolled, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8)]
CASES += [(step_scanned, jnp.int4)]
CASES += [
    (step_with_independent_keys, dtype)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
]
CASES = with_further(CASES, (step_scanned, jnp.float16), (step_unrolled, jnp.bfloat16))


@pytest.mark.parametrize(
    "step, dtype",
    few(
        [*CASES, (step_in_a_loop, jnp.bfloat16)],
        *[(step_unrolled, jnp.float32), (step_scanned, jnp.int8)],
        (step_with_independent_keys, jnp.float32),
        (step_scanned, jnp.int4),
        (step_in_a_loop, jnp.bfloat16),
    ),
    ids=lambda value: value.__name__,
)
def test_a_donated_step_updates_in_place(step, dtype):
    computed = jnp.bfloat16 if FORMATS[jnp.dtype(dtype)].is_quantized else dtype
    hidden = jax.ShapeDtypeStruct((BATCH_SIZE, NUM_HEADS, HEAD_DIM), computed)
    assert_in_place(step, make_cache(dtype), IDS, hidden)


@pytest.mark.parametrize(
    "dtype",
    few([jnp.bfloat16, *further([jnp.int8])], jnp.bfloat16),
    ids=lambda dtype: dtype.__name__,
)
def test_a_donated_prefill_updates_in_place(dtype):
    def prefill(cache, seq_ids, counts, hidden):
        cache, batch = jkv.append(cache, seq_ids, counts, capacity=48)

        def body(carry, layer):
            cache, hidden = carry
            keys = hidden[:, :NUM_KV_HEADS]
            cache = jkv.write(cache, layer, batch, keys, keys)
            return (cache, jkv.attend(cache, layer, batch, hidden)), None

        layers = jnp.arange(NUM_LAYERS, dtype=jnp.int32)
        return jax.lax.scan(body, (cache, hidden), layers)[0]

    hidden = jax.ShapeDtypeStruct((48, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    assert_in_place(prefill, make_cache(dtype), IDS, IDS, hidden)


VERBS = {
    "allocate": lambda cache, ids: jkv.allocate(cache, ids),
    "append": lambda cache, ids: jkv.append(cache, ids),
    "fork": lambda cache, ids: jkv.fork(cache, ids),
    "free": lambda cache, ids: jkv.free(cache, ids),
    "truncate": lambda cache, ids: jkv.truncate(cache, ids, ids),
    "reorder": lambda cache, ids: jkv.reorder(cache, ids, ids[::-1]),
}


COPYING = [*itertools.product(["fork", "truncate", "reorder"], [*DTYPES, jnp.int4])]
# float16 is stored like float32, fp8 and int4 with scales like int8.
ALIKE = jnp.float16, jnp.float8_e4m3fn, jnp.int4
SAME = [case for case in COPYING if case[1] in ALIKE]


@pytest.mark.parametrize(
    "verb, dtype",
    dealt(with_further(COPYING, *SAME), 2, share=5),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_donated_copying_verb_updates_in_place(verb, dtype):
    assert_in_place(VERBS[verb], make_cache(dtype), IDS)


@pytest.mark.parametrize("verb", ["allocate", "append", "free"])
@pytest.mark.one_end
def test_a_donated_metadata_verb_updates_in_place(verb):
    assert_in_place(VERBS[verb], make_cache(jnp.float32), IDS)


PROMPTS = jnp.zeros((BATCH_SIZE, 64), jnp.int32)
REUSING = VERBS | {
    "allocate": lambda cache, ids: jkv.allocate(cache, ids, tokens=PROMPTS),
    "append": lambda cache, ids: jkv.append(cache, ids, tokens=ids),
    "prefill": lambda cache, ids: jkv.append(
        cache, ids, 16, capacity=64, tokens=PROMPTS[0]
    ),
    "evict": lambda cache, ids: jkv.evict(cache, ids[0]),
    "evict_cached": lambda cache, ids: jkv.evict_cached(cache, ids[0]),
}


@pytest.mark.parametrize("prefix_caching", few([False, True], True))
@pytest.mark.parametrize("verb", ["allocate", "append", "fork", "free", "truncate"])
def test_a_donated_verb_copies_no_pool(verb, prefix_caching):
    """Per-block integers are not copied either: the cost is independent of the pool."""
    changes = dict(prefix_caching=True) if prefix_caching else {}
    cache = make_cache(jnp.float32, **changes)
    function = (REUSING if prefix_caching else VERBS)[verb]
    assert copied_metadata(function, cache, IDS) == []


@pytest.mark.parametrize("verb", few(["append", "free"], "append"))
def test_a_donated_verb_makes_no_copy_with_a_window(verb):
    """Released blocks are found without a scan of the pool."""
    cache = make_cache(jnp.float32, sliding_window=9)
    assert copied_metadata(VERBS[verb], cache, IDS) == []


@pytest.mark.parametrize("verb", few(["prefill", "evict", "evict_cached"], "evict"))
def test_a_donated_verb_copies_no_pool_with_prefixes(verb):
    cache = make_cache(jnp.float32, prefix_caching=True)
    assert copied_metadata(REUSING[verb], cache, IDS) == []


@pytest.mark.one_end
def test_a_donated_commit_copies_no_pool():
    cache = make_cache(jnp.float32, prefix_caching=True)
    for verb in ("append", "prefill"):
        _, batch = jax.eval_shape(REUSING[verb], cache, IDS)
        assert copied_metadata(jkv.commit, cache, batch) == []


@pytest.mark.one_end  # the newest JAX compiles one with prefixes and groups
def test_a_donated_step_with_prefixes_is_in_place():
    def step(cache, prompts, hidden):
        cache, opened = jkv.allocate(cache, 64, tokens=prompts)
        cache, batch = jkv.append(cache, opened.seq_ids, tokens=prompts[:, 0])
        for layer in range(NUM_LAYERS):
            cache, hidden = attend_layer(cache, layer, batch, hidden)
        return jkv.commit(cache, batch), hidden

    cache = make_cache(jnp.bfloat16, prefix_caching=True)
    hidden = jax.ShapeDtypeStruct((BATCH_SIZE, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    prompts = jax.ShapeDtypeStruct(PROMPTS.shape, jnp.int32)
    assert_in_place(step, cache, prompts, hidden)


@functools.cache
def make_groups(**changes):
    """Return the shapes with two groups: full attention, and a window of nine."""
    whole = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=MAX_SEQUENCES,
        max_context_length=100,
        dtype=jnp.bfloat16,
    )
    groups = whole, dataclasses.replace(whole, sliding_window=9)
    config = jkv.GroupedConfig(groups=groups, layer_groups=(1, 0), **changes)
    return jax.eval_shape(lambda: jkv.init(config))


def test_a_donated_step_in_groups_updates_in_place():
    def step(cache, seq_ids, hidden):
        cache, batch = jkv.append(cache, seq_ids, tokens=seq_ids)
        for layer, window in enumerate((9, None)):
            keys = hidden[:, :NUM_KV_HEADS]
            cache = jkv.write(cache, layer, batch, keys, keys * 2)
            hidden += jkv.attend(cache, layer, batch, hidden, window=window)
        return jkv.commit(cache, batch), hidden

    hidden = jax.ShapeDtypeStruct((BATCH_SIZE, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    assert_in_place(step, make_groups(prefix_caching=True), IDS, hidden)


# All except `reorder`, which tries on a copy which rows find a block.
IN_GROUPS = [verb for verb in REUSING if verb != "reorder"]


@pytest.mark.parametrize(
    "verb", few(with_further(IN_GROUPS, "free", "evict_cached", "fork"), "truncate")
)
def test_a_donated_verb_makes_no_copy_in_groups(verb):
    cache = make_groups(prefix_caching=True)
    assert copied_metadata(REUSING[verb], cache, IDS) == []


@pytest.mark.one_end
def test_a_donated_commit_makes_no_copy_in_groups():
    cache = make_groups(prefix_caching=True)
    for verb in ("append", "prefill"):
        _, batch = jax.eval_shape(REUSING[verb], cache, IDS)
        assert copied_metadata(jkv.commit, cache, batch) == []


@pytest.mark.parametrize("verb", ["allocate", "append", "free"])
@pytest.mark.one_end
def test_an_eager_metadata_verb_keeps_the_storage(verb):
    cache = small_cache()
    ids = jnp.arange(BATCH_SIZE, dtype=jnp.int32)
    after, _ = VERBS[verb](cache, ids)
    for old, new in zip(pools_of(cache), pools_of(after), strict=True):
        assert old.unsafe_buffer_pointer() == new.unsafe_buffer_pointer()


class TestTheCountCanFail:
    """The same check fails for steps that copy."""

    def assert_not_in_place(self, function, dtype=jnp.float32):
        with pytest.raises(AssertionError):
            assert_in_place(function, make_cache(dtype))

    def test_counts_used_after_the_step(self):
        def step(cache):
            counts = cache.metadata.groups[0].reference_counts
            return with_metadata(cache, reference_counts=counts.at[3].set(7)), counts

        assert copied_metadata(step, make_cache(jnp.float32)) != []

    def test_an_identity_is_in_place(self):
        assert_in_place(lambda cache: cache, make_cache(jnp.float32))

    def test_a_transposed_pool(self):
        def step(cache):
            keys = cache.storage[0].key_pool.swapaxes(2, 3) * 2
            return cache, keys.swapaxes(1, 2)

        self.assert_not_in_place(step)

    def test_a_masked_pool(self):
        def step(cache):
            keys = cache.storage[0].key_pool
            seen = jnp.where(keys > 0, keys, 0)
            return cache, jnp.sort(seen, axis=0)

        self.assert_not_in_place(step)

    def test_a_pool_scanned_as_xs_and_ys(self):
        def step(cache):
            def body(carry, pool):
                return carry, pool.at[0, 0, 0].set(carry)

            keys = cache.storage[0].key_pool
            row = jnp.ones(HEAD_DIM, keys.dtype)
            return jax.lax.scan(body, row, keys)[1], cache.storage[0].value_pool

        self.assert_not_in_place(step)

    def test_an_old_pool_used_after_the_step(self):
        def step(cache):
            keys = cache.storage[0].key_pool.at[0, 3].set(1)
            return keys, cache

        self.assert_not_in_place(step)


def test_the_first_donated_step_is_in_place():
    """A fresh cache owns its memory: no buffer is borrowed from numpy."""
    step = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache), donate_argnums=0)
    kept = []  # keeps numpy's allocations at different addresses
    for _ in range(8):
        kept.append(jkv.init(small_config(prefix_caching=True)))
        cache = jkv.init(small_config(prefix_caching=True))
        before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)}
        after = jax.tree.leaves(step(cache))
        assert {leaf.unsafe_buffer_pointer() for leaf in after} == before
