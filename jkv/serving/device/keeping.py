"""Giving what the prefix index has of a text another class."""

import functools

import jax

from jkv.metadata import allocator
from jkv.metadata.ring import Keep
from jkv.state import Cache


@functools.partial(jax.jit, donate_argnames="cache")
def keep_text(
    cache: Cache,
    texts: jax.Array,  # i32[1, P], -1 past its end; the last token is never found
    salts: jax.Array,  # i32[1], its domain
    keep: Keep,  # its class and time, [1]
) -> Cache:
    """Let what is found of a text be of no lower class, as used just now."""
    metadata = cache.metadata
    found = metadata.index.find(metadata, texts, salts)
    for number in metadata.block_numbers:
        block = found.groups[number].blocks[0, ::-1]  # children leave first
        metadata = allocator.renew(metadata, number, block, keep)
    return cache.with_metadata(metadata)
