"""The cache as a value: immutable pytrees of arrays.

Small integers (`Metadata`) stand apart from the large K/V arrays, so that everything
about blocks can be tested, simulated and jitted without touching storage.
"""

from jkv.state.batch import Batch, Slots
from jkv.state.cache import Cache, GroupLayer, LayerPlaces, StateLayer
from jkv.state.metadata import (
    NO_SEQUENCE,
    Beside,
    BlockGroup,
    Metadata,
    PrefixIndex,
    Sequences,
)
from jkv.state.rings import Ring
from jkv.state.states import Snapshots, States, StateStorage
from jkv.state.storage import BlockStorage
from jkv.state.windows import Everything, SlidingWindow

__all__ = [
    "NO_SEQUENCE",
    "Batch",
    "Beside",
    "BlockGroup",
    "BlockStorage",
    "Cache",
    "Everything",
    "GroupLayer",
    "LayerPlaces",
    "Metadata",
    "PrefixIndex",
    "Ring",
    "Sequences",
    "SlidingWindow",
    "Slots",
    "Snapshots",
    "StateLayer",
    "StateStorage",
    "States",
]
