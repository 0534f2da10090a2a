"""Trajectory trees: built by hand or recorded from a rollout, padded and partitioned.

`jkv.score` computes each token of a `TrajectoryTree` once, forward and backward.
"""

from jkv.decoding.sequences.trajectory_tree import TrajectoryTree, grow, read_sequence
from jkv.trees.records import (
    TreeRecord,
    note_allocate,
    note_extend,
    note_fed,
    note_fork,
    note_generate,
    note_given,
)
from jkv.trees.sizes import TreeParts, pad, split

__all__ = [
    "TrajectoryTree",
    "TreeParts",
    "TreeRecord",
    "grow",
    "note_allocate",
    "note_extend",
    "note_fed",
    "note_fork",
    "note_generate",
    "note_given",
    "pad",
    "read_sequence",
    "split",
]
