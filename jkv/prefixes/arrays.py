"""Arrays of the prefix index.

Symbols in shape comments as in `jkv.state.metadata`; P places of snapshots, X tokens
that a sequence may have.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter
from jkv.state.no_index import NoIndex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Snapshots:
    """Whose states the places for snapshots hold: copies made at the end of a text.

    A place knows its text by its tokens. The one unused for longest is given up first.
    """

    lengths: jax.Array  # i32[P], tokens of the text, 0 where the place is empty
    salts: jax.Array  # i32[P], domain of the text
    hashes: jax.Array  # u32[P], of the text: it proposes, and the tokens decide
    num_pending: jax.Array  # i32[P], of the text's last tokens those pending
    last_used: jax.Array  # u32[P], the number of the use of each place that came last
    num_uses: jax.Array  # u32[], uses of all places so far
    texts: jax.Array  # i32[P, X], the tokens of each; nothing counts past its length
    # i32[S, X], the tokens told of each sequence, -1 for none.
    sequence_texts: jax.Array
    # The lengths are multiples of this; static, as prompts are cut by it.
    every: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """Which blocks of a group stood beside those of the leading group, N_0 of them.

    A block is found only where both agree: `partners[f] == w` and `beside[w] == f`. The
    group forgets `beside[w]` when it hands w out, and the leader sets `partners[f]`
    anew when f enters the index.
    """

    partners: jax.Array  # i32[N_0], the block beside each of the leader's, N for none
    beside: jax.Array  # i32[N], the leader's block beside each one, N_0 for none


class IndexRow(NamedTuple):
    """What the index holds of a sequence."""

    committed: jax.Array  # i32[...], tokens made visible; -1: none will ever be
    salt: jax.Array  # i32[...], cache salt
    epoch: jax.Array  # u32[...], clock when it was opened or last cut


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndexArrays(NoIndex):
    """Arrays of the prefix index: full blocks by the tokens up to their end.

    The blocks of the *leading* group are indexed, N of them: the first group that sees
    everything, or else the one that sees furthest. The blocks of the others are found
    beside them. A block is indexed from the `commit` that made it visible until the
    pool hands it out again, whether live or free (then it is a *cached* block). Its
    parent is the block before it; the parents of a block lead back to the first block
    of a prompt. A parent stays indexed as long as its children: every table row that
    names a child names the parent one column before, and rows are released from their
    end. (Not with a sliding window: see the fields at the end.)

    Buckets and children are hash tables with 8 and 16 entries to a row. What they name
    need not be indexed any more: a reader compares with the arrays by block.

    Functions of this package take the arrays; `jkv.prefixes.index.PrefixIndex` adds the
    methods that verbs call.
    """

    buckets: jax.Array  # i32[N, 8], blocks by the hash of their prefix, N where empty
    children: jax.Array  # i32[N, 16], blocks by the hash of their parent, N where empty
    hashes: jax.Array  # u32[N], hash of the prefix to the block's end, 0 if not indexed
    parents: jax.Array  # i32[N], the block before, N for the first of a prompt
    salts: jax.Array  # i32[N], domain of the block
    rows: jax.Array  # i32[S, 3], the columns of `IndexRow`
    # Where the leading group has a window, which gives parents back before their
    # children: no block has a parent, and what came before it is known by more hashes.
    wide_hashes: jax.Array | None  # u32[N, 2], of the prefix to the block's end
    hashes_above: jax.Array | None  # u32[N], of the prefix to its beginning
    # Of each group but the leading one, in their order.
    followers: tuple[Beside, ...]
    snapshots: Snapshots | None  # where there are groups with a state

    @property
    def snapshot_every(self) -> int | None:
        """Length whose multiples states are copied at, None if never."""
        return None if self.snapshots is None else self.snapshots.every

    @property
    def num_places(self) -> int:
        """Places for snapshots of states, P."""
        return 0 if self.snapshots is None else self.snapshots.lengths.shape[0]

    def count_snapshots(self) -> jax.Array:
        """Return the number of places in use, i32[]."""
        if self.snapshots is None:
            return jnp.int32(0)
        return jnp.sum(self.snapshots.lengths > 0, dtype=jnp.int32)

    def read(self, seq_ids: jax.Array) -> IndexRow:
        """Return the rows of sequences, i32[...]; an id out of range is clamped."""
        return _split(gather(self.rows, seq_ids))

    def write(self, row: jax.Array, values: IndexRow) -> Self:
        """Replace distinct rows, i32[B]; one of S or above is dropped."""
        epoch = jax.lax.bitcast_convert_type(values.epoch, jnp.int32)
        columns = (values.committed, values.salt, epoch)
        stacked = jnp.stack([jnp.broadcast_to(c, row.shape) for c in columns], axis=-1)
        return dataclasses.replace(self, rows=scatter(self.rows, row, stacked))

    @property
    def committed(self) -> jax.Array:
        """Visible tokens of each sequence, i32[S]; -1: none will ever be."""
        return _split(self.rows).committed

    @property
    def sequence_salts(self) -> jax.Array:
        """Cache salt of each sequence, i32[S]."""
        return _split(self.rows).salt

    @property
    def epochs(self) -> jax.Array:
        """Clock when each sequence was opened or last cut, u32[S]."""
        return _split(self.rows).epoch

    def with_committed(self, committed: jax.Array) -> Self:
        """Return the index with other visible tokens of all sequences, i32[S]."""
        return dataclasses.replace(self, rows=self.rows.at[..., 0].set(committed))


def _split(rows: jax.Array) -> IndexRow:
    committed, salt, epoch = (rows[..., i] for i in range(3))
    return IndexRow(committed, salt, jax.lax.bitcast_convert_type(epoch, jnp.uint32))
