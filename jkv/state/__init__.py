"""The cache as a value: immutable pytrees of arrays.

Small integers (`Metadata`) are separate from the large K/V arrays, so that block
management can be tested, simulated and jitted without storage.
"""

from jkv.state.batch import Batch, Slots
from jkv.state.cache import BlockStorage, Cache, GroupLayer
from jkv.state.index import NoIndex
from jkv.state.metadata import (
    NO_SEQUENCE,
    BlockGroup,
    Kept,
    Metadata,
    Pruned,
    Ring,
    SequenceRow,
    Sequences,
    Unpruned,
)
from jkv.state.observed import ObservedQueries, Unobserved
from jkv.state.states import States, StateStorage
from jkv.state.windows import FullAttention, SlidingWindow

__all__ = [
    "NO_SEQUENCE",
    "Batch",
    "BlockGroup",
    "BlockStorage",
    "Cache",
    "FullAttention",
    "GroupLayer",
    "Kept",
    "Metadata",
    "NoIndex",
    "ObservedQueries",
    "Pruned",
    "Ring",
    "SequenceRow",
    "Sequences",
    "SlidingWindow",
    "Slots",
    "StateStorage",
    "States",
    "Unobserved",
    "Unpruned",
]
