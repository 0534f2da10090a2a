"""Base class of parts of a cache that hold numbers per sequence (`jkv.metadata.part`).

Such a part has no groups, no storage and no pool: it implements the verbs that start
sequences from others, cut and close them.
"""

from typing import NamedTuple

import jax
import numpy as np

from jkv.metadata.part import Check, Demand, Masks, Selection
from jkv.state import Cache, Metadata


class NoGroups(NamedTuple):
    """Static fields of a part without groups."""

    numbers: tuple[int, ...] = ()


class PerSequence(NoGroups):
    """Defaults of a part with numbers per sequence."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def open(self, *_: object) -> "Nothing":
        """Plan nothing: closed rows are reset."""
        return Nothing()

    def grow(self, *_: object) -> "Nothing":
        """Plan nothing: the numbers of a sequence do not depend on its length."""
        return Nothing()

    def enter(self, *_: object) -> "Nothing":
        """Plan nothing: `swap_in` sets the numbers, if it has any."""
        return Nothing()

    def prune(self, _metadata: Metadata, _selection: Selection) -> Check:
        """Plan nothing: `prune` sets the numbers, if it changes any."""
        return Nothing()

    def follow(self, storage: object, _moves: object) -> object:
        """Return the storage unchanged."""
        return storage

    def keep(self, *_: object) -> None:
        """Return None: there is no storage."""

    def leave(self, *_: object) -> tuple[()]:
        """Return (): nothing is swapped out by groups."""
        return ()

    def num_free(self, _: object) -> tuple[()]:
        """Return (): there is no pool."""
        return ()

    def fetch(self, _cache: Cache, *_: np.ndarray | object) -> dict[int, object]:
        """Return no contents."""
        return {}


class Nothing(NamedTuple):
    """A plan that changes nothing."""

    wrongs: Masks = ()
    lacks: tuple[Demand, ...] = ()

    def pin(self, metadata: Metadata, *_: object) -> Metadata:
        return metadata

    def judge(self, *_: object) -> "Nothing":
        return self

    def release(self, metadata: Metadata, _served: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, *_: object) -> tuple[Metadata, None]:
        return metadata, None
