"""Interfaces of the parts of a model: blocks of a pool, or recurrent states.

A verb checks its requests, decides which it serves, and applies them, the same way for
every part. Each part returns a *plan* of the call with the verb's steps:

* `wrongs`: masks of the requests whose length the part cannot serve;
* `judge`: given the eligible requests, their demand: `lacks`, a `Demand` for each pool
  that can run out;
* `apply`: the new metadata, and the moves that the part's storage must follow.

A part is static and has no arrays; it reads its own fields of the metadata. `()` stands
for no errors, no demand, no pool. Symbols as in `jkv.state.metadata`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import tables
from jkv.state import BlockGroup, Cache, Metadata
from jkv.state.index import Found

# The effect of a call on the storage of a part; None if there is none.
Moves: TypeAlias = Any
Masks: TypeAlias = tuple[jax.Array | np.ndarray, ...]  # bool[B] each


class Demand(NamedTuple):
    """Demand of B requests on one pool."""

    num: jax.Array  # i32[B], blocks; 0 for requests already refused
    wants: jax.Array  # bool[B], True if the request needs the pool
    free: jax.Array  # i32[], blocks free before the call
    most: int  # static: blocks in the pool

    @classmethod
    def of(
        cls, group: BlockGroup, num: jax.Array, wants: jax.Array | None = None
    ) -> "Demand":
        """Return the demand of requests for blocks of a group, i32[B]."""
        wants = num > 0 if wants is None else wants
        return cls(num, wants, group.free_blocks.count, group.num_blocks)


class Granted(NamedTuple):
    """Blocks that B requests take from one pool if they are served."""

    num: jax.Array  # i32[B], blocks
    before: jax.Array  # i32[B], blocks taken by the requests before each served one


class Lengths(NamedTuple):
    """Lengths of B parents, in tokens and blocks."""

    tokens: jax.Array  # i32[B], the context length, or the part of it in use
    num_full: jax.Array  # i32[B], full blocks
    tail: jax.Array  # i32[B], tokens in the block after them
    positions: jax.Array  # i32[B], of the next token: `tokens`, and dropped ones


class Served(NamedTuple):
    """The served requests of a call."""

    served: jax.Array  # bool[B]
    seq_ids: jax.Array  # i32[B], changed sequences, distinct where served

    def rows(self, metadata: Metadata) -> jax.Array:
        """Return the table rows of the sequences, i32[B], S where not served."""
        return jnp.where(self.served, self.seq_ids, metadata.max_sequences)


class Selection(NamedTuple):
    """The tokens that B sequences keep."""

    seq_ids: jax.Array  # i32[B]
    lengths: jax.Array  # i32[B], tokens before the call
    # i32[B, X, C] by group without a window, ascending slots; X is 1 if all layers and
    # heads keep the same tokens, else L * K. Arbitrary from `num_kept` on.
    kept: dict[int, jax.Array]
    num_kept: jax.Array  # i32[B]
    rotates: bool  # static: True if keys are rotated to the positions of their slots
    # bool[B, M], columns to be overwritten; all slots stay, and `kept` is empty. None
    # without any.
    rewritten: jax.Array | None = None

    @property
    def width(self) -> int:
        """Static number of slots per request, C."""
        return next(iter(self.kept.values())).shape[-1]


class Step(NamedTuple):
    """The rows of an `append` after admission."""

    done: Served
    length: jax.Array  # i32[B], tokens before the call
    query_lengths: jax.Array  # i32[B], tokens appended, 0 unless served
    is_decoding: bool  # static: at most one row per request
    valid: jax.Array  # bool[R], True for rows of served requests
    position: jax.Array  # i32[R], in its sequence, 0 if invalid
    table_row: jax.Array  # i32[R], S if invalid
    column: jax.Array  # i32[R], table column
    offset: jax.Array  # i32[R], offset in the block
    tokens: jax.Array | None  # i32[R], if tokens are recorded

    @property
    def num_rows(self) -> int:
        """Number of token rows, R."""
        return self.valid.shape[0]


class DemandPlan(Protocol):
    """The demand of eligible requests on a part."""

    @property
    def lacks(self) -> tuple[Demand, ...]:
        """Demand on each pool of the part."""

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, Moves]:
        """Apply the served requests."""


class Check(Protocol):
    """The first check of requests against a part."""

    @property
    def wrongs(self) -> Masks:
        """Masks of requests whose length is not stored in the part."""

    def judge(self, eligible: jax.Array) -> DemandPlan:
        """Compute the demand of eligible requests, bool[B]."""


class Opening(DemandPlan, Protocol):
    """The plan of `allocate` for a part."""

    def pin(self, metadata: Metadata, row: jax.Array) -> Metadata:
        """Map the blocks found to `row`, i32[B], before any block is taken."""


class Growing(Protocol):
    """The plan of `append` for a part."""

    @property
    def lacks(self) -> tuple[Demand, ...]:
        """Demand of the sequences on each pool of the part."""

    def apply(
        self, metadata: Metadata, step: Step, granted: tuple[Granted, ...]
    ) -> tuple[Metadata, jax.Array | None]:
        """Take the granted blocks; return the block of each row, i32[R], or N."""


class Entering(Protocol):
    """The plan of `swap_in` for a part; sequences enter together or not at all."""

    @property
    def lacks(self) -> tuple[Demand, ...]:
        """Demand of all sequences on each pool of the part, as one request."""

    def apply(
        self, metadata: Metadata, row: jax.Array
    ) -> tuple[Metadata, jax.Array | None]:
        """Map the swapped-in blocks or states to `row`, i32[B].

        All rows are valid, or all are S. Also return the block tables of the rows,
        i32[B, M]; None without blocks.
        """


class Exchanging(Protocol):
    """The plan of `reorder`; sequences may take blocks that others release."""

    def release(self, metadata: Metadata, served: jax.Array) -> Metadata:
        """Count new references, then release the old blocks of served sequences."""

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, Moves]:
        """Apply the served requests: release, then map."""


class SwappedContents(Protocol):
    """Contents of sequences in one group, on the host; a pytree."""

    kind: str  # static, the group's kind

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the sequences."""

    @property
    def num_filled_blocks(self) -> int:
        """Number of blocks whose contents are stored."""

    def encoded_dtype(self, path: str) -> np.dtype[Any] | None:
        """Return the dtype that the bits of an array encode, if it differs."""

    def fits(self, columns: int) -> bool:
        """Return True if block tables of `columns` columns are wide enough."""

    def to_enter(self, columns: int) -> Any:
        """Return the argument of `Part.enter`, for a cache with `columns` columns."""

    def compare(
        self, cache: Cache, number: int, lengths: np.ndarray
    ) -> dict[str, tuple[Any, Any]]:
        """Return pairs that must be equal here and in a group of a cache, by name."""

    def put(
        self,
        cache: Cache,
        number: int,
        seq_ids: np.ndarray,
        tables: jax.Array | None,
        *,
        donate: bool,
    ) -> Cache:
        """Write the contents to entered sequences, given their ids and block tables."""


class Part(Protocol):
    """One part of a model; a static value."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The indices of its groups."""

    def open(
        self,
        metadata: Metadata,
        found: Found,
        num_tokens: jax.Array,
        eligible: jax.Array,
    ) -> Opening:
        """Open sequences with the blocks found, reserving `num_tokens`, i32[B]."""

    def grow(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        new_length: jax.Array,
        eligible: jax.Array,
    ) -> Growing:
        """Grow sequences to `new_length` tokens, i32[B]."""

    def share(self, metadata: Metadata, parents: jax.Array, length: Lengths) -> Check:
        """Start rows from their parents, i32[B], at the given lengths."""

    def cut(self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> Check:
        """Truncate sequences to `lengths`, i32[B]."""

    def prune(self, metadata: Metadata, selection: Selection) -> Check:
        """Keep some tokens of sequences."""

    def enter(self, metadata: Metadata, to_enter: dict[int, Any]) -> Entering:
        """Open sequences with swapped contents, `SwappedContents.to_enter` by group."""

    def exchange(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        parents: jax.Array,
        length: Lengths,
    ) -> Exchanging:
        """Restart sequences from `parents`, which may be among them."""

    def close(
        self, metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
    ) -> Metadata:
        """Release all blocks or states of sequences, i32[B], distinct where bool[B]."""

    def follow(self, storage: Any, moves: Moves) -> Any:
        """Return the storage of one of its groups after the moves."""

    def keep(self, rows: jax.Array, places: jax.Array) -> Moves:
        """Copy the states of rows, i32[B], if any, to snapshot places."""

    def leave(self, metadata: Metadata, seq_ids: jax.Array) -> Any:
        """Return the argument of `fetch` for sequences, i32[B]; leaves are [B, ...]."""

    def fetch(
        self, cache: Cache, seq_ids: np.ndarray, lengths: np.ndarray, left: Any
    ) -> dict[int, SwappedContents]:
        """Copy the contents of sequences to the host, by group."""

    def num_free(self, metadata: Metadata) -> tuple[jax.Array, ...]:
        """Return the number of free blocks of each pool, i32[] each."""


def parts_of(metadata: Metadata) -> tuple[Part, ...]:
    """Return the parts of a cache, created at `init`."""
    return metadata.parts


def apply_plans(
    metadata: Metadata, plans: Sequence[DemandPlan | Exchanging], done: Served
) -> tuple[Metadata, tuple[Moves, ...]]:
    """Apply the served requests to each part; return the moves of their storage."""
    moves = []
    for plan in plans:
        metadata, of_part = plan.apply(metadata, done)
        moves.append(of_part)
    return metadata, tuple(moves)


def close_sequences(
    metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
) -> Metadata:
    """Close rows, i32[B], distinct where bool[B], and release all their contents."""
    metadata = tables.close_rows(metadata, seq_ids, closable)
    for part in parts_of(metadata):
        metadata = part.close(metadata, seq_ids, closable)
    return metadata
