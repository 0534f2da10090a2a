"""The index of a cache without prefix caching, and the results of look-ups.

`NoIndex` is the base class of `jkv.prefixes.index.PrefixIndex`. A method takes the
metadata that holds the index and returns metadata: loops carry the metadata, so an
index saved earlier is stale. `self` only selects the kind.

Rows are block table rows: S and above are dropped. Symbols in shape comments as in
`jkv.state.metadata`; C columns, P snapshots.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp

from jkv.state.batch import Batch
from jkv.state.windows import Columns


class FoundBlocks(NamedTuple):
    """Blocks found for B prompts in one group."""

    # i32[B, C], the block of each column, N if not found or not needed.
    blocks: jax.Array
    gap: Columns  # i32[B] or 0, leading columns outside the window
    # i32[B], a block with a common prefix for the next column, N if none; None without
    # a look-up.
    part: jax.Array | None


class FoundState(NamedTuple):
    """Snapshots of states from which B requests continue."""

    snapshot_id: jax.Array  # i32[B], P for none
    num_pending: jax.Array  # i32[B], tokens pending in the snapshot
    none: int  # static: P

    def only(self, chosen: jax.Array) -> Self:
        """Keep the snapshots of the chosen requests, bool[B]."""
        return self._replace(snapshot_id=jnp.where(chosen, self.snapshot_id, self.none))


class Found(NamedTuple):
    """Prefix cache hits of B prompts: C whole blocks and a part of the next.

    There are no columns without a look-up.
    """

    num_blocks: jax.Array  # i32[B], leading columns found
    num_part: jax.Array  # i32[B], tokens copied of the next block
    groups: dict[int, FoundBlocks]  # by index of the group
    state: FoundState | None = None  # at the columns' end; None without snapshots
    # i32[B], last tokens found that are computed again: their keys are copied, but do
    # not count. None: none.
    num_again: jax.Array | None = None

    def num_copied(self, block_size: int) -> jax.Array:
        """Return the tokens with keys, i32[B]: found, and to be computed again."""
        return self.num_blocks * block_size + self.num_part

    def num_tokens(self, block_size: int) -> jax.Array:
        """Return the tokens found, i32[B]."""
        copied = self.num_copied(block_size)
        return copied if self.num_again is None else copied - self.num_again


Metadata: TypeAlias = Any  # `jkv.state.Metadata`, which holds an index


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NoIndex:
    """An index without arrays and without hits, which adds no operations to a program.

    `jkv.prefixes.index.PrefixIndex` overrides every method.
    """

    is_there = False  # static: True if `commit` indexes blocks

    @property
    def snapshot_every(self) -> int | None:
        """Interval between snapshot lengths, None without snapshots; static."""
        return None

    @property
    def num_snapshots(self) -> int:
        """Places for snapshots of states, P; static."""
        return 0

    def count_snapshots(self) -> jax.Array:
        """Return the number of snapshots in use, i32[]."""
        return jnp.int32(0)

    def used_snapshots(self) -> jax.Array:
        """Return True for places of snapshots in use, bool[P]."""
        return jnp.zeros((0,), bool)

    # Look-ups.

    def find(
        self,
        metadata: Metadata,
        tokens: jax.Array | None,
        salts: jax.Array,
        recomputes_last: bool = False,
    ) -> Found:
        """Look up prompts; the last token of each is never found.

        Args:
          metadata: the metadata.
          tokens: i32[B, P], negative from each prompt's end on, or None.
          salts: i32[B], cache salts.
          recomputes_last: static; the last token found is computed again.
        """
        return find_nothing(metadata, salts.shape)

    def find_state(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> FoundState | None:
        """Look up snapshots of sequences at lengths above 0, i32[B] each."""
        return None

    def find_divergence(
        self, metadata: Metadata, tokens: jax.Array, salts: jax.Array
    ) -> jax.Array | None:
        """Return the divergence point of each prompt from known sequences, i32[B].

        It may lie after the cached tokens if only a state is missing: a snapshot there
        is useful. None without snapshots. Arguments as for `find`.
        """
        return None

    def find_divergence_after(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        lengths: jax.Array,
        tokens: jax.Array,
    ) -> jax.Array | None:
        """Return the same for the first tokens of sequences, followed by `tokens`."""
        return None

    def tokens_of(self, metadata: Metadata, row: jax.Array) -> jax.Array:
        """Return the recorded tokens of rows, i32[..., max_context_length], or -1."""
        return jnp.full((*row.shape, metadata.max_context_length), -1, jnp.int32)

    def epochs_of(self, seq_ids: jax.Array) -> jax.Array | None:
        """Return the tick of sequences' opening or last truncation, u32[B]."""
        return None

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Return the committed tokens and the salts of sequences, i32[B] each."""
        return None

    def knows(self, metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
        """Return True for indexed blocks of a group, i32[...]."""
        return jnp.zeros(block.shape, bool)

    def has_parents(self, metadata: Metadata, number: int) -> bool:
        """Return True if a group's indexed blocks need the blocks before them."""
        return False

    # Records of sequences.

    def begin(
        self,
        metadata: Metadata,
        row: jax.Array,
        salts: jax.Array,
        num_cached: jax.Array,
        tokens: jax.Array | None,
    ) -> Metadata:
        """Open rows with the cached tokens of their prompts, i32[B]; count the hits."""
        return metadata

    def enter(
        self, metadata: Metadata, row: jax.Array, salts: jax.Array, known: jax.Array
    ) -> Metadata:
        """Open swapped-in rows with their salts and committed tokens, i32[B]."""
        return metadata

    def record(
        self, metadata: Metadata, row: jax.Array, position: jax.Array, tokens: jax.Array
    ) -> Metadata:
        """Record tokens, i32[...], at positions of rows."""
        return metadata

    def inherit(
        self,
        metadata: Metadata,
        row: jax.Array,
        parents: jax.Array,
        lengths: jax.Array,
        is_exchange: bool = False,
    ) -> Metadata:
        """Copy each parent's tokens and salt to `row`, i32[B] each.

        The committed length is capped at `lengths`. In an exchange a parent may be one
        of the rows.
        """
        return metadata

    def cut(self, metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
        """Cap the committed lengths of truncated rows, i32[B] each."""
        return metadata

    def use(self, metadata: Metadata, found: FoundState | None) -> Metadata:
        """Mark snapshots as used, in the order of the requests."""
        return metadata

    # Blocks.

    def forget(
        self, metadata: Metadata, number: int, block: jax.Array
    ) -> tuple[Metadata, jax.Array]:
        """Remove allocated blocks of a group, i32[P]; return the number indexed."""
        return metadata, jnp.int32(0)

    def forget_rewritten(
        self, metadata: Metadata, number: int, block: jax.Array
    ) -> Metadata:
        """Remove blocks of a group before they are overwritten, i32[B]; N is dropped.

        Their descendants are removed as well.
        """
        return metadata

    def commit(
        self, metadata: Metadata, batch: Batch
    ) -> tuple[Metadata, tuple[Any, ...]]:
        """Index the blocks that a step filled; return moves of storage."""
        return metadata, ()

    def rename(
        self,
        metadata: Metadata,
        number: int,
        renamed: Callable[[jax.Array], jax.Array],
        moved: Callable[[jax.Array, int], jax.Array],
    ) -> Metadata:
        """Renumber the blocks of a group.

        Args:
          metadata: renumbered except for the index.
          number: the group's index.
          renamed: new ids of old ids, N' for none.
          moved: values by new block of values by old block, and the fill of new blocks.
        """
        return metadata

    def reenter(self, metadata: Metadata) -> Metadata:
        """Index all blocks again after the pool was resized."""
        return metadata


# Not a decorator: it is untyped, and a base class needs a type.
jax.tree_util.register_dataclass(NoIndex)


def find_nothing(metadata: Metadata, shape: tuple[int, ...]) -> Found:
    """Return a look-up without a hit, for prompts of i32[*shape]."""
    none = jnp.zeros(shape, jnp.int32)
    columns = jnp.zeros((*shape, 0), jnp.int32)
    nothing = FoundBlocks(columns, 0, None)
    return Found(none, none, dict.fromkeys(metadata.block_numbers, nothing))
