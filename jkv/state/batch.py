"""The plan of one step, and the slots of its tokens.

Symbols in shape comments as in `jkv.state.metadata`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.status import UsageError

if TYPE_CHECKING:
    from jkv.masks import StepMask


class StepSizes(NamedTuple):
    """Sizes that must be equal in a batch and the cache it is used with."""

    groups: tuple[Any, ...]  # sizes of each group's storage
    block_size: int  # T
    max_sequences: int  # S
    max_context_length: int


def check_group(number: int, has_blocks: Sequence[bool]) -> None:
    """Refuse the number of a missing group or one without blocks."""
    if not 0 <= number < len(has_blocks):
        raise UsageError(f"group must be in 0..{len(has_blocks) - 1}, got {number}")
    if not has_blocks[number]:
        raise UsageError(f"group {number} has a recurrent state and no blocks")


class Slots(NamedTuple):
    """Slots of tokens in a pool."""

    block_ids: jax.Array  # i32[...], N where not mapped
    offsets: jax.Array  # i32[...], 0 to T-1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The plan of one step: B requests over R token rows.

    Request i owns the rows from `query_starts[i]` on; if served, its first
    `query_lengths[i]` rows are its new tokens, which end at `context_lengths[i]`. A
    refused request has the context length from before the call; padding and closed ids
    have 0. `plan` is derived from these arrays: set it to None when changing them.
    """

    seq_ids: jax.Array  # i32[B], as passed to `append`
    status: jax.Array  # i32[B], `Status`
    query_starts: jax.Array  # i32[B], first row; R or above when past the end
    query_lengths: jax.Array  # i32[B], tokens appended, 0 for a refused request
    context_lengths: jax.Array  # i32[B], tokens of the sequence after the step
    positions: jax.Array  # i32[R], position of each row in its sequence, 0 if invalid
    # i32[R], tokens dropped by `prune` before each row: positions minus slots; None in
    # a cache without pruning.
    dropped: jax.Array | None = None
    valid: jax.Array  # bool[R], True for rows of served requests
    offsets: jax.Array  # i32[R], offset of the row's slot in its block, 0 if invalid
    # By group i32[R], block of the row's slot, the group's N if invalid; None for a
    # group without blocks.
    blocks_of_groups: tuple[jax.Array | None, ...]
    epochs: jax.Array | None  # u32[B], for `commit`: tick of the last truncation
    # i32[B] each: pending tokens before and after the step; None without.
    pending_counts: tuple[jax.Array, jax.Array] | None = None
    # The attention plan, shared by all layers; opaque to other code.
    plan: Any = None
    # i32[...], rows with logits; None: the last row of each request.
    logit_rows: jax.Array | None = None
    # What the rows of a request attend to among themselves; None: causal.
    mask: "StepMask | None" = None
    # Static: at most one row per request, known from the arguments.
    is_decoding: bool = dataclasses.field(metadata={"static": True})
    # Static: the position-based split (batch-invariant attention) is on.
    by_position: bool = dataclasses.field(default=False, metadata={"static": True})
    # Static: made by `with_mask`, so that rows may be written a second time.
    is_second: bool = dataclasses.field(default=False, metadata={"static": True})
    # Static: rows of a drafter, which are written again once they are verified.
    is_draft: bool = dataclasses.field(default=False, metadata={"static": True})
    # Static: sizes of the planning cache, to detect a batch of another cache.
    sizes: StepSizes = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of token rows, R."""
        return self.positions.shape[0]

    @property
    def row_slots(self) -> jax.Array:
        """Slot of each row in its sequence, i32[R]: its position without pruning."""
        return self.positions if self.dropped is None else self.positions - self.dropped

    def positions_of(self, row_slots: jax.Array) -> jax.Array:
        """Return the positions of rows at other slots of their sequences, i32[R]."""
        return row_slots if self.dropped is None else row_slots + self.dropped

    @property
    def last_rows(self) -> jax.Array:
        """Row of each request's last token, i32[B]; R if it has none.

        With `logit_rows`, these rows, i32[...].
        """
        if self.logit_rows is not None:
            return self.logit_rows
        last = self.query_starts + self.query_lengths - 1
        return jnp.where(self.query_lengths > 0, last, self.num_rows)

    @property
    def pending_before(self) -> jax.Array:
        """Pending tokens of each sequence before the step, i32[B]."""
        return self._pending(0)

    @property
    def pending_after(self) -> jax.Array:
        """Pending tokens of each sequence after the step, i32[B]."""
        return self._pending(1)

    def _pending(self, when: int) -> jax.Array:
        if self.pending_counts is None:
            return jnp.zeros(self.query_lengths.shape, jnp.int32)
        return self.pending_counts[when]

    @property
    def block_ids(self) -> jax.Array:
        """Block of each row's slot, i32[R], N if invalid, for a single group.

        Raises:
          UsageError: unless exactly one group has blocks; use `slots_of`.
        """
        found = [blocks for blocks in self.blocks_of_groups if blocks is not None]
        if len(found) != 1:
            raise UsageError(
                f"batch.block_ids needs one group with blocks, this batch has "
                f"{len(found)}; use batch.slots_of(group)"
            )
        return found[0]

    def slots_of(self, group: int) -> Slots:
        """Return the slot of each row in a group of layers, i32[R] each.

        Args:
          group: its index in the configuration; a group with blocks.

        Raises:
          UsageError: if there is no such group, or it has no blocks.
        """
        check_group(group, [blocks is not None for blocks in self.blocks_of_groups])
        blocks = self.blocks_of_groups[group]
        assert blocks is not None
        return Slots(blocks, self.offsets)

    def first_requests(self, num_requests: int) -> Self:
        """Return the step with only its first requests; the others own no rows.

        Args:
          num_requests: number of requests to keep.
        """
        by_request = (
            *("seq_ids", "status", "query_starts", "query_lengths", "context_lengths"),
            *("epochs", "pending_counts"),
        )
        first = {
            name: jax.tree.map(lambda each: each[:num_requests], getattr(self, name))
            for name in by_request
        }
        mask = None if self.mask is None else self.mask.first_requests(num_requests)
        return dataclasses.replace(self, plan=None, mask=mask, **first)

    def first_rows(self, num_rows: int) -> Self:
        """Return the step with only its first rows; the others are unowned.

        Args:
          num_rows: number of rows to keep.
        """
        by_row = "positions", "dropped", "valid", "offsets", "blocks_of_groups"
        first = {
            name: jax.tree.map(lambda rows: rows[:num_rows], getattr(self, name))
            for name in by_row
        }
        mask = None if self.mask is None else self.mask.first_rows(num_rows)
        return dataclasses.replace(self, plan=None, mask=mask, **first)

    def row(self, index: int | jax.Array) -> Self:
        """Return one row of each request, alone: a decode step in the same slots.

        A drafter computes its rows one by one, as each needs the token drafted before
        it. Requests with fewer rows have none here.

        Args:
          index: i32[] or int, the row within its request; may be traced.
        """
        index = jnp.asarray(index, jnp.int32)
        has_row = index < self.query_lengths
        number = jnp.where(has_row, self.query_starts + index, self.num_rows)
        past = self.context_lengths - self.query_lengths

        def pick(rows: jax.Array, fill: Any) -> jax.Array:
            return rows.at[number].get(mode="fill", fill_value=fill)

        beyond = jnp.iinfo(jnp.int32).max  # no block
        return dataclasses.replace(
            self,
            query_starts=jnp.arange(number.shape[0], dtype=jnp.int32),
            query_lengths=has_row.astype(jnp.int32),
            context_lengths=jnp.where(has_row, past + index + 1, self.context_lengths),
            positions=pick(self.positions, 0),
            dropped=None if self.dropped is None else pick(self.dropped, 0),
            valid=pick(self.valid, False),
            offsets=pick(self.offsets, 0),
            blocks_of_groups=tuple(
                None if blocks is None else pick(blocks, beyond)
                for blocks in self.blocks_of_groups
            ),
            pending_counts=self._pending_of_row(index),
            plan=None,
            logit_rows=None,
            mask=None,
            is_decoding=True,
            is_draft=True,
        )

    def _pending_of_row(self, index: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Return the pending tokens before and after one row of each request."""
        if self.pending_counts is None:
            return None
        before, after = self.pending_counts
        settled = self.query_lengths - after  # rows that are not pending at the end

        def after_row(row: jax.Array) -> jax.Array:
            return jnp.maximum(row + 1 - settled, 0)

        return jnp.where(index == 0, before, after_row(index - 1)), after_row(index)

    def keep_first(self, counts: jax.Array) -> Self:
        """Return the step with only the first rows of each request.

        Args:
          counts: i32[B], at most `query_lengths`; the other rows are unowned.
        """
        dropped = self.query_lengths - counts
        row = jnp.arange(self.num_rows, dtype=jnp.int32)[None]
        start, kept = self.query_starts[:, None], counts[:, None]
        is_kept = jnp.any((row >= start) & (row < start + kept), axis=0)
        pending = self.pending_counts
        if pending is not None:
            pending = pending[0], jnp.maximum(pending[1] - dropped, 0)
        return dataclasses.replace(
            self,
            query_lengths=counts,
            context_lengths=self.context_lengths - dropped,
            valid=self.valid & is_kept,
            pending_counts=pending,
            plan=None,
        )

    def without_slots(self, rows: jax.Array) -> Self:
        """Return the step with some rows, bool[R], that `write` drops."""
        beyond = jnp.iinfo(jnp.int32).max
        blocks = tuple(
            None if each is None else jnp.where(rows, beyond, each)
            for each in self.blocks_of_groups
        )
        return dataclasses.replace(self, blocks_of_groups=blocks)
