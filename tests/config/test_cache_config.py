"""CacheConfig: its errors, its arrays, and bytes by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from support.small_caches import (
    append,
    free_count,
    names,
    opened,
    small_config,
    stored_tokens,
)

import jkv
from jkv.status import UsageError

pytestmark = pytest.mark.one_end


@pytest.mark.parametrize(
    "field",
    [
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "value_head_dim",
        "num_blocks",
        "block_size",
        "max_sequences",
        "max_context_length",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_invalid_sizes_are_rejected(field, value):
    with pytest.raises(ValueError, match=field):
        small_config(**{field: value})


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.float64, jnp.bool_, "complex64", "uint4"]
)
def test_invalid_dtypes_list_the_valid_ones(dtype):
    with pytest.raises(ValueError, match="bfloat16.*float8_e5m2, int4, fp8; got"):
        small_config(dtype=dtype)
    with pytest.raises(ValueError, match="one of .*; got"):
        small_config(value_dtype=dtype)


def test_fp8_means_the_portable_encoding():
    assert small_config(dtype="fp8").dtype == jnp.float8_e4m3fn
    assert small_config(dtype=jnp.float8_e4m3fnuz).dtype == jnp.float8_e4m3fnuz


def test_values_may_have_their_own_dtype():
    sizes = dict(num_layers=1, num_kv_heads=2, head_dim=16, value_head_dim=8)
    config = small_config(**sizes, dtype="int8", value_dtype="int4")
    # One byte and half a byte per element, with a two-byte scale each.
    assert config.bytes_per_token == 2 * ((16 + 2) + (4 + 2))
    assert "int8 keys, int4 values" in str(config)
    assert config.is_quantized and not small_config(dtype="bfloat16").is_quantized
    assert small_config(dtype="float32", value_dtype=jnp.int4).is_quantized
    # Changing the keys' dtype also changes the values', unless they have their own.
    alike = dataclasses.replace(small_config(dtype="int8"), dtype="float32")
    assert alike == small_config(dtype="float32")


def test_int4_needs_even_head_dims():
    for sizes in (dict(head_dim=7, value_head_dim=8), dict(value_head_dim=3)):
        with pytest.raises(ValueError, match="head dim must be even"):
            small_config(**sizes, dtype="int4")
    with pytest.raises(ValueError, match="got int4; omit value_dtype"):
        small_config(values_in_keys=True, dtype="int8", value_dtype="int4")


def test_values_in_keys_must_fit_into_them():
    with pytest.raises(ValueError, match="at most head_dim 16"):
        small_config(head_dim=16, value_head_dim=17, values_in_keys=True)


def test_sizes_are_python_ints_and_do_not_overflow():
    config = small_config(num_layers=80, num_kv_heads=8, head_dim=128, num_blocks=2**20)
    pools = 2 * 80 * 2**20 * 8 * 4 * 128 * 4
    assert pools > 2**40
    assert 0 < config.bytes - pools < 2**24
    assert type(config.bytes) is int
    with pytest.raises(ValueError, match="num_blocks"):
        small_config(num_blocks=2**31)
    # The ring of a prefix index has twice as many places.
    with pytest.raises(ValueError, match="with prefix_caching"):
        small_config(num_blocks=2**29, prefix_caching=True)
    assert small_config(num_blocks=2**29 - 1, prefix_caching=True).num_blocks
    with pytest.raises(ValueError, match="max_context_length"):
        small_config(max_context_length=2**31)
    with pytest.raises(ValueError, match="max_sequences"):
        small_config(max_sequences=2**20, max_context_length=2**20)


def test_bytes_by_hand():
    # Keys: 1 layer, 8 blocks, 1 head, 4 tokens, 2 floats. Values: 3 floats.
    keys, values = 8 * 4 * 2 * 4, 8 * 4 * 3 * 4
    # Tables 4x4, five numbers of 4 sequences, a row of 4, counts and ring of 8, ring of
    # 4, eight ints per ring, two words for each of 14 counters.
    metadata = 64 + 5 * 16 + 16 + 32 + 32 + 16 + 64 + 112
    assert small_config(value_head_dim=3).bytes == keys + values + metadata


def test_bytes_per_token_by_hand():
    sizes = dict(num_layers=1, num_kv_heads=1)
    both = dict(sizes, head_dim=128, value_head_dim=128)
    assert small_config(**both, dtype="bfloat16").bytes_per_token == 512
    assert small_config(**both, dtype="int8").bytes_per_token == 260
    latent = dict(sizes, head_dim=576, value_head_dim=512, values_in_keys=True)
    assert small_config(**latent, dtype="bfloat16").bytes_per_token == 1152
    assert small_config(**latent, dtype="fp8").bytes_per_token == 578


@pytest.mark.parametrize("metadata", ["", "record_tokens", "prefix_caching"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(value_head_dim=3),
        dict(dtype="bfloat16", num_layers=3, num_kv_heads=2),
        dict(dtype="float16", block_size=3, max_context_length=7),
        dict(dtype="int8", num_layers=2, num_kv_heads=2, value_head_dim=1),
        dict(dtype="fp8"),
        dict(dtype="float8_e5m2"),
        dict(dtype="int8", values_in_keys=True, value_head_dim=1),
        dict(dtype="bfloat16", values_in_keys=True),
    ],
)
def test_bytes_equal_the_arrays(changes, metadata):
    config = small_config(**changes, **({metadata: True} if metadata else {}))
    cache = jkv.init(config)
    assert cache.nbytes == config.bytes
    assert config.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert config.storage_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves(cache.storage)
    )
    metadata_leaves = jax.tree.leaves(cache.metadata)
    assert config.metadata_bytes == sum(leaf.nbytes for leaf in metadata_leaves)
    jkv.check(cache)
    profile = jkv.memory_profile(cache)
    assert profile.array_bytes == {
        name: math.prod(a.shape) * a.dtype.itemsize for name, a in config.arrays.items()
    }
    assert profile.total_bytes == config.bytes
    assert profile.storage_bytes == config.storage_bytes
    assert profile.metadata_bytes == config.metadata_bytes
    assert profile.bytes_per_token == config.bytes_per_token


def test_capacity_in_tokens_by_hand():
    # 8 blocks of 4 tokens: 32 tokens; sequences of 12, 12 and 8 use all 8 blocks.
    assert small_config().capacity_tokens == 32
    cache = opened(12, 12, 8)
    assert free_count(cache) == 0
    assert sum(len(stored_tokens(cache, row)) for row in range(3)) == 32
    _, step = append(cache, [0, 1, 2])
    assert names(step.status) == ["OUT_OF_BLOCKS"] * 3


def test_sizes_are_properties_of_the_cache():
    config = small_config(
        num_layers=3, num_kv_heads=2, value_head_dim=5, max_sequences=7
    )
    cache = jkv.init(config, device=jax.devices("cpu")[0])
    assert (cache.num_layers, cache.num_kv_heads) == (3, 2)
    assert (cache.head_dim, cache.value_head_dim) == (2, 5)
    assert (cache.num_blocks, cache.block_size) == (8, 4)
    assert (cache.max_sequences, cache.max_blocks_per_sequence) == (7, 4)
    assert cache.max_context_length == 14
    assert cache.dtype == jnp.float32
    assert free_count(cache) == 8
    devices = {jax.devices("cpu")[0]}
    assert all(leaf.devices() == devices for leaf in jax.tree.leaves(cache))
    lines = repr(cache).splitlines()
    assert len(lines) < 25 and max(map(len, lines)) < 100


def test_sizes_from_a_budget_and_from_a_context_length():
    sizes = dict(num_layers=3, num_kv_heads=2, head_dim=8, max_context_length=30)
    for budget in (50_000, 50_001, 1_000_000):
        config = jkv.CacheConfig.for_memory(budget, max_sequences=5, **sizes)
        assert config.bytes <= budget
        more = dataclasses.replace(config, num_blocks=config.num_blocks + 1)
        assert more.bytes > budget
    del sizes["max_context_length"]
    config = jkv.CacheConfig.for_context_length(
        30, max_sequences=5, block_size=4, **sizes
    )
    assert config.num_blocks == 5 * 8


def test_fields_override_toy_sizes():
    config = jkv.CacheConfig.toy(head_dim=16, num_blocks=3)
    assert (config.value_head_dim, config.num_blocks, config.block_size) == (16, 3, 4)
    with pytest.raises(UsageError, match="toy has no field 'heads'.*'num_kv_heads'"):
        jkv.CacheConfig.toy(heads=2)
