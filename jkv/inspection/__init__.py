"""Host-side statistics, memory profile, invariant checks and debug mode of a cache.

`invariants.check` compares a cache with its invariants by code of its own, apart from
the verbs; `debugging.debug` watches calls; `statistics` and `memory` count.
"""

from jkv.inspection.debugging import debug
from jkv.inspection.findings import DebugError
from jkv.inspection.invariants import check
from jkv.inspection.memory import MemoryProfile, memory_profile
from jkv.inspection.statistics import GroupStats, Stats, stats
from jkv.inspection.utilisation import Fragmentation, fragmentation, should_compact

__all__ = [
    "DebugError",
    "Fragmentation",
    "GroupStats",
    "MemoryProfile",
    "Stats",
    "check",
    "debug",
    "fragmentation",
    "memory_profile",
    "should_compact",
    "stats",
]
