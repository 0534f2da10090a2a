"""Trajectory trees: built by hand or recorded from a rollout, padded and partitioned.

`jkv.score` computes each token of a `TextTree` once, forward and backward.
"""

from jkv.decoding.texts.text_tree import TextTree, grow, read_text
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
    "TextTree",
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
    "read_text",
    "split",
]
