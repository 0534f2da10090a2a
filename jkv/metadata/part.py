"""What sequences have in one part of a model: blocks of a pool, or states.

A verb judges its requests, agrees on those that are served, and applies them; it goes
over the parts without asking which kind one is. Each part answers with a *plan* of the
call, whose members are the verb's own steps:

* `wrongs`: which requests the part cannot serve at the length asked for;
* `judge`: given which requests are eligible, what they would take: `lacks`, a `Lack`
  for a pool that can run out;
* `apply`: what is served, done; and what the part's storage has to follow.

A part has no arrays: it knows which of the metadata are its own. `()` stands for
nothing wrong, nothing lacking, no pool. Symbols as in `jkv.state.metadata`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import tables
from jkv.state import BlockGroup, Cache, Metadata
from jkv.state.index import Found

# What a call does to the storage of a part; None where it does nothing.
Moves: TypeAlias = Any
Masks: TypeAlias = tuple[jax.Array | np.ndarray, ...]  # bool[B] each


class Lack(NamedTuple):
    """What B requests would take from one pool."""

    num: jax.Array  # i32[B], blocks, 0 where a request is refused already
    wants: jax.Array  # bool[B], whether it cannot be served without the pool
    free: jax.Array  # i32[], blocks free before the call
    most: int  # static: blocks of the pool

    @classmethod
    def of(
        cls, group: BlockGroup, num: jax.Array, wants: jax.Array | None = None
    ) -> "Lack":
        """Return the blocks that requests would take of a group, i32[B]."""
        wants = num > 0 if wants is None else wants
        return cls(num, wants, group.free_blocks.count, group.num_blocks)


class Granted(NamedTuple):
    """What B requests take from one pool, if they are served."""

    num: jax.Array  # i32[B], blocks
    before: jax.Array  # i32[B], blocks taken by the requests before each served one


class Lengths(NamedTuple):
    """How long the pasts of B parents are, and how that lies in blocks."""

    tokens: jax.Array  # i32[B], the context length, or how much of it counts
    num_full: jax.Array  # i32[B], blocks that are full
    tail: jax.Array  # i32[B], tokens in the block after them


class Done(NamedTuple):
    """Which of B requests are served."""

    served: jax.Array  # bool[B]
    seq_ids: jax.Array  # i32[B], the sequences that change, distinct where served

    def rows(self, metadata: Metadata) -> jax.Array:
        """Return their rows, i32[B], S where not served."""
        return jnp.where(self.served, self.seq_ids, metadata.max_sequences)


class Step(NamedTuple):
    """The rows of an `append`, as it was agreed on."""

    done: Done
    length: jax.Array  # i32[B], tokens before the call
    query_lengths: jax.Array  # i32[B], tokens appended, 0 unless served
    is_decoding: bool  # static: each request has one row at most
    valid: jax.Array  # bool[R], whether a served request owns the row
    position: jax.Array  # i32[R], in its sequence, 0 if invalid
    table_row: jax.Array  # i32[R], S if invalid
    column: jax.Array  # i32[R], of the tables
    offset: jax.Array  # i32[R], in the block
    tokens: jax.Array | None  # i32[R], if they are recorded

    @property
    def num_rows(self) -> int:
        """Token rows, R."""
        return self.valid.shape[0]


class Judged(Protocol):
    """What eligible requests would take in a part."""

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """What they lack of each pool of the part."""

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, Moves]:
        """Do what is served."""


class Look(Protocol):
    """A first look at requests: which of them the part cannot serve."""

    @property
    def wrongs(self) -> Masks:
        """The requests that ask for a length at which the part has nothing."""

    def judge(self, eligible: jax.Array) -> Judged:
        """Find what eligible requests, bool[B], would take."""


class Opening(Judged, Protocol):
    """What `allocate` does in a part."""

    def pin(self, metadata: Metadata, row: jax.Array) -> Metadata:
        """Let rows, i32[B], have what was found, before anything is taken."""


class Growing(Protocol):
    """What `append` does in a part."""

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """What the sequences lack of each pool of the part."""

    def apply(
        self, metadata: Metadata, step: Step, granted: tuple[Granted, ...]
    ) -> tuple[Metadata, jax.Array | None]:
        """Take what is granted; say in which block each row is, i32[R], N for none."""


class Entering(Protocol):
    """What `swap_in` does in a part; sequences enter together or not at all."""

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """What all of them together lack of each pool of the part, as one request."""

    def apply(
        self, metadata: Metadata, row: jax.Array
    ) -> tuple[Metadata, jax.Array | None]:
        """Let rows, i32[B], have what they bring: all of them, or all are S.

        Returned with the metadata are the rows' block tables, i32[B, M]; None without
        blocks.
        """


class Exchanging(Protocol):
    """What `reorder` does in a part; sequences may take what others give up."""

    def release(self, metadata: Metadata, served: jax.Array) -> Metadata:
        """Count new owners, and give back what served sequences had, bool[B]."""

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, Moves]:
        """Do what is served: release, and take."""


class Luggage(Protocol):
    """What sequences have in one group, on the host; a pytree."""

    kind: str  # static, of the group

    @property
    def num_blocks(self) -> int:
        """Blocks that the sequences have."""

    @property
    def num_filled_blocks(self) -> int:
        """Those of them whose contents are held."""

    def meaning(self, path: str) -> np.dtype[Any] | None:
        """Return what the bits of an array mean, where they mean another dtype."""

    def fits(self, columns: int) -> bool:
        """Return whether block tables of so many columns are wide enough."""

    def brought(self, columns: int) -> Any:
        """Return what `Part.enter` has to know, of a cache with so many columns."""

    def compare(
        self, cache: Cache, number: int, lengths: np.ndarray
    ) -> dict[str, tuple[Any, Any]]:
        """Return what must be equal, here and in a group of a cache, by name."""

    def put(
        self,
        cache: Cache,
        number: int,
        seq_ids: np.ndarray,
        tables: jax.Array | None,
        *,
        donate: bool,
    ) -> Cache:
        """Write it to sequences that entered, of these ids and block tables."""


class Part(Protocol):
    """One part of a model; a static value."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The groups that it answers for."""

    def open(
        self,
        metadata: Metadata,
        found: Found,
        num_tokens: jax.Array,
        eligible: jax.Array,
    ) -> Opening:
        """Let new sequences begin with what is found, i32[B] tokens reserved."""

    def grow(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        new_length: jax.Array,
        eligible: jax.Array,
    ) -> Growing:
        """Let sequences have as many tokens, i32[B]."""

    def share(self, metadata: Metadata, parents: jax.Array, length: Lengths) -> Look:
        """Let rows go on from what their parents have, i32[B], at lengths."""

    def cut(self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> Look:
        """Cut sequences back to lengths, i32[B] as asked."""

    def enter(self, metadata: Metadata, brought: dict[int, Any]) -> Entering:
        """Let new sequences have what they bring to the groups from elsewhere."""

    def exchange(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        parents: jax.Array,
        length: Lengths,
    ) -> Exchanging:
        """Let sequences go on from what parents, perhaps others of them, had."""

    def close(
        self, metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
    ) -> Metadata:
        """Give back what sequences have, i32[B], distinct where bool[B]."""

    def follow(self, storage: Any, moves: Moves) -> Any:
        """Return the storage of one of its groups, moved as a call says."""

    def keep(self, rows: jax.Array, places: jax.Array) -> Moves:
        """Copy what rows have, i32[B], to places of snapshots, if it can be copied."""

    def leave(self, metadata: Metadata, seq_ids: jax.Array) -> Any:
        """Return what `fetch` has to know of sequences, i32[B], [B, ...] each."""

    def fetch(
        self, cache: Cache, seq_ids: np.ndarray, lengths: np.ndarray, left: Any
    ) -> dict[int, Luggage]:
        """Copy what sequences have in each of its groups to the host, by group."""

    def num_free(self, metadata: Metadata) -> tuple[jax.Array, ...]:
        """Return the free blocks of its pools, i32[] each."""


def parts_of(metadata: Metadata) -> tuple[Part, ...]:
    """Return the parts of a cache, as `making` found them."""
    return metadata.parts


def apply_plans(
    metadata: Metadata, plans: Sequence[Judged | Exchanging], done: Done
) -> tuple[Metadata, tuple[Moves, ...]]:
    """Do what is served in each part, and return what its storage is to follow."""
    moves = []
    for plan in plans:
        metadata, of_part = plan.apply(metadata, done)
        moves.append(of_part)
    return metadata, tuple(moves)


def close_sequences(
    metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
) -> Metadata:
    """Give back rows, i32[B], distinct where bool[B], and all that they have."""
    metadata = tables.close_rows(metadata, seq_ids, closable)
    for part in parts_of(metadata):
        metadata = part.close(metadata, seq_ids, closable)
    return metadata
