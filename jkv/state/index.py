"""What can be found again: the face by which everything else asks an index.

There are two values with this face: `NoIndex` (`jkv.state.no_index`), which has no
arrays and finds nothing, so that it adds no instruction to a program; and the prefix
index, which nothing below it imports.

A method takes the metadata that the index is in, and returns one: a loop carries
metadata, so an index that was kept from before is stale. `self` only says which kind it
is.

Symbols in shape comments as in `jkv.state.metadata`; C columns, P places of snapshots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from jkv.state.batch import Batch
from jkv.state.windows import Columns

Metadata = TypeVar("Metadata")  # `jkv.state.Metadata`, which has an index


class FoundBlocks(NamedTuple):
    """What is found of B prompts in one group."""

    # i32[B, C], the block of each column, N where none is found or nothing needs it.
    blocks: jax.Array
    gap: Columns  # i32[B] or 0, of the leading columns those that nothing needs
    # i32[B], a block that begins like what follows, N if there is none; None where
    # nothing was looked for.
    part: jax.Array | None


class FoundState(NamedTuple):
    """The snapshots of states that B requests go on from."""

    place: jax.Array  # i32[B], P for none
    num_pending: jax.Array  # i32[B], tokens of its text that are pending there
    none: int  # static: P

    def only(self, chosen: jax.Array) -> Self:
        """Return those of the chosen requests, bool[B], and none of others."""
        return self._replace(place=jnp.where(chosen, self.place, self.none))


class Found(NamedTuple):
    """What is found of each of B prompts, in C whole blocks and a part.

    Where nothing is looked for there are no columns.
    """

    num_blocks: jax.Array  # i32[B], leading columns found
    num_part: jax.Array  # i32[B], tokens in common with the part, below T
    groups: dict[int, FoundBlocks]  # by the number of the group
    state: FoundState | None = None  # at the columns' end; None without snapshots

    def num_tokens(self, block_size: int) -> jax.Array:
        """Return the tokens found, i32[B]."""
        return self.num_blocks * block_size + self.num_part


class Index(Protocol[Metadata]):
    """What can be found again, and what becomes of it.

    Rows are those of the tables: one of S or above is dropped.
    """

    @property
    def is_there(self) -> bool:
        """Whether `commit` makes anything found; static."""

    @property
    def snapshot_every(self) -> int | None:
        """At multiples of which length states are kept, None if never; static."""

    @property
    def num_places(self) -> int:
        """Places for snapshots of states, P; static."""

    def count_snapshots(self) -> jax.Array:
        """Return how many places hold one, i32[]."""

    def find(
        self, metadata: Metadata, tokens: jax.Array | None, salts: jax.Array
    ) -> Found:
        """Look up prompts; the last token of each is never found.

        They are i32[B, P], negative from each one's end on, or None; their domains
        i32[B].
        """

    def find_state(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> FoundState | None:
        """Look up snapshots of sequences' own texts at lengths above 0, or None."""

    def find_partings(
        self, metadata: Metadata, tokens: jax.Array, salts: jax.Array
    ) -> jax.Array | None:
        """Return up to where prompts are like a text that is known, i32[B].

        That may be further than they are found, where states are: a snapshot is worth
        while there. None without snapshots. Arguments as for `find`.
        """

    def find_partings_behind(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        lengths: jax.Array,
        tokens: jax.Array,
    ) -> jax.Array | None:
        """Return the same of sequences' first tokens, i32[B], and those behind them."""

    def begin(
        self,
        metadata: Metadata,
        row: jax.Array,
        salts: jax.Array,
        num_cached: jax.Array,
        tokens: jax.Array | None,
    ) -> Metadata:
        """Let rows, i32[B], begin with the tokens found of prompts, i32[B]; count."""

    def enter(
        self, metadata: Metadata, row: jax.Array, salts: jax.Array, known: jax.Array
    ) -> Metadata:
        """Note the domains of rows from elsewhere, and the tokens visible, i32[B]."""

    def record(
        self, metadata: Metadata, row: jax.Array, position: jax.Array, tokens: jax.Array
    ) -> Metadata:
        """Note tokens, i32[...], at positions of rows."""

    def inherit(
        self,
        metadata: Metadata,
        row: jax.Array,
        parents: jax.Array,
        lengths: jax.Array,
        is_exchange: bool = False,
        /,
    ) -> Metadata:
        """Let rows go on from the first tokens of what their parents are, i32[B] each.

        With an exchange a parent may be a row, too.
        """

    def cut(self, metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
        """Note that rows hold no more than these tokens any longer, i32[B] each."""

    def use(self, metadata: Metadata, found: FoundState | None) -> Metadata:
        """Note that snapshots are gone on from, in the order of the requests."""

    def epochs_of(self, seq_ids: jax.Array) -> jax.Array | None:
        """Return when sequences were opened or last cut back, u32[B], for `commit`."""

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Return the tokens visible of sequences, and their domains, i32[B] each."""

    def texts_of(self, metadata: Metadata, row: jax.Array) -> jax.Array:
        """Return the tokens told of rows, i32[..., max_context_length], -1 for none."""

    def knows(self, metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
        """Return whether blocks of a group, i32[...], can be found, bool[...]."""

    def forget(
        self, metadata: Metadata, number: int, block: jax.Array
    ) -> tuple[Metadata, jax.Array]:
        """Forget blocks of a group that are handed out, i32[P]; count those known."""

    def forget_rewritten(
        self, metadata: Metadata, number: int, block: jax.Array
    ) -> Metadata:
        """Forget blocks of a group that are written again, i32[B]; N is dropped.

        What follows one of them is forgotten, too.
        """

    def commit(
        self, metadata: Metadata, batch: Batch
    ) -> tuple[Metadata, tuple[Any, ...]]:
        """Make the blocks that a step filled visible, for `Cache.follow`."""

    def rename(
        self,
        metadata: Metadata,
        number: int,
        renamed: Callable[[jax.Array], jax.Array],
        moved: Callable[[jax.Array, int], jax.Array],
    ) -> Metadata:
        """Give the blocks of a group new ids wherever the index names them.

        Everything else is renumbered. `renamed` gives new ids, N' where there is none,
        `moved` values of the new blocks from those of the old, with a fill for new
        ones.
        """

    def reenter(self, metadata: Metadata) -> Metadata:
        """Enter all blocks anew, as there is another number of them."""
