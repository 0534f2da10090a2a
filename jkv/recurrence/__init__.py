"""Recurrent states folded over packed token rows; pure functions of arrays.

A layer's author writes a rule of one token (`rules.Rule`); `folding.fold_rows` folds it
over the rows of a step, and `tokens` reads ahead of them. Start with `rules`.
"""

from jkv.recurrence.folding import fold_rows
from jkv.recurrence.rules import Arrays, ChunkRule, Rows, Rule, trace_output
from jkv.recurrence.tokens import Pending, fold_alike, read_ahead, replay

__all__ = [
    "Arrays",
    "ChunkRule",
    "Pending",
    "Rows",
    "Rule",
    "fold_alike",
    "fold_rows",
    "read_ahead",
    "replay",
    "trace_output",
]
