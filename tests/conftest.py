"""What all tests share: strict JAX, and a small cache to start from."""

import dataclasses
import gc
import importlib.util
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Of the optional extra `amd-compile`; looking for doctests would import it.
collect_ignore = [] if importlib.util.find_spec("triton") else ["machine_code.py"]


@pytest.fixture(autouse=True)
def fresh_trace_counts():
    """Let every test count the traces of its own functions."""
    chex.clear_trace_counter()


@pytest.fixture(scope="module", autouse=True)
def bounded_memory_maps():
    """Let go of compiled programs before the process has too many memory maps.

    Each program on CPU takes a few; Linux allows 65,530, and LLVM aborts beyond them.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


def small_config(**changes):
    """Eight blocks of four tokens, four sequences of at most 14 tokens, float32."""
    fields = dict(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=8,
        block_size=4,
        max_sequences=4,
        max_context_length=14,
        dtype=jnp.float32,
    )
    return jkv.CacheConfig(**(fields | changes))


def small_cache(**changes):
    """A fresh cache of `small_config`, its storage full of NaN."""
    return with_storage_filled(jkv.init(small_config(**changes)), np.nan)


def with_storage_filled(cache, value):
    """Fill the K/V arrays with one value, such as the NaN of recycled memory.

    With scales these are filled, and the elements' bits are those of a one.
    """
    is_quantized = cache.key_scales is not None

    def fill(name, pool):
        if is_quantized and name in ("keys", "values"):
            one = jnp.ones((), cache.dtype)
            bits = one if pool.dtype == one.dtype else one.view(pool.dtype)
            return jnp.full_like(pool, bits)
        # bfloat16 lives in uint16 as its bits: the upper half of float32's.
        if pool.dtype == jnp.uint16:
            bits = int(np.float32(value).view(np.uint32)) >> 16
            return jnp.full_like(pool, bits)
        return jnp.full_like(pool, value)

    filled = {name: fill(name, pool) for name, pool in cache.storage.items()}
    return cache.with_storage(filled)


def refusal_counts(cache):
    """How often each status was given as a reason, as Python ints."""
    words = np.asarray(cache.metadata.refusals).astype(np.uint32)
    return [int(low) + (int(high) << 32) for low, high in words]


def without_refusals(cache):
    """Copies of all leaves as bytes on the host, the refusal counters left out."""
    counters = cache.metadata.counters.at[: len(jkv.Status)].set(0)
    metadata = dataclasses.replace(cache.metadata, counters=counters)
    leaves = jax.tree.leaves((metadata, cache.storage))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def write_tokens(cache, batch, contents):
    """Write rows of one number each: keys are +number, values -number."""
    rows = jnp.asarray(contents, jnp.float32)[:, None, None]
    keys = jnp.broadcast_to(rows, (rows.shape[0], cache.num_kv_heads, cache.head_dim))
    values = jnp.broadcast_to(
        -rows, (rows.shape[0], cache.num_kv_heads, cache.value_head_dim)
    )
    for layer in range(cache.num_layers):
        cache = jkv.write(cache, layer, batch, keys, values)
    return jkv.commit(cache, batch)


def stored_tokens(cache, seq_id):
    """The numbers that `write_tokens` stored, read back layer by layer."""
    numbers = None
    for layer in range(cache.num_layers):
        keys, values, length = jkv.read(cache, layer, seq_id)
        keys, values = (
            np.asarray(keys)[: int(length)],
            np.asarray(values)[: int(length)],
        )
        assert (keys == keys[:, :1, :1]).all() and (values == -keys[:, :, :1]).all()
        found = [int(number) for number in keys[:, 0, 0]]
        assert numbers is None or numbers == found
        numbers = found
    return numbers


def grow(cache, seq_id, contents, capacity=16):
    """Append and write the given numbers to one sequence; it must be served."""
    cache, batch = jkv.append(
        cache, jnp.array([seq_id]), jnp.array([len(contents)]), capacity=capacity
    )
    jkv.raise_for_status(batch.status)
    padding = [0] * (capacity - len(contents))
    return write_tokens(cache, batch, [*contents, *padding])


def opened(*lengths, **changes):
    """A small cache whose sequences 0, 1, ... hold that many tokens.

    Token p of sequence s is the number 100 * s + p.
    """
    cache = small_cache(**changes)
    for seq_id, length in enumerate(lengths):
        cache, result = jkv.allocate(cache, jnp.array([0]))
        jkv.raise_for_status(result.status)
        if length:
            cache = grow(cache, seq_id, range(100 * seq_id, 100 * seq_id + length))
    return cache


def table(cache, seq_id):
    """The block ids that a sequence has, as a list."""
    blocks = jkv.block_ids(cache, seq_id).tolist()
    return [block for block in blocks if block != cache.num_blocks]
