"""States folded over packed rows; plain arrays in, plain arrays out."""

from jkv.recurrence.folding import fold_rows
from jkv.recurrence.rules import Arrays, ChunkRule, Rule, trace_output
from jkv.recurrence.tokens import fold_tokens, replay

__all__ = [
    "Arrays",
    "ChunkRule",
    "Rule",
    "fold_rows",
    "fold_tokens",
    "replay",
    "trace_output",
]
