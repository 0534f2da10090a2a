"""Results of a look-up in the prefix index.

Symbols in shape comments as in `jkv.state.metadata`; C columns, P places of snapshots.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

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

    place: jax.Array  # i32[B], P for none
    num_pending: jax.Array  # i32[B], tokens pending in the snapshot
    none: int  # static: P

    def only(self, chosen: jax.Array) -> Self:
        """Keep the snapshots of the chosen requests, bool[B]."""
        return self._replace(place=jnp.where(chosen, self.place, self.none))


class Found(NamedTuple):
    """Prefix cache hits of B prompts: C whole blocks and a part of the next.

    There are no columns without a look-up.
    """

    num_blocks: jax.Array  # i32[B], leading columns found
    num_part: jax.Array  # i32[B], common tokens in the next block, below T
    groups: dict[int, FoundBlocks]  # by index of the group
    state: FoundState | None = None  # at the columns' end; None without snapshots

    def num_tokens(self, block_size: int) -> jax.Array:
        """Return the tokens found, i32[B]."""
        return self.num_blocks * block_size + self.num_part
