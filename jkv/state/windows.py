"""How far back the layers of a group see, as a value: all tokens, or those of a window.

A row at position p of a window of W tokens sees the tokens from `p - W + 1` on, and
those of the sinks. The rows of a sequence go on from where it ends, so what its next
row does not see is seen by no later one. `append` gives such columns back, before it
takes new blocks: what it returns, the rows of the steps before have seen.

The columns given back are a *gap* in a sequence's row of the tables, behind the blocks
of the sinks. Positions never change: a token's column is its position divided by T, as
ever. `Everything` is the window that sees all tokens: it has no arrays, gives nothing
back, and what it answers is a constant, so that it adds no instruction to a program.

Symbols in shape comments as in `jkv.state.metadata`; C columns.
"""

import dataclasses
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import count_window_blocks
from jkv.indexing import gather, scatter, scatter_add

# One for each request, or one for all.
Columns: TypeAlias = jax.Array | int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Everything:
    """No window: each row sees all tokens before it, and nothing is given back."""

    length = None
    num_sink_tokens = 0

    def most_blocks(self, *_: object) -> None:
        """Return that no number of blocks is enough for every text."""

    def _nothing(self, *_: object) -> int:
        """Return that no columns are those of sinks, given back, or seen no more."""
        return 0

    sink_columns = gaps_of = unseen_from = _nothing

    def skip(self, rank: jax.Array, *_: object) -> jax.Array:
        """Return the column of the kept block of each rank: the rank."""
        return rank

    def _as_it_is(self, *_: object) -> Self:
        """Note nothing: no column is ever given back."""
        return self

    with_gaps = with_one_more = _as_it_is

    def cuts_off(self, _: object, lengths: jax.Array, _size: int) -> np.ndarray:
        """Return which sequences cannot go on from earlier lengths: none."""
        return np.zeros(lengths.shape, bool)

    def to_reserve(
        self, total: jax.Array, num_found: jax.Array, *_: object
    ) -> jax.Array:
        """Return the blocks to reserve for texts behind those found: all the others."""
        return total - num_found

    def is_kept(self, _: object, positions: jax.Array, _size: int) -> np.ndarray:
        return np.ones(positions.shape, bool)

    def starts_of(self, seq_ids: jax.Array, _size: int) -> jax.Array:
        """Return the position from which sequences have their tokens: 0."""
        return jnp.zeros(seq_ids.shape, jnp.int32)

    def gone_cells(self, num_columns: int, _size: int) -> np.ndarray:
        """Return which cells of the tables were given back: none."""
        return np.zeros((1, num_columns), bool)

    def reaches(self, is_found: jax.Array, _size: int) -> jax.Array:
        """Return which leading columns suffice to go on behind them, bool[B, C]."""
        return jnp.cumprod(is_found, axis=1, dtype=jnp.int32) > 0

    def needs(self, _: object, num_columns: int, _size: int) -> np.ndarray:
        """Return the columns that texts need to go on: all."""
        return np.ones((1, num_columns), bool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlidingWindow:
    """A window of some tokens, and the columns that sequences have given back.

    Those of a sequence follow each other: before them are the blocks of the sinks,
    behind them what the window needs.
    """

    num_given_back: jax.Array  # i32[S], given back columns of each sequence
    # Tokens that a row sees, itself counted; static, as no shape tells it.
    length: int = dataclasses.field(metadata={"static": True})
    # Tokens at the start of a sequence that are never given back; static, likewise.
    num_sink_tokens: int = dataclasses.field(metadata={"static": True})

    def most_blocks(self, size: int, num_tokens: int) -> int:
        """Return the most blocks of a sequence that grows by so many at a time."""
        return count_window_blocks(self.length, self.num_sink_tokens, size, num_tokens)

    def sink_columns(self, size: int) -> int:
        """Return the columns at the start of a row that are never given back."""
        return -(-self.num_sink_tokens // size)

    def gaps_of(self, seq_ids: jax.Array) -> jax.Array:
        """Return the columns that open sequences have given back, i32[...]."""
        return gather(self.num_given_back, seq_ids)

    def skip(self, rank: jax.Array, gap: Columns, size: int) -> jax.Array:
        """Return the column of the kept block of each rank behind gaps, i32[P]."""
        return jnp.where(rank >= self.sink_columns(size), rank + gap, rank)

    def with_gaps(self, row: jax.Array, gap: Columns) -> Self:
        """Note the columns given back of rows, i32[B]; one of S or above is dropped."""
        given_back = scatter(self.num_given_back, row, gap)
        return dataclasses.replace(self, num_given_back=given_back)

    def with_one_more(self, row: jax.Array) -> Self:
        """Note one more column given back for each mention of a row, i32[P]."""
        given_back = scatter_add(self.num_given_back, row, 1)
        return dataclasses.replace(self, num_given_back=given_back)

    def unseen_from(self, lengths: jax.Array, size: int) -> jax.Array:
        """Return the columns, i32[...], that no row from these lengths on sees.

        Those of the sinks are not among them. A negative length counts as 0.
        """
        first = jnp.maximum(lengths - (self.length - 1), 0)
        column = jax.lax.div(first, jnp.int32(size))
        return jnp.maximum(column - self.sink_columns(size), 0)

    def cuts_off(self, seq_ids: jax.Array, lengths: jax.Array, size: int) -> jax.Array:
        """Return which sequences cannot go on from earlier lengths, bool[B].

        What the row after that length sees must be there still. A sequence can always
        begin anew, from length 0.
        """
        return (lengths != 0) & (
            self.gaps_of(seq_ids) > self.unseen_from(lengths, size)
        )

    def to_reserve(
        self, total: jax.Array, num_found: jax.Array, gap: Columns, size: int
    ) -> jax.Array:
        """Return the blocks to reserve for texts behind those found, i32[B].

        No more than a sequence has at one time that grows token by token. Of the
        leading columns found a gap was given back.
        """
        most = self.most_blocks(size, 1) - (num_found - gap)
        return jnp.minimum(total - num_found, most)

    def is_kept(self, seq_id: jax.Array, positions: jax.Array, size: int) -> jax.Array:
        """Return which positions, i32[P], a sequence, i32[], has kept, bool[P]."""
        first = self.sink_columns(size)
        column = jax.lax.div(positions, jnp.int32(size))
        return (column < first) | (column >= first + self.gaps_of(seq_id))

    def starts_of(self, seq_ids: jax.Array, size: int) -> jax.Array:
        """Return the position, i32[...], from which sequences have tokens."""
        gap = self.gaps_of(seq_ids)
        return jnp.where(gap > 0, (self.sink_columns(size) + gap) * size, 0)

    def gone_cells(self, num_columns: int, size: int) -> jax.Array:
        """Return which cells of the tables were given back, bool[S, C]."""
        first, gap = self.sink_columns(size), self.num_given_back[:, None]
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        return (column >= first) & (column < first + gap)

    def reaches(self, is_found: jax.Array, size: int) -> jax.Array:
        """Return which leading columns suffice to go on behind them, bool[B, C].

        What the next row sees must be found, bool[B, C], and the sinks.
        """
        num_columns = is_found.shape[1]
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        last_missing = jax.lax.cummax(jnp.where(is_found, -1, column), axis=1)
        first_missing = jnp.min(
            jnp.where(is_found, num_columns, column), axis=1, initial=num_columns
        )
        end, sinks = column + 1, self.sink_columns(size)
        has_window = last_missing < self.unseen_from(end * size, size) + sinks
        return has_window & (first_missing[:, None] >= jnp.minimum(sinks, end))

    def needs(self, num_tokens: jax.Array, num_columns: int, size: int) -> jax.Array:
        """Return the columns that texts of i32[B] tokens need to go on, bool[B, C]."""
        gap, sinks = self.unseen_from(num_tokens, size), self.sink_columns(size)
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        return (column < sinks) | (column >= sinks + gap[:, None])


Window: TypeAlias = Everything | SlidingWindow
