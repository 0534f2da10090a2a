"""Drafters for published checkpoints, and tools for drafters of your own.

Each is a pytree of weights with functions that compute the drafter's layers, as a
`jkv.Model` computes the target's; `examples/pretrained/drafters` has these functions
for published checkpoints. The keys of `Eagle3`, `MultiToken` and `Block` are in the
target's cache (`jkv.with_drafter`); an `Assistant` has none.
"""

from jkv.decoding.model.drafter import find_previous, own_layers, rejoin
from jkv.drafters.assistant import Assistant, Reader
from jkv.drafters.block import Block, BlockReader
from jkv.drafters.heads import HIDDEN_DIM, Eagle3, Head, MultiToken, hide_first

__all__ = [
    "HIDDEN_DIM",
    "Assistant",
    "Block",
    "BlockReader",
    "Eagle3",
    "Head",
    "MultiToken",
    "Reader",
    "find_previous",
    "hide_first",
    "own_layers",
    "rejoin",
]
