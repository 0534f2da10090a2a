"""Hashes of prefixes: a sum over blocks, each mixed with its column."""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.operations import gather

# Odd constants that spread bits: the golden ratio's, and those of MurmurHash3's
# finaliser (A. Appleby, public domain).
_GOLDEN = np.uint32(0x9E3779B9)

_MIX = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))

# Fractions of the square roots of 2 and 3, in 32 bits: independent seeds.
_SEEDS = (np.uint32(0x6A09E667), np.uint32(0xBB67AE85))


def salt_hash(salts: jax.Array) -> jax.Array:
    """Return the hash of an empty prefix for each cache salt, u32[...]."""
    return mixed(as_bits(salts) + _GOLDEN)


def column_hash(tokens: jax.Array, column: jax.Array) -> jax.Array:
    """Return the term of a column's tokens, i32[..., T], in a hash, u32[...]."""
    size = tokens.shape[-1]
    weights = np.arange(1, size + 1, dtype=np.uint32) * _GOLDEN
    terms = mixed(as_bits(tokens) ^ weights.reshape((1,) * (tokens.ndim - 1) + (size,)))
    block = jnp.sum(terms, axis=-1, dtype=jnp.uint32)
    return mixed(block ^ (as_bits(column + 1) * _GOLDEN))


def wide_salt_hash(salts: jax.Array) -> jax.Array:
    """Return two more hashes of an empty prefix for each cache salt, u32[..., 2]."""
    bits = as_bits(salts)
    return jnp.stack([mixed(bits ^ seed) for seed in _SEEDS], axis=-1)


def wide_column_hash(tokens: jax.Array, column: jax.Array) -> jax.Array:
    """Return the terms of the two other hashes, u32[..., 2]."""
    number = as_bits(column + 1)
    words = []
    for seed in _SEEDS:
        scrambled = mixed(as_bits(tokens) + seed)
        terms = column_hash(jax.lax.bitcast_convert_type(scrambled, jnp.int32), column)
        words.append(mixed(terms + mixed(number ^ seed)))
    return jnp.stack(words, axis=-1)


def run_on(
    above: jax.Array,  # [P, ...], hashes before the blocks; only first lanes count
    terms: jax.Array,  # [P, ...], terms of the blocks' columns
    first_lane: jax.Array | None,  # i32[P], first lane of each run; None: runs of one
) -> jax.Array:
    """Return hashes up to the ends of P blocks, in runs of consecutive blocks."""
    if first_lane is None:
        return above + terms
    sums = jnp.cumsum(terms, axis=0, dtype=jnp.uint32)
    return gather(above + terms - sums, first_lane) + sums


def mixed(bits: jax.Array) -> jax.Array:
    """Mix every bit into all of u32[...]: MurmurHash3's finaliser."""
    for shift, factor in ((16, _MIX[0]), (13, _MIX[1])):
        bits = (bits ^ (bits >> np.uint32(shift))) * factor
    return bits ^ (bits >> np.uint32(16))


def as_bits(integers: jax.Array) -> jax.Array:
    """Return the bits of i32[...] as u32[...]."""
    return jax.lax.bitcast_convert_type(integers, jnp.uint32)
