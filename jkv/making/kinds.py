"""Concrete classes of a cache's parts, known elsewhere by their interfaces only."""

import dataclasses
from typing import Any

from jkv.blocks.part import Blocks
from jkv.blocks.swapped import SwappedGroup
from jkv.metadata.positions import Positions
from jkv.prefixes.index import PrefixIndex
from jkv.state import BlockGroup, BlockStorage, Cache, NoIndex, States, StateStorage
from jkv.states.part import OfStates
from jkv.states.swapped import SwappedStates

# Candidate classes of fields with an abstract type, by path (`jkv.storage.fields`).
KINDS: dict[str, tuple[type, ...]] = {
    "metadata.index": (NoIndex, PrefixIndex),
    "metadata.groups": (BlockGroup, States),
    "storage": (BlockStorage, StateStorage),
    "groups": (SwappedGroup, SwappedStates),
}
PARTS: dict[type, Any] = {BlockGroup: Blocks, States: OfStates}


def with_parts(cache: Cache) -> Cache:
    """Return a cache with the parts of its groups, which implement the verbs."""
    numbers: dict[type, tuple[int, ...]] = {}
    for number, group in enumerate(cache.metadata.groups):
        numbers[type(group)] = (*numbers.get(type(group), ()), number)
    parts = [part for kind, of in numbers.items() for part in PARTS[kind].of(of)]
    if cache.metadata.sequences.pruned.is_there:
        parts.append(Positions())
    metadata = dataclasses.replace(cache.metadata, parts=tuple(parts))
    return cache.with_metadata(metadata)
