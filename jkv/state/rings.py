"""The ring of free ids, as a pytree; `jkv.metadata.ring` operates on it.

Symbols in shape comments as in `jkv.state.metadata`.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """FIFO of free ids: entry `i` from the head is `ids[(head + i) % len(ids)]`.

    The ring has room for all ids, so a push cannot overflow. Outside the `span` entries
    from the head on it is stale. Every entry in the span is a free id, unless ids may
    leave the middle, as cached blocks do on a prefix cache hit: then `indices`
    distinguishes entries from holes, and the ring has room for as many holes as ids.

    The ring counts the ids that leave it, in 64 bits. With several classes it holds
    class 0, and `kept` has a ring for each other class.
    """

    ids: jax.Array  # i32[C]; C is the number of ids, twice that with `indices`
    bounds: jax.Array  # i32[8], named by `NUMBERS`
    # i32[N], index in `ids` of each free id, -1 if not free; None: no holes.
    indices: jax.Array | None
    kept: "Kept | None" = None  # None: a single class

    @property
    def head(self) -> jax.Array:
        """Index of the next entry to leave, i32[]."""
        return self.bounds[0]

    @property
    def by_class(self) -> tuple["Ring", ...]:
        """The rings of all classes, lowest first."""
        if self.kept is None:
            return (self,)
        return dataclasses.replace(self, kept=None), *self.kept.rings

    @property
    def span(self) -> jax.Array:
        """Entries from head to tail, holes included, i32[]; of all classes."""
        return _sum([each.bounds[1] for each in self.by_class])

    @property
    def count(self) -> jax.Array:
        """Number of ids in the ring, i32[]; of all classes."""
        return _sum([each.bounds[2] for each in self.by_class])

    @property
    def fewest(self) -> jax.Array:
        """Lowest count so far, i32[]."""
        return self.bounds[3]

    @property
    def num_taken(self) -> jax.Array:
        """Number of ids taken so far, u32[2]: low word, high word."""
        return jax.lax.bitcast_convert_type(self.bounds[4:6], jnp.uint32)

    @property
    def num_forgotten(self) -> jax.Array:
        """Number of ids evicted from the index so far, u32[2]: low word, high word."""
        return jax.lax.bitcast_convert_type(self.bounds[6:8], jnp.uint32)

    def changed(
        self, *, ids: jax.Array | None = None, indices: jax.Array | None = None
    ) -> Self:
        """Return the ring with other ids, i32[C], or indices, i32[N]."""
        return dataclasses.replace(
            self,
            ids=self.ids if ids is None else ids,
            indices=self.indices if indices is None else indices,
        )

    def added(self, num: jax.Array, **signs: int) -> Self:
        """Add `num`, i32[], times a sign to numbers by name.

        The head wraps around, and 64-bit sums carry.
        """
        steps = np.zeros(len(NUMBERS), np.int32)
        for name, sign in signs.items():
            steps[NUMBERS.index(name)] = sign
        bounds = self.bounds + num * steps
        if "head" in signs:
            is_past = bounds >= np.int32(self.ids.shape[0])
            wrapped = bounds - np.int32(self.ids.shape[0])
            bounds = jnp.where(is_past & _NUMBER["head"], wrapped, bounds)
        if {"taken", "forgotten"} & {*signs}:
            new, old = (
                jax.lax.bitcast_convert_type(words, jnp.uint32)
                for words in (bounds, self.bounds)
            )
            carries = (new < old) & (_NUMBER["taken"] | _NUMBER["forgotten"])
            # The high word of a sum follows its low word.
            carried = jnp.pad(carries[:-1].astype(jnp.int32), (1, 0))
            bounds = bounds + carried
        return dataclasses.replace(self, bounds=bounds)

    def with_fewest(self, count: jax.Array) -> Self:
        """Lower the minimum count to at most `count`, i32[]."""
        most = jnp.where(_NUMBER["fewest"], count, _NO_LIMIT)
        return dataclasses.replace(self, bounds=jnp.minimum(self.bounds, most))

    def with_numbers(self, **numbers: jax.Array) -> Self:
        """Return the ring with other numbers, i32[] each, by name."""
        bounds = self.bounds
        for name, number in numbers.items():
            bounds = jnp.where(_NUMBER[name], number, bounds)
        return dataclasses.replace(self, bounds=bounds)

    def joined(self, rings: Sequence["Ring"], **of_kept: jax.Array) -> "Ring":
        """Return the ring with other rings by class and other fields of `kept`."""
        if self.kept is None:
            return rings[0]
        kept = dataclasses.replace(self.kept, rings=(*rings[1:],), **of_kept)
        return dataclasses.replace(rings[0], kept=kept)

    def with_account_of(self, other: Self) -> Self:
        """Copy the counters of another ring."""
        bounds = jnp.concatenate([self.bounds[:3], other.bounds[3:]])
        return dataclasses.replace(self, bounds=bounds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """The ids of classes above 0, which leave after all lower classes."""

    rings: tuple[Ring, ...]  # of class 1, 2, ...; their counters are unused
    classes: jax.Array  # i32[N], of each id, free or not
    kept_until: jax.Array  # u32[N], tick up to which the class holds
    entered: jax.Array  # u32[N], running count of entries at each entry
    num_entered: jax.Array  # u32[], total of ids entered


# Names of the bounds; 64-bit sums have a high word after the low one.
NUMBERS = (
    *("head", "span", "count", "fewest"),
    *("taken", "taken, high", "forgotten", "forgotten, high"),
)
_NUMBER = {name: np.arange(len(NUMBERS)) == i for i, name in enumerate(NUMBERS)}
_NO_LIMIT = np.int32(np.iinfo(np.int32).max)


def _sum(counts: list[jax.Array]) -> jax.Array:
    """Return the sum of one or more counts, i32[]."""
    return functools.reduce(operator.add, counts)
