"""Data parallelism: one generation over several ranks, with prompts dealt to them.

Each rank generates from all prompts, those of other ranks empty, so that prompts and
results keep their order. Ranks exchange only their free block counts, before, and the
results, after.

Symbols: Q prompts, N sequences, P ranks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jkv.decoding.sequences.prompts import Prompts
from jkv.decoding.sequences.results import Generation, Statistics
from jkv.operations import divide
from jkv.sharding.storage_sharding import with_rank, without_rank
from jkv.state import Cache
from jkv.verbs.lookups import num_free_blocks
from jkv.verbs.pooling import enter_pool, leave_pool

# A generation on one pool, of params, cache, prompts and options.
Generate = Callable[[Any, Cache, Prompts, Any], tuple[Cache, Generation]]


def generate_on_pools(
    generate: Generate,  # generates from a rank's prompts
    params: Any,
    cache: Cache,  # with a pool for each rank
    prompts: Prompts,
    options: Any,  # decoding options, any pytree
    num_samples: int,  # sequences of each prompt
) -> tuple[Cache, Generation]:
    """Deal prompts to ranks by their free blocks, and generate on all.

    The results are in the order of the prompts and the same on all ranks.
    """
    pools = cache.pools
    assert pools is not None
    axis = pools.axis

    def on_rank(divided: Cache, whole: Any) -> tuple[Cache, Generation]:
        params, prompts, options = whole
        cache = enter_pool(without_rank(divided))
        free = jax.lax.all_gather(num_free_blocks(cache), axis)
        owner = deal(prompts, free, cache.block_size, num_samples)
        is_mine = owner == jax.lax.axis_index(axis)
        mine = dataclasses.replace(
            prompts,
            tokens=jnp.where(is_mine[:, None], prompts.tokens, -1),
            lengths=jnp.where(is_mine, prompts.lengths, 0),
        )
        cache, result = generate(params, cache, mine, options)
        result = _collect(result, jnp.repeat(is_mine, num_samples), axis)
        return leave_pool(with_rank(cache), pools), result

    out_specs = PartitionSpec(axis), PartitionSpec()
    answer: tuple[Cache, Generation] = pools.map(
        on_rank, cache, (params, prompts, options), out_specs=out_specs
    )
    return answer


def deal(
    prompts: Prompts,
    free: jax.Array,  # i32[P], free blocks of each rank
    block_size: int,  # tokens per block
    num_samples: int,  # sequences of each prompt
) -> jax.Array:
    """Return the rank of each prompt, i32[Q].

    Each prompt goes, in order, to the rank with most blocks left after the prompts
    before it reach their limits; the first of equal ranks.
    """
    # The prompt is held once, its continuation by each sample.
    prompt_blocks, _ = divide(prompts.lengths + (block_size - 1), block_size)
    new_blocks, _ = divide(prompts.limits + (block_size - 1), block_size)
    needs = prompt_blocks + num_samples * new_blocks
    needs = jnp.where(prompts.lengths > 0, needs, 0)

    def give(left: jax.Array, need: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank = jnp.argmax(left).astype(jnp.int32)
        return left.at[rank].add(-need), rank

    return jax.lax.scan(give, free, needs)[1]


def _collect(result: Generation, is_mine: jax.Array, axis: str) -> Generation:
    """Combine the results of all ranks, taking each sequence from its own rank."""

    def choose(array: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (array.ndim - 1)
        mine = jnp.where(is_mine.reshape(shape), array, jnp.zeros_like(array))
        if array.dtype == jnp.bool_:
            return jax.lax.psum(mine.astype(jnp.int32), axis).astype(jnp.bool_)
        return jax.lax.psum(mine, axis)

    counts = Statistics(jax.lax.psum(result.statistics.counts, axis))
    return result.map_sequences(choose)._replace(statistics=counts)
