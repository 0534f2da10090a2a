"""Logits processors: masks and biases on logits, applied inside jit.

`LogitsProcessor` is the protocol, and the other classes implement it. `chain` composes
them, and `renumber` maps variant numbers.
"""

from jkv.logits_processors.chains import chain, renumber
from jkv.logits_processors.protocol import LogitsProcessor
from jkv.logits_processors.rules import (
    AllowedTokens,
    BannedSequences,
    MinimumLength,
    NoRepeatedNgrams,
    TokenBias,
)
from jkv.logits_processors.thinking import ThinkingBudget

__all__ = [
    "AllowedTokens",
    "BannedSequences",
    "MinimumLength",
    "NoRepeatedNgrams",
    "LogitsProcessor",
    "ThinkingBudget",
    "TokenBias",
    "chain",
    "renumber",
]
