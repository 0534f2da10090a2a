"""The ring of free ids, as a pytree; `jkv.metadata.ring` takes from it and gives back.

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

    The ring has room for every id there is, so a push cannot overflow. What lies
    outside the `span` entries from the head on is stale. Every entry in the span is a
    free id, unless ids may leave the middle, as cached blocks do that are found again:
    then `indices` tells an entry from the hole that such an id leaves behind, and the
    ring has room for as many holes as ids.

    The ring also keeps account, in 64 bits, of what left it. Where ids have classes,
    those of class 0 are here, and the others `kept` in a ring for each class.
    """

    ids: jax.Array  # i32[C], the ids; C ids in all, twice as many with `indices`
    bounds: jax.Array  # i32[8], the numbers that `NUMBERS` names
    # i32[N], where in `ids` each free id stands, -1 if it is not free; None: no holes.
    indices: jax.Array | None
    kept: "Kept | None" = None  # None: all are of one class

    @property
    def head(self) -> jax.Array:
        """Index of the entry that leaves next, i32[]."""
        return self.bounds[0]

    @property
    def by_class(self) -> tuple["Ring", ...]:
        """The rings of its classes, the lowest first; each has one."""
        if self.kept is None:
            return (self,)
        return dataclasses.replace(self, kept=None), *self.kept.rings

    @property
    def span(self) -> jax.Array:
        """Entries from the head to the tail, holes included, i32[]; of all classes."""
        return _sum([each.bounds[1] for each in self.by_class])

    @property
    def count(self) -> jax.Array:
        """Ids in the ring, i32[]; of all classes."""
        return _sum([each.bounds[2] for each in self.by_class])

    @property
    def fewest(self) -> jax.Array:
        """Lowest count so far, i32[]."""
        return self.bounds[3]

    @property
    def num_taken(self) -> jax.Array:
        """Ids that ever left the ring, u32[2]: low word, high word."""
        return jax.lax.bitcast_convert_type(self.bounds[4:6], jnp.uint32)

    @property
    def num_forgotten(self) -> jax.Array:
        """Ids that ever lost what they were known by, u32[2]: low word, high word."""
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
        """Return the ring with `num`, i32[], times a sign added to numbers by name.

        The head is brought back into the ring, and sums of 64 bits carry.
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
            # The high word of a sum is behind its low word.
            carried = jnp.pad(carries[:-1].astype(jnp.int32), (1, 0))
            bounds = bounds + carried
        return dataclasses.replace(self, bounds=bounds)

    def with_fewest(self, count: jax.Array) -> Self:
        """Return the ring with its lowest count so far at most `count`, i32[]."""
        most = jnp.where(_NUMBER["fewest"], count, _NO_LIMIT)
        return dataclasses.replace(self, bounds=jnp.minimum(self.bounds, most))

    def with_numbers(self, **numbers: jax.Array) -> Self:
        """Return the ring with other numbers, i32[] each, by name."""
        bounds = self.bounds
        for name, number in numbers.items():
            bounds = jnp.where(_NUMBER[name], number, bounds)
        return dataclasses.replace(self, bounds=bounds)

    def joined(self, rings: Sequence["Ring"], **of_kept: jax.Array) -> "Ring":
        """Return the ring with other rings of its classes, and more of them changed."""
        if self.kept is None:
            return rings[0]
        kept = dataclasses.replace(self.kept, rings=(*rings[1:],), **of_kept)
        return dataclasses.replace(rings[0], kept=kept)

    def with_account_of(self, other: Self) -> Self:
        """Return the ring with what another says of the past."""
        bounds = jnp.concatenate([self.bounds[:3], other.bounds[3:]])
        return dataclasses.replace(self, bounds=bounds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """The ids of classes above 0, which leave a ring after all of the lower ones."""

    rings: tuple[Ring, ...]  # of class 1, 2, ...; their own accounts say nothing
    classes: jax.Array  # i32[N], of each id, whether or not it is free
    kept_until: jax.Array  # u32[N], the time up to which an id keeps its class
    entered: jax.Array  # u32[N], how many ids had entered when each did, itself counted
    num_entered: jax.Array  # u32[], ids that ever entered


# The names of the bounds; sums of 64 bits have a high word behind the low one.
NUMBERS = (
    *("head", "span", "count", "fewest"),
    *("taken", "taken, high", "forgotten", "forgotten, high"),
)
_NUMBER = {name: np.arange(len(NUMBERS)) == i for i, name in enumerate(NUMBERS)}
_NO_LIMIT = np.int32(np.iinfo(np.int32).max)


def _sum(counts: list[jax.Array]) -> jax.Array:
    """Return the sum of at least one count, i32[]."""
    return functools.reduce(operator.add, counts)
