"""The prefix index as a value with the face that the core knows (`jkv.state.index`)."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jkv.prefixes.arrays import IndexArrays


def _later(module: str, name: str) -> Any:
    """Return a function of this room, which is imported when it is first called.

    A cache without an index has a name for this class, and no use for the room.
    """

    def call(*arguments: Any) -> Any:
        home = importlib.import_module(f"jkv.prefixes.{module}")
        return getattr(home, name)(*arguments)

    return staticmethod(call)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixIndex(IndexArrays):
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
    tells them apart. Verbs call the methods, and programs that look at a cache read the
    arrays (`IndexArrays`).
    """

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
        return self.epochs.at[seq_ids].get(mode="clip")

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens visible of sequences, and their domains, i32[B] each."""
        of_sequences = self.committed, self.sequence_salts
        committed, salts = (each.at[seq_ids].get(mode="clip") for each in of_sequences)
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
