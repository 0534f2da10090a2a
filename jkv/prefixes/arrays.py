"""Arrays of the prefix index.

Symbols in shape comments as in `jkv.state.metadata`; P snapshots, X maximum
tokens of a sequence.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.operations import gather, scatter
from jkv.state.index import NoIndex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Snapshots:
    """Keys of the snapshots, which are copies of states at the ends of sequences.

    The tokens identify a snapshot. The least recently used one is evicted first.
    """

    lengths: jax.Array  # i32[P], number of tokens, 0 for an empty snapshot
    salts: jax.Array  # i32[P], cache salt
    hashes: jax.Array  # u32[P], hash of the tokens, which proposes a match
    num_pending: jax.Array  # i32[P], pending tokens among them
    last_used: jax.Array  # u32[P], value of `num_uses` at the last use
    num_uses: jax.Array  # u32[], total uses of all snapshots
    tokens: jax.Array  # i32[P, X], tokens, ignored past the length
    # i32[S, X], recorded tokens of each sequence, -1 for none.
    sequence_tokens: jax.Array
    # Divides all lengths; static, as prompts are split by it.
    every: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairedBlocks:
    """Pairs of blocks of a group and the leading group, which has N_0 blocks.

    A pair is valid if both sides agree: `partners[f] == w` and `beside[w] == f`. The
    group clears `beside[w]` when w is evicted, and the leader resets `partners[f]` when
    f enters the index.
    """

    partners: jax.Array  # i32[N_0], partner of each leader block, N for none
    beside: jax.Array  # i32[N], leader block of each block, N_0 for none


class IndexRow(NamedTuple):
    """The index's record of a sequence."""

    committed: jax.Array  # i32[...], committed tokens; -1: commits no more
    salt: jax.Array  # i32[...], cache salt
    epoch: jax.Array  # u32[...], tick of the opening or last truncation


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndexArrays(NoIndex):
    """Arrays of the prefix index: full blocks by the tokens up to their end.

    The N blocks of the *leading* group are indexed: the first group with full
    attention, or the one with the largest window. Blocks of the other groups are paired
    with them. A block is indexed from its `commit` until the pool evicts it, whether
    live or free (then it is a *cached* block). Its parent is the preceding block; the
    chain of parents leads to the first block of a prompt. A parent stays indexed as
    long as its children: every table row with a child has the parent one column before,
    and rows are released from their end. (Not with a sliding window: see the last
    fields.)

    `table` is a hash table with 12 entries per row, N where empty: N rows of blocks
    by the hash of their prefix, then N rows by the hash of their parent.
    Entries may be stale, so readers compare with the arrays by block.

    Functions of this package take the arrays; `jkv.prefixes.index.PrefixIndex` adds the
    methods for verbs.
    """

    table: jax.Array  # i32[2N, 12], `jkv.prefixes.hash_tables`
    hashes: jax.Array  # u32[N], hash of the prefix to the block's end, 0 if not indexed
    parents: jax.Array  # i32[N], the preceding block, N for the first of a prompt
    salts: jax.Array  # i32[N], cache salt
    rows: jax.Array  # i32[S, 3], the columns of `IndexRow`
    # If the leading group has a window, which releases parents before their children,
    # no block has a parent, and more hashes identify the preceding tokens.
    wide_hashes: jax.Array | None  # u32[N, 2], of the prefix up to the block's end
    hashes_above: jax.Array | None  # u32[N], of the prefix up to the block's start
    # Of each group except the leader, in their order.
    followers: tuple[PairedBlocks, ...]
    snapshots: Snapshots | None  # None without recurrent-state layers

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the leading group, N."""
        return self.hashes.shape[0]

    @property
    def snapshot_every(self) -> int | None:
        """Interval between snapshot lengths, None without snapshots."""
        return None if self.snapshots is None else self.snapshots.every

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots of states, P."""
        return 0 if self.snapshots is None else self.snapshots.lengths.shape[0]

    def count_snapshots(self) -> jax.Array:
        """Return the number of snapshots in use, i32[]."""
        if self.snapshots is None:
            return jnp.int32(0)
        return jnp.sum(self.snapshots.lengths > 0, dtype=jnp.int32)

    def used_snapshots(self) -> jax.Array:
        """Return True for places of snapshots in use, bool[P]."""
        if self.snapshots is None:
            return jnp.zeros((0,), bool)
        return self.snapshots.lengths > 0

    def read(self, seq_ids: jax.Array) -> IndexRow:
        """Return the rows of sequences, i32[...]; ids out of range are clamped."""
        return _split(gather(self.rows, seq_ids))

    def write(self, row: jax.Array, values: IndexRow) -> Self:
        """Replace distinct rows, i32[B]; rows >= S are dropped."""
        epoch = jax.lax.bitcast_convert_type(values.epoch, jnp.int32)
        columns = (values.committed, values.salt, epoch)
        stacked = jnp.stack([jnp.broadcast_to(c, row.shape) for c in columns], axis=-1)
        return dataclasses.replace(self, rows=scatter(self.rows, row, stacked))

    @property
    def committed(self) -> jax.Array:
        """Committed tokens of each sequence, i32[S]; -1: commits no more."""
        return _split(self.rows).committed

    @property
    def sequence_salts(self) -> jax.Array:
        """Cache salt of each sequence, i32[S]."""
        return _split(self.rows).salt

    @property
    def epochs(self) -> jax.Array:
        """Tick of each sequence's opening or last truncation, u32[S]."""
        return _split(self.rows).epoch

    def with_committed(self, committed: jax.Array) -> Self:
        """Return the index with other committed lengths, i32[S]."""
        return dataclasses.replace(self, rows=self.rows.at[..., 0].set(committed))


def _split(rows: jax.Array) -> IndexRow:
    committed, salt, epoch = (rows[..., i] for i in range(3))
    return IndexRow(committed, salt, jax.lax.bitcast_convert_type(epoch, jnp.uint32))
