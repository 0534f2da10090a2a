"""The cache as a value: immutable pytrees of arrays.

Small integers (`Metadata`) stand apart from the large K/V arrays, so that everything
about blocks can be tested, simulated and jitted without touching storage.
"""

from jkv.state.batch import Batch, Slots
from jkv.state.cache import Cache
from jkv.state.ownership import (
    NO_SEQUENCE,
    Metadata,
    PrefixIndex,
    Ring,
    SlidingWindow,
)

__all__ = [
    "NO_SEQUENCE",
    "Batch",
    "Cache",
    "Metadata",
    "PrefixIndex",
    "Ring",
    "SlidingWindow",
    "Slots",
]
