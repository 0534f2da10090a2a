"""An annotated user model and script: one attention layer, ported to jkv.

`test_typing.py` type-checks it, and traces it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jkv

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
WIDTH, VOCABULARY = NUM_HEADS * HEAD_DIM, 32


class Layer(NamedTuple):
    """The weights of one layer; stacked layers have an extra axis."""

    queries: jax.Array  # f32[E, H * D]
    keys: jax.Array  # f32[E, K * D]
    values: jax.Array  # f32[E, K * D]
    output: jax.Array  # f32[H * D, E]


class Params(NamedTuple):
    """All weights."""

    embedding: jax.Array  # f32[V, E]
    layers: Layer


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model for `jkv.generate`, without `all_rows`."""

    num_layers: int

    def __call__(
        self, params: Params, tokens: jax.Array, cache: jkv.Cache, batch: jkv.Batch
    ) -> tuple[jax.Array, jkv.Cache]:
        """Return the logits of each sequence's last row, and the cache."""

        def step(
            carry: tuple[jax.Array, jkv.Cache], part: tuple[jax.Array, Layer]
        ) -> tuple[tuple[jax.Array, jkv.Cache], jax.Array]:
            (hidden, cache), (number, layer) = carry, part
            num_rows = hidden.shape[0]
            queries = (hidden @ layer.queries).reshape(num_rows, NUM_HEADS, HEAD_DIM)
            keys = (hidden @ layer.keys).reshape(num_rows, NUM_KV_HEADS, HEAD_DIM)
            values = (hidden @ layer.values).reshape(num_rows, NUM_KV_HEADS, HEAD_DIM)
            cache = jkv.write(cache, number, batch, keys, values)
            seen, lse = jkv.attend(cache, number, batch, queries, return_lse=True)
            hidden = hidden + seen.reshape(num_rows, WIDTH) @ layer.output
            return (hidden, cache), lse

        numbers = jnp.arange(self.num_layers, dtype=jnp.int32)
        start = (params.embedding[tokens], cache)
        (hidden, cache), _ = jax.lax.scan(step, start, (numbers, params.layers))
        return hidden[batch.last_rows] @ params.embedding.T, cache


def make_params(model: Model, key: jax.Array) -> Params:
    """Return random weights."""
    shapes = {"queries": WIDTH, "keys": WIDTH // 2, "values": WIDTH // 2}
    shapes["output"] = WIDTH
    keys = jax.random.split(key, 5)
    weights = {
        name: jax.random.normal(each, (model.num_layers, WIDTH, size))
        for (name, size), each in zip(shapes.items(), keys[1:], strict=True)
    }
    embedding = jax.random.normal(keys[0], (VOCABULARY, WIDTH))
    return Params(embedding, Layer(**weights))


def continue_prompts(cache: jkv.Cache, seed: int) -> tuple[jkv.Cache, jax.Array]:
    """Continue two prompts, given as lists, and return the tokens."""
    model = Model(num_layers=2)
    params = make_params(model, jax.random.key(seed))
    cache, result = jkv.generate(
        model,
        params,
        cache,
        [[1, 2, 3], range(2)],
        max_new_tokens=4,
        limits=(4, 3),
        stop_tokens=[5],
        sampling=jkv.Sampling(temperature=0.5, seeds=seed),
    )
    return cache, result.tokens


def play_with(cache: jkv.Cache) -> jax.Array:
    """Call the verbs, with ids of several types."""
    cache, opened = jkv.allocate(
        cache, np.array([1, 2], np.int64), tokens=[[1], [2, 3]], salts=np.uint32(7)
    )
    cache, batch = jkv.append(
        cache, range(2), [np.int32(1), np.int32(1)], tokens=(1, 2)
    )
    cache = jkv.commit(cache, batch)
    cache, forked = jkv.fork(cache, opened.seq_ids)
    cache, status = jkv.truncate(cache, np.int16(0), [0])
    cache, _ = jkv.reorder(cache, forked.seq_ids, opened.seq_ids)
    keys, _, length = jkv.read(cache, np.int64(0), 0)
    cache, evicted = jkv.evict(cache, 3, protect=range(1))
    found = jkv.match(cache, [[1, 2], [1]], salts=[7, 7])
    oldest = jkv.least_recently_used(cache, 2, exclude=(1,))
    lengths = jkv.context_lengths(cache)
    sums = [status.sum(), keys.sum().astype(jnp.int32), length, evicted.sum()]
    return jnp.stack([*sums, found.sum(), oldest.sum(), lengths.sum()])


def look_at(cache: jkv.Cache) -> str:
    """Read values on the host, as a script does."""
    stats, profile = jkv.stats(cache), jkv.memory_profile(cache)
    assert len(stats.groups) == len(cache.storage) == 1
    assert stats.groups[0].live_blocks == stats.live_blocks
    assert jkv.block_ids(cache, 0, group=0).shape == (cache.max_blocks_per_sequence,)
    kinds = ", ".join(device.platform for device in cache.devices)
    return f"{stats.tokens} tokens, {profile.total_bytes} bytes on {kinds}"


def make_cache() -> jkv.Cache:
    """Return a cache for `Model(2)`."""
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=16,
        block_size=4,
        max_sequences=4,
        max_context_length=16,
        dtype="float32",
        prefix_caching=True,
    )
    return jkv.init(config)
