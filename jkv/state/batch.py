"""The plan of one step, and where its tokens are stored.

Symbols in shape comments as in `jkv.state.metadata`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.status import UsageError


class StepSizes(NamedTuple):
    """What a batch and the cache that it is used with agree in; letters as ever."""

    groups: tuple[Any, ...]  # of each what its storage says
    block_size: int  # T
    max_sequences: int  # S
    max_context_length: int


def check_group(number: int, has_blocks: Sequence[bool]) -> None:
    """Refuse the number of a group that is not there, or has no blocks."""
    if not 0 <= number < len(has_blocks):
        raise UsageError(f"group must be in 0..{len(has_blocks) - 1}, got {number}")
    if not has_blocks[number]:
        raise UsageError(f"group {number} has a state and no blocks")


class Slots(NamedTuple):
    """Cells of tokens: where each one is stored."""

    block_ids: jax.Array  # i32[...], N where nothing is mapped
    offsets: jax.Array  # i32[...], 0 to T-1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The plan of one step: B requests over R token rows.

    Request i owns the rows from `query_starts[i]` on; of a served one, the first
    `query_lengths[i]` rows are its new tokens, the last of them at position
    `context_lengths[i] - 1`. A refused request has the length its sequence had before
    the call; padding and ids that are not open have 0. What is changed by hand in
    these arrays `plan` does not know: replace it by None.
    """

    seq_ids: jax.Array  # i32[B], as asked
    status: jax.Array  # i32[B], `Status`
    query_starts: jax.Array  # i32[B], first row; R or above when past the end
    query_lengths: jax.Array  # i32[B], tokens appended, 0 for a refused request
    context_lengths: jax.Array  # i32[B], tokens of the sequence after the step
    positions: jax.Array  # i32[R], position of each row in its sequence, 0 if invalid
    valid: jax.Array  # bool[R], whether a served request owns the row
    offsets: jax.Array  # i32[R], offset of the row's slot in its block, 0 if invalid
    # Of each group i32[R], block of the row's slot, the group's N if invalid; None of
    # one without blocks.
    blocks_of_groups: tuple[jax.Array | None, ...]
    epochs: jax.Array | None  # u32[B], for `commit`: when the sequence last lost tokens
    # i32[B] each, where tokens may be pending: those before the step and after it.
    pending_counts: tuple[jax.Array, jax.Array] | None = None
    # What attention found out about the step for all layers; made and read by it alone.
    plan: Any = None
    # i32[...], rows whose logits are asked for, where that is not each request's last.
    asked_rows: jax.Array | None = None
    # Static: whether it is known from the call that each request has one row at most.
    is_decoding: bool = dataclasses.field(metadata={"static": True})
    # Static: whether what a row gets is to depend on nothing but its own sequence.
    by_position: bool = dataclasses.field(default=False, metadata={"static": True})
    # Static: those of the cache that planned it, to tell a batch of another cache.
    sizes: StepSizes = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Token rows, R."""
        return self.positions.shape[0]

    @property
    def last_rows(self) -> jax.Array:
        """Row of each request's last token, i32[B]; R where it has none.

        Of a step that is scored, the rows that are asked for, i32[...].
        """
        if self.asked_rows is not None:
            return self.asked_rows
        last = self.query_starts + self.query_lengths - 1
        return jnp.where(self.query_lengths > 0, last, self.num_rows)

    @property
    def pending_before(self) -> jax.Array:
        """Tokens of each sequence that were pending before the step, i32[B]."""
        return self._pending(0)

    @property
    def pending_after(self) -> jax.Array:
        """Tokens of each sequence that are pending after the step, i32[B]."""
        return self._pending(1)

    def _pending(self, when: int) -> jax.Array:
        if self.pending_counts is None:
            return jnp.zeros(self.query_lengths.shape, jnp.int32)
        return self.pending_counts[when]

    @property
    def block_ids(self) -> jax.Array:
        """Block of each row's slot, i32[R], N if invalid, where there is one group.

        Raises:
          UsageError: with several groups with blocks; take `slots_of`. Or with none.
        """
        found = [blocks for blocks in self.blocks_of_groups if blocks is not None]
        if len(found) != 1:
            raise UsageError(
                f"this batch has slots in {len(found)} groups of layers; take "
                f"batch.slots_of(group)"
            )
        return found[0]

    def slots_of(self, group: int) -> Slots:
        """Return the slot of each row in a group of layers, i32[R] each.

        Args:
          group: its number in the configuration; a group with blocks.

        Raises:
          UsageError: if there is no such group, or it has a state.
        """
        check_group(group, [blocks is not None for blocks in self.blocks_of_groups])
        blocks = self.blocks_of_groups[group]
        assert blocks is not None
        return Slots(blocks, self.offsets)

    def first_requests(self, num_requests: int) -> Self:
        """Return the step without the requests behind the first ones, which own no row.

        Args:
          num_requests: requests that are left.
        """
        by_request = (
            *("seq_ids", "status", "query_starts", "query_lengths", "context_lengths"),
            *("epochs", "pending_counts"),
        )
        first = {
            name: jax.tree.map(lambda each: each[:num_requests], getattr(self, name))
            for name in by_request
        }
        return dataclasses.replace(self, plan=None, **first)

    def first_rows(self, num_rows: int) -> Self:
        """Return the step without the rows behind the first ones; none has an owner.

        Args:
          num_rows: rows that are left.
        """
        by_row = "positions", "valid", "offsets", "blocks_of_groups"
        first = {
            name: jax.tree.map(lambda rows: rows[:num_rows], getattr(self, name))
            for name in by_row
        }
        return dataclasses.replace(self, plan=None, **first)
