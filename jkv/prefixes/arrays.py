"""The prefix index: its arrays, and the face that the core knows (`jkv.state.index`).

Symbols in shape comments as in `jkv.state.metadata`; P places of snapshots, X tokens
that a sequence may have.
"""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jkv.indexing import gather


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


def _later(module: str, name: str) -> Any:
    """Return a function of this room, which is imported when it is first called."""

    def call(*arguments: Any) -> Any:
        home = importlib.import_module(f"jkv.prefixes.{module}")
        return getattr(home, name)(*arguments)

    return staticmethod(call)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixIndex:
    """Which full blocks can be found by the tokens that lead up to their end.

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

    A cache without prefix caching has an index, too, which finds nothing: `is_there`
    tells them apart. Verbs call the methods; functions of this room take the arrays.
    """

    buckets: jax.Array  # i32[N, 8], blocks by the hash of their prefix, N where empty
    children: jax.Array  # i32[N, 16], blocks by the hash of their parent, N where empty
    hashes: jax.Array  # u32[N], hash of the prefix to the block's end, 0 if not indexed
    parents: jax.Array  # i32[N], the block before, N for the first of a prompt
    salts: jax.Array  # i32[N], domain of the block
    committed: jax.Array  # i32[S], tokens made visible; -1: none will ever be
    sequence_salts: jax.Array  # i32[S], domain of each sequence
    epochs: jax.Array  # u32[S], clock when the sequence was opened or last cut back
    # Where the leading group has a window, which gives parents back before their
    # children: no block has a parent, and what came before it is known by more hashes.
    wide_hashes: jax.Array | None  # u32[N, 2], of the prefix to the block's end
    hashes_above: jax.Array | None  # u32[N], of the prefix to its beginning
    # Of each group but the leading one, in their order.
    followers: tuple[Beside, ...]
    snapshots: Snapshots | None  # where there are groups with a state

    is_there = True  # `NoIndex` says False

    @property
    def snapshot_every(self) -> int | None:
        """At multiples of which length states are kept, None if never."""
        return None if self.snapshots is None else self.snapshots.every

    @property
    def num_places(self) -> int:
        """Places for snapshots of states, P."""
        return 0 if self.snapshots is None else self.snapshots.lengths.shape[0]

    def count_snapshots(self) -> jax.Array:
        """Return how many places hold one, i32[]."""
        if self.snapshots is None:
            return jnp.int32(0)
        return jnp.sum(self.snapshots.lengths > 0, dtype=jnp.int32)

    def epochs_of(self, seq_ids: jax.Array) -> jax.Array:
        """Return when sequences were opened or last cut back, u32[B]."""
        return gather(self.epochs, seq_ids)

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens visible of sequences, and their domains, i32[B] each."""
        of_sequences = self.committed, self.sequence_salts
        committed, salts = (gather(each, seq_ids) for each in of_sequences)
        return committed, salts

    # What takes the metadata asks it for the index.
    find = _later("prompt_search", "find")
    find_state = _later("snapshots", "find_at")
    find_partings = _later("prompt_search", "find_partings")
    find_partings_behind = _later("prompt_search", "find_partings_behind")
    texts_of = _later("sequences", "texts_of")
    begin = _later("sequences", "begin")
    enter = _later("sequences", "enter")
    record = _later("sequences", "record_texts")
    inherit = _later("sequences", "inherit")
    cut = _later("sequences", "cut_back")
    use = _later("snapshots", "mark_used")
    knows = _later("prefix_index", "is_known")
    forget = _later("prefix_index", "forget_taken")
    forget_rewritten = _later("prefix_index", "forget_rewritten")
    commit = _later("commitment", "commit_step")
    rename = _later("rebuilding", "rename_blocks")
    reenter = _later("rebuilding", "reenter")
