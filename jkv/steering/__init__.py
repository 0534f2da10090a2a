"""Steering: which tokens a text may have next, decided inside the jit.

`Steering` is the protocol; the others are small things that follow it, and `chain`
joins them.
"""

from jkv.steering.bans import BannedTexts
from jkv.steering.biases import TokenBias
from jkv.steering.chains import chain
from jkv.steering.lengths import MinimumLength
from jkv.steering.ngrams import NoRepeatedNgrams
from jkv.steering.protocol import Steering
from jkv.steering.thinking import ThinkingBudget

__all__ = [
    "BannedTexts",
    "MinimumLength",
    "NoRepeatedNgrams",
    "Steering",
    "ThinkingBudget",
    "TokenBias",
    "chain",
]
