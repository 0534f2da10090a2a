"""Attention windows of a group's layers: full attention or a sliding window.

A row at position p with a window of W tokens attends to the tokens from `p - W + 1` on,
and to the sinks. Tokens outside the window of a sequence's next row stay outside.
Before `append` takes new blocks, it releases such columns; the rows of earlier steps
have attended by then.

The released columns are a *gap* in a sequence's table row, after the blocks of the
sinks. Positions never change: a token's column is its position divided by T.
`FullAttention` is full attention: it has no arrays, releases nothing, and returns
constants, so it adds no operations to a program.

Symbols in shape comments as in `jkv.state.metadata`; C columns.
"""

import dataclasses
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import count_window_blocks
from jkv.operations import gather, scatter, scatter_add

# One per request, or one for all.
Columns: TypeAlias = jax.Array | int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FullAttention:
    """Full attention: each row attends to all tokens before it; nothing is released."""

    length = None
    num_sink_tokens = 0

    def most_blocks(self, *_: object) -> None:
        """Return None: the number of blocks has no bound."""

    def _nothing(self, *_: object) -> int:
        """Return 0 columns, of sinks, released, or outside the window."""
        return 0

    sink_columns = gaps_of = unseen_from = _nothing

    def skip(self, rank: jax.Array, *_: object) -> jax.Array:
        """Return the column of the mapped block of each rank: the rank."""
        return rank

    def _as_it_is(self, *_: object) -> Self:
        """Return self: no column is ever released."""
        return self

    with_gaps = with_one_more = _as_it_is

    def cuts_off(self, _: object, lengths: jax.Array, _size: int) -> np.ndarray:
        """Return False: sequences can continue from any earlier length."""
        return np.zeros(lengths.shape, bool)

    def to_reserve(
        self, total: jax.Array, num_found: jax.Array, *_: object
    ) -> jax.Array:
        """Return the blocks to reserve after the cached ones: all others."""
        return total - num_found

    def is_kept(self, _: object, positions: jax.Array, _size: int) -> np.ndarray:
        return np.ones(positions.shape, bool)

    def starts_of(self, seq_ids: jax.Array, _size: int) -> jax.Array:
        """Return the first cached position of sequences: 0."""
        return jnp.zeros(seq_ids.shape, jnp.int32)

    def gone_cells(self, num_columns: int, _size: int) -> np.ndarray:
        """Return False: no cells of the tables are released."""
        return np.zeros((1, num_columns), bool)

    def reaches(self, is_found: jax.Array, _size: int, _again: int = 0) -> jax.Array:
        """Return True for columns after which a prefix can continue, bool[B, C]."""
        return jnp.cumprod(is_found, axis=1, dtype=jnp.int32) > 0

    def needs(self, _: object, num_columns: int, _size: int) -> np.ndarray:
        """Return True: sequences need all columns to continue."""
        return np.ones((1, num_columns), bool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlidingWindow:
    """A sliding window, and the columns that sequences have released.

    The released columns of a sequence are contiguous, between the blocks of the sinks
    and those of the window.
    """

    num_released: jax.Array  # i32[S], released columns of each sequence
    # Tokens that a row attends to, itself included; static, as no shape implies it.
    length: int = dataclasses.field(metadata={"static": True})
    # Tokens at the start of a sequence that are never released; static, likewise.
    num_sink_tokens: int = dataclasses.field(metadata={"static": True})

    def most_blocks(self, size: int, num_tokens: int) -> int:
        """Return the maximum blocks of a sequence that grows by `num_tokens`."""
        return count_window_blocks(self.length, self.num_sink_tokens, size, num_tokens)

    def sink_columns(self, size: int) -> int:
        """Return the number of columns that hold the sinks."""
        return -(-self.num_sink_tokens // size)

    def gaps_of(self, seq_ids: jax.Array) -> jax.Array:
        """Return the released columns of open sequences, i32[...]."""
        return gather(self.num_released, seq_ids)

    def skip(self, rank: jax.Array, gap: Columns, size: int) -> jax.Array:
        """Return the column of the mapped block of each rank, i32[P], after the gap."""
        return jnp.where(rank >= self.sink_columns(size), rank + gap, rank)

    def with_gaps(self, row: jax.Array, gap: Columns) -> Self:
        """Set the released columns of rows, i32[B]; rows >= S are dropped."""
        released = scatter(self.num_released, row, gap)
        return dataclasses.replace(self, num_released=released)

    def with_one_more(self, row: jax.Array) -> Self:
        """Add a released column for each mention of a row, i32[P]."""
        released = scatter_add(self.num_released, row, 1)
        return dataclasses.replace(self, num_released=released)

    def unseen_from(self, lengths: jax.Array, size: int) -> jax.Array:
        """Return the columns outside the window of rows from `lengths` on, i32[...].

        The columns of the sinks are not counted. A negative length counts as 0.
        """
        first = jnp.maximum(lengths - (self.length - 1), 0)
        column = jax.lax.div(first, jnp.int32(size))
        return jnp.maximum(column - self.sink_columns(size), 0)

    def cuts_off(self, seq_ids: jax.Array, lengths: jax.Array, size: int) -> jax.Array:
        """Return True for sequences that cannot continue from earlier lengths, bool[B].

        The window of the row after that length must be cached. Length 0 is always
        possible.
        """
        return (lengths != 0) & (
            self.gaps_of(seq_ids) > self.unseen_from(lengths, size)
        )

    def to_reserve(
        self, total: jax.Array, num_found: jax.Array, gap: Columns, size: int
    ) -> jax.Array:
        """Return the blocks to reserve after the cached ones, i32[B].

        At most the blocks of a sequence that grows token by token. `gap` of the leading
        columns found are released.
        """
        most = self.most_blocks(size, 1) - (num_found - gap)
        return jnp.minimum(total - num_found, most)

    def is_kept(self, seq_id: jax.Array, positions: jax.Array, size: int) -> jax.Array:
        """Return True for cached positions, i32[P], of a sequence, i32[]."""
        first = self.sink_columns(size)
        column = jax.lax.div(positions, jnp.int32(size))
        return (column < first) | (column >= first + self.gaps_of(seq_id))

    def starts_of(self, seq_ids: jax.Array, size: int) -> jax.Array:
        """Return the first cached position after the gap, i32[...], 0 without one."""
        gap = self.gaps_of(seq_ids)
        return jnp.where(gap > 0, (self.sink_columns(size) + gap) * size, 0)

    def gone_cells(self, num_columns: int, size: int) -> jax.Array:
        """Return True for released cells of the tables, bool[S, C]."""
        first, gap = self.sink_columns(size), self.num_released[:, None]
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        return (column >= first) & (column < first + gap)

    def reaches(self, is_found: jax.Array, size: int, again: int = 0) -> jax.Array:
        """Return True for columns after which a prefix can continue, bool[B, C].

        The columns of the next row's window and of the sinks must be found, bool[B, C];
        with `again`, those of so many rows before it as well.
        """
        num_columns = is_found.shape[1]
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        last_missing = jax.lax.cummax(jnp.where(is_found, -1, column), axis=1)
        first_missing = jnp.min(
            jnp.where(is_found, num_columns, column), axis=1, initial=num_columns
        )
        end, sinks = column + 1, self.sink_columns(size)
        has_window = last_missing < self.unseen_from(end * size - again, size) + sinks
        return has_window & (first_missing[:, None] >= jnp.minimum(sinks, end))

    def needs(self, num_tokens: jax.Array, num_columns: int, size: int) -> jax.Array:
        """Return True for columns that sequences need to continue, bool[B, C]."""
        gap, sinks = self.unseen_from(num_tokens, size), self.sink_columns(size)
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        return (column < sinks) | (column >= sinks + gap[:, None])


Window: TypeAlias = FullAttention | SlidingWindow
