"""A model whose tokens reveal the weight versions of their context.

The weights are a version number. Each key holds a token, its position and its version.
The next token is a hash of the sequence and of the age of the oldest version in its
context, so that a stale block or a lost token changes the completion.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.serving import Engine, StopSizes
from support.decoding.plain_queue import hash_weights

HASHES, AGES = 16, 4  # ages of AGES - 1 and above look alike
VOCABULARY = HASHES * AGES


def versioned_model(params, tokens, cache, batch):
    """The model for an engine; `params` is its version, f32[1]."""
    version = jnp.asarray(params)
    rows = [tokens.astype(jnp.float32), batch.positions.astype(jnp.float32)]
    rows = jnp.stack([*rows, jnp.broadcast_to(version, tokens.shape)], axis=1)
    rows = jnp.pad(rows[:, None], ((0, 0), (0, 0), (0, cache.head_dim - 3)))
    cache = jkv.write(cache, 0, batch, rows, rows)
    blocks = cache.metadata.groups[0].block_tables.at[batch.seq_ids].get(mode="clip")
    found = cache.storage[0].key_pool.at[0, blocks, 0].get(mode="fill", fill_value=0)
    found = found.reshape(len(blocks), blocks.shape[1] * cache.block_size, -1)
    place = jnp.arange(found.shape[1], dtype=jnp.int32)[None]
    inside = place < batch.context_lengths[:, None]
    token, position = (
        jnp.where(inside, found[..., field], 0).astype(jnp.uint32) for field in (0, 1)
    )
    terms = (token + jnp.uint32(1)) * hash_weights(position)
    hashes = jnp.sum(jnp.where(inside, terms, 0), axis=1, dtype=jnp.uint32)
    oldest = jnp.min(jnp.where(inside, found[..., 2], jnp.inf), axis=1)
    age = jnp.clip(version - oldest, 0, AGES - 1).astype(jnp.int32)
    following = (hashes >> 5).astype(jnp.int32) % HASHES * AGES + age
    return 8 * jax.nn.one_hot(following, VOCABULARY), cache


def weights(version):
    """Return the weights of a version."""
    return np.full((1,), version, np.float32)


def read_ages(prompt, completion):
    """Return the oldest version that each token attended to; check the tokens.

    Args:
        prompt: the continued tokens.
        completion: its result.
    """
    tokens, oldest = [*prompt], []
    for token, version in zip(completion.tokens, completion.versions, strict=True):
        place = np.arange(len(tokens), dtype=np.uint32)
        terms = (np.array(tokens, np.uint32) + np.uint32(1)) * hash_weights(place)
        hashes = np.sum(terms, dtype=np.uint32)
        assert token // AGES == int(hashes >> np.uint32(5)) % HASHES, tokens
        oldest.append(version - token % AGES)
        tokens.append(token)
    return oldest


def check_versions(prompt, completion):
    """Assert the reported context versions; count tokens with older contexts.

    Ages of AGES - 1 and above look alike.
    """
    rows = list(
        zip(
            read_ages(prompt, completion),
            completion.versions,
            completion.context_versions,
            strict=True,
        )
    )
    for oldest, chosen, reported in rows:
        assert reported <= chosen and oldest >= max(reported, chosen - AGES + 1), (
            completion
        )
    return sum(oldest < chosen for oldest, chosen, _ in rows)


def make_cache(**fields):
    """Create a cache of 24 blocks of four tokens, with prefix caching."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=3,
        num_blocks=24,
        block_size=4,
        max_sequences=10,
        max_context_length=40,
        dtype=jnp.float32,
        prefix_caching=True,
        **fields,
    )
    return jkv.init(config)


def make_engine(cache=None, **options):
    """Create an engine with few blocks, so that sequences are preempted; version 0."""
    sizes = dict(
        max_running=4,
        num_ahead=2,
        max_new_tokens=12,
        max_samples=2,
        num_steps=2,
        row_counts=(16,),
        stop_sizes=StopSizes(tokens=1, sequences=0, length=0),
        checks=True,
    )
    return Engine(
        versioned_model, weights(0), cache or make_cache(), **(sizes | options)
    )
