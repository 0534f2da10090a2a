"""Core operations in one jitted step: append, write, attend, fork and free."""

import argparse

import jax
import jax.numpy as jnp

import jkv

argparse.ArgumentParser(description=__doc__).parse_args()  # only --help

config = jkv.CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    num_blocks=32,
    block_size=4,
    max_sequences=8,
    max_context_length=64,
)
cache = jkv.init(config)
print(cache)


# The cache is donated, so it is updated in place; new values do not retrace.
@jax.jit(donate_argnames="cache")
def step(
    cache: jkv.Cache, seq_ids: jax.Array, hidden: jax.Array
) -> tuple[jkv.Cache, jax.Array, jax.Array]:
    """Append one token per sequence. Slices of `hidden` stand for projections."""
    cache, batch = jkv.append(cache, seq_ids)
    for layer in range(config.num_layers):
        queries = hidden.reshape(-1, 4, 16)  # four query heads, two kv heads
        keys = values = queries[:, :2]
        cache = jkv.write(cache, layer, batch, keys, values)
        hidden += jkv.attend(cache, layer, batch, queries).reshape(hidden.shape)
    return jkv.commit(cache, batch), hidden, batch.status


# Two sequences of five tokens; blocks are allocated on demand.
cache, opened = jkv.allocate(cache, [0, 0])
keys = jax.random.split(jax.random.key(0), 6)
for key in keys[:5]:
    cache, hidden, status = step(cache, opened.seq_ids, jax.random.normal(key, (2, 64)))
    jkv.raise_for_status(status)
print("blocks of 0:", jkv.block_ids(cache, 0)[:2], "of 1:", jkv.block_ids(cache, 1)[:2])

# A fork shares full blocks and copies the partly filled one.
cache, forked = jkv.fork(cache, opened.seq_ids[:1])
print("blocks of its fork:", jkv.block_ids(cache, forked.seq_ids[0])[:2])

# All three sequences continue; the fork diverges with its first new token.
seq_ids = jnp.concatenate([opened.seq_ids, forked.seq_ids])
cache, hidden, _ = step(cache, seq_ids, jax.random.normal(keys[5], (3, 64)))
print("free blocks:", jkv.num_free_blocks(cache))

cache, status = jkv.free(cache, seq_ids)
print("free blocks after free:", jkv.num_free_blocks(cache))
