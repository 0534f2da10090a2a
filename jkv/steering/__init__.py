"""Logits processors (`Steering`): masks and biases on logits, applied inside the jit.

`Steering` is the protocol, and the other classes implement it. `chain` composes them,
and `renumber` maps variant numbers.
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
