"""Giving what the prefix index has of a text another class."""

import functools

import jax

from jkv.metadata import allocator
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
        block = found.groups[number].blocks[0, ::-1]  # children leave first
        metadata = allocator.renew(metadata, number, block, keep)
    return cache.with_metadata(metadata)
