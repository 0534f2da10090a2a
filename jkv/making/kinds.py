"""The kinds of things that a cache is made of, wherever the rest knows a face."""

import dataclasses
from typing import Any

from jkv.blocks.part import Blocks
from jkv.blocks.swapped import SwappedGroup
from jkv.prefixes.index import PrefixIndex
from jkv.state import BlockGroup, BlockStorage, Cache, NoIndex, States, StateStorage
from jkv.states.part import OfStates
from jkv.states.swapped import SwappedStates

# What may stand where a field has a face, by path (`jkv.storage.fields`).
KINDS: dict[str, tuple[type, ...]] = {
    "metadata.index": (NoIndex, PrefixIndex),
    "metadata.groups": (BlockGroup, States),
    "storage": (BlockStorage, StateStorage),
    "groups": (SwappedGroup, SwappedStates),
}
PARTS: dict[type, Any] = {BlockGroup: Blocks, States: OfStates}


def with_parts(cache: Cache) -> Cache:
    """Return a cache whose verbs know the parts that its groups are."""
    numbers: dict[type, tuple[int, ...]] = {}
    for number, group in enumerate(cache.metadata.groups):
        numbers[type(group)] = (*numbers.get(type(group), ()), number)
    parts = [part for kind, of in numbers.items() for part in PARTS[kind].of(of)]
    metadata = dataclasses.replace(cache.metadata, parts=tuple(parts))
    return cache.with_metadata(metadata)
