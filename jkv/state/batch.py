"""The plan of one step, and where its tokens are stored.

Symbols in shape comments as in `jkv.state.ownership`.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.attention.kernel.lists import WorkLists


class StepSizes(NamedTuple):
    """What a batch and the cache that it is used with agree in; letters as ever."""

    num_layers: int  # L
    num_blocks: int  # N
    num_kv_heads: int  # K
    block_size: int  # T
    head_dim: int  # D
    value_head_dim: int  # Dv
    max_sequences: int  # S
    max_context_length: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The plan of one step: B requests over R token rows.

    Request i owns the rows from `query_starts[i]` on; of a served one, the first
    `query_lengths[i]` rows are its new tokens, the last of them at position
    `context_lengths[i] - 1`. A refused request has the length its sequence had before
    the call; padding and ids that are not open have 0. What is changed by hand in
    these arrays `work_lists` does not know: replace it by None.
    """

    seq_ids: jax.Array  # i32[B], as asked
    status: jax.Array  # i32[B], `Status`
    query_starts: jax.Array  # i32[B], first row; R or above when past the end
    query_lengths: jax.Array  # i32[B], tokens appended, 0 for a refused request
    context_lengths: jax.Array  # i32[B], tokens of the sequence after the step
    positions: jax.Array  # i32[R], position of each row in its sequence, 0 if invalid
    valid: jax.Array  # bool[R], whether a served request owns the row
    block_ids: jax.Array  # i32[R], block of the row's slot, N if invalid
    offsets: jax.Array  # i32[R], offset in the block, 0 if invalid
    epochs: jax.Array | None  # u32[B], for `commit`: when the sequence last lost tokens
    # Who reads what, for the kernel of the card at hand; None where there is none.
    work_lists: WorkLists | None
    # Static: whether it is known from the call that each request has one row at most.
    is_decoding: bool = dataclasses.field(metadata={"static": True})
    # Static: those of the cache that planned it, to tell a batch of another cache.
    sizes: StepSizes = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Token rows, R."""
        return self.positions.shape[0]

    @property
    def last_rows(self) -> jax.Array:
        """Row of each request's last token, i32[B]; R where it has none."""
        last = self.query_starts + self.query_lengths - 1
        return jnp.where(self.query_lengths > 0, last, self.num_rows)

    @property
    def groups(self) -> "tuple[Batch, ...]":
        """The plan of each group of layers: itself, unless it is a `GroupedBatch`."""
        return (self,)

    def with_work_lists(self, lists: tuple[WorkLists | None, ...]) -> Self:
        """Return the step with other lists for the kernel.

        Args:
          lists: of each group.
        """
        return dataclasses.replace(self, work_lists=lists[0])

    def first_rows(self, num_rows: int) -> Self:
        """Return the step without the rows behind the first ones; nobody may own them.

        Args:
          num_rows: rows that are left.
        """
        by_row = "positions", "valid", "block_ids", "offsets"
        first = {name: getattr(self, name)[:num_rows] for name in by_row}
        return dataclasses.replace(self, work_lists=None, **first)


class Slots(NamedTuple):
    """Cells of tokens: where each one is stored."""

    block_ids: jax.Array  # i32[...], N where nothing is mapped
    offsets: jax.Array  # i32[...], 0 to T-1
