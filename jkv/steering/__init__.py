"""Steering: which tokens a text may have next, decided inside the jit.

`Steering` is the protocol; the others are small things that follow it. `chain` joins
them, and `renumber` gives their variants other numbers.
"""

from jkv.steering.chains import chain, renumber
from jkv.steering.protocol import Steering
from jkv.steering.rules import (
    AllowedTokens,
    BannedTexts,
    MinimumLength,
    NoRepeatedNgrams,
    TokenBias,
)
from jkv.steering.thinking import ThinkingBudget

__all__ = [
    "AllowedTokens",
    "BannedTexts",
    "MinimumLength",
    "NoRepeatedNgrams",
    "Steering",
    "ThinkingBudget",
    "TokenBias",
    "chain",
    "renumber",
]
