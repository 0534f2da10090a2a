"""Trees of texts: made by hand or by a rollout, padded, and cut into parts.

`jkv.score` takes a `TextTree` and computes each of its tokens once, forward and with
the gradient.
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
