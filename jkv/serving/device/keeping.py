"""Giving what the prefix index has of a text another class."""

import dataclasses
import functools

import jax

from jkv.metadata import ring
from jkv.metadata.ring import Keep
from jkv.state import Cache


@functools.partial(jax.jit, donate_argnames="cache")
def keep_text(cache: Cache, texts: jax.Array, salts: jax.Array, keep: Keep) -> Cache:
    """Let what is found of a text be of no lower class, as used just now.

    Args:
      cache: donated.
      texts: i32[1, P], -1 past its end; the last token is never found.
      salts: i32[1], its domain.
      keep: its class and time, [1].
    """
    metadata = cache.metadata
    found = metadata.index.find(metadata, texts, salts)
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        block = found.groups[number].blocks[0, ::-1]  # children leave first
        owners = group.reference_counts.at[block].get(mode="fill", fill_value=1)
        free = ring.renew(group.free_blocks, block, owners == 0, keep)
        group = dataclasses.replace(group, free_blocks=free)
        metadata = metadata.with_group(number, group)
    return cache.with_metadata(metadata)
