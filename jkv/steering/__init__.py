"""Steering: which tokens a text may have next, decided inside the jit.

`Steering` is the protocol; the others are small things that follow it. `chain` joins
them, and `renumber` gives their variants other numbers.
"""

from jkv.steering.allowances import AllowedTokens
from jkv.steering.bans import BannedTexts
from jkv.steering.biases import TokenBias
from jkv.steering.chains import chain, renumber
from jkv.steering.lengths import MinimumLength
from jkv.steering.ngrams import NoRepeatedNgrams
from jkv.steering.protocol import Steering
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
