"""The cache of a rollout, kept from call to call and made anew when one needs more."""

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jkv


class CallSizes(NamedTuple):
    """What a call brings."""

    prompt_length: int  # of the longest prompt
    max_new_tokens: int
    num_samples: int
    max_running: int  # sequences that run at one time


class Pool:
    """Lends the cache for a call and takes back what came of it.

    A call donates the cache. One that was interrupted returns none, so the next one
    begins with a fresh cache.
    """

    def __init__(
        self,
        config: jkv.CacheConfig,  # all but the numbers of blocks and what they hold
        num_blocks: int | None,  # None is room for all that run at one time
        mesh: Mesh | None,
    ) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._cache: jkv.Cache | None = None
        self.sharding: NamedSharding | None = None
        if mesh is not None and not mesh.empty:
            self.sharding = NamedSharding(mesh, PartitionSpec())

    def lend(self, call: CallSizes) -> jkv.Cache:
        """Return a cache that can do the call, if it can do one sequence alone."""
        config = self._fit(call)
        cache, self._cache = self._cache, None
        if cache is None or config != self._config:
            # The old one goes before the new one comes.
            cache = None
            self._config = config
            cache = jkv.init(config)
            if self.sharding is not None:
                cache = jax.device_put(cache, self.sharding)
        return cache

    def take_back(self, cache: jkv.Cache) -> None:
        """Keep the cache for the next call, if it remembers anything."""
        self._cache = cache if self._config.prefix_caching else None

    def _fit(self, call: CallSizes) -> jkv.CacheConfig:
        """Return the sizes for the call and for all that came before."""
        old, num_blocks = self._config, self._num_blocks
        length = call.prompt_length + call.max_new_tokens
        if num_blocks is None:
            num_blocks = max(_count_blocks(call, old.block_size), old.num_blocks)
        longest = -(-length // old.block_size)
        if num_blocks < longest:
            raise ValueError(
                f"num_blocks must be at least {longest}: a prompt of "
                f"{call.prompt_length} tokens and {call.max_new_tokens} new ones take "
                f"that many blocks of {old.block_size}; got {num_blocks}"
            )
        return dataclasses.replace(
            old,
            num_blocks=num_blocks,
            # One more than run: the prompt that waiting samples fork from.
            max_sequences=max(call.max_running + 1, old.max_sequences),
            max_context_length=max(length, old.max_context_length),
        )


def _count_blocks(call: CallSizes, block_size: int) -> int:
    """Return the blocks that all running sequences may have at the same time.

    Samples share the full blocks of their prompt; those of one may be partly done.
    """
    shared = call.prompt_length // block_size
    whole = -(-(call.prompt_length + call.max_new_tokens) // block_size)
    num_groups = -(-call.max_running // call.num_samples) + 1
    return num_groups * shared + (call.max_running + 1) * (whole - shared)
