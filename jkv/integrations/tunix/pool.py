"""The cache of a rollout, reused between calls and enlarged on demand."""

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jkv


class CallSizes(NamedTuple):
    """Sizes of one call."""

    prompt_length: int  # of the longest prompt
    max_new_tokens: int
    num_samples: int
    max_running: int  # sequences running at one time


class Pool:
    """Owner of the cache between calls.

    A call donates the cache. An interrupted call returns none, so that the next one
    starts with a new cache.
    """

    def __init__(
        self,
        config: jkv.CacheConfig,  # without the number of blocks and the sizes
        num_blocks: int | None,  # None for as many as the running sequences need
        mesh: Mesh | None,
    ) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._cache: jkv.Cache | None = None
        self.sharding: NamedSharding | None = None
        if mesh is not None and not mesh.empty:
            self.sharding = NamedSharding(mesh, PartitionSpec())

    def lend(self, call: CallSizes) -> jkv.Cache:
        """Return a cache with room for the call; raise if one sequence does not fit."""
        config = self._fit(call)
        cache, self._cache = self._cache, None
        if cache is None or config != self._config:
            # Free the old cache before allocating the new one.
            cache = None
            self._config = config
            cache = jkv.init(config)
            if self.sharding is not None:
                cache = jax.device_put(cache, self.sharding)
        return cache

    def take_back(self, cache: jkv.Cache) -> None:
        """Keep the cache for the next call, if it caches prefixes."""
        self._cache = cache if self._config.prefix_caching else None

    def _fit(self, call: CallSizes) -> jkv.CacheConfig:
        """Return a configuration for this call and all previous ones."""
        old, num_blocks = self._config, self._num_blocks
        length = call.prompt_length + call.max_new_tokens
        if num_blocks is None:
            num_blocks = max(_count_blocks(call, old.block_size), old.num_blocks)
        longest = -(-length // old.block_size)
        if num_blocks < longest:
            raise ValueError(
                f"num_blocks must be >= {longest} for a prompt of "
                f"{call.prompt_length} tokens and {call.max_new_tokens} new ones, in "
                f"blocks of {old.block_size}; got {num_blocks}"
            )
        return dataclasses.replace(
            old,
            num_blocks=num_blocks,
            # One extra row: the prompt from which waiting samples fork.
            max_sequences=max(call.max_running + 1, old.max_sequences),
            max_context_length=max(length, old.max_context_length),
        )


def _count_blocks(call: CallSizes, block_size: int) -> int:
    """Return the most blocks that all running sequences use at one time.

    Samples share the full blocks of their prompt; one prompt may be partly finished.
    """
    shared = call.prompt_length // block_size
    whole = -(-(call.prompt_length + call.max_new_tokens) // block_size)
    num_groups = -(-call.max_running // call.num_samples) + 1
    return num_groups * shared + (call.max_running + 1) * (whole - shared)
