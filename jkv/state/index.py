"""Results of a look-up in the prefix index.

Symbols in shape comments as in `jkv.state.metadata`; C columns, P places of snapshots.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.state.windows import Columns


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
