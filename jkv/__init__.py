"""jkv: a paged key/value cache for JAX that is a value, not a service.

A cache is an immutable pytree; every verb is a pure function that returns a new one and
can be jitted, scanned and donated. In the order of a sequence's life:

    init -> allocate -> (append -> write, attend per layer -> commit)* -> free

with fork, truncate and reorder for sequences that branch and roll back, match for
prompts that begin alike, and evict for the day the pool is full.
"""

from jkv.allocation import Allocation, allocate, can_allocate, free
from jkv.appending import Batch, append, write
from jkv.attention import paged_attention
from jkv.compaction import Fragmentation, compact, fragmentation, should_compact
from jkv.config import CacheConfig
from jkv.decoding import FinishReason, Generation, Model, Sampling, generate
from jkv.files import FileError
from jkv.invariants import check
from jkv.lifetime import (
    clock,
    evict,
    evict_older_than,
    least_recently_used,
    touch,
)
from jkv.prefix import clear_prefixes, commit, evict_cached, invalidate, match
from jkv.reading import (
    BlockInfo,
    Slots,
    attend,
    block_ids,
    block_info,
    read,
    read_slot,
    slots,
    tokens,
)
from jkv.resizing import resize
from jkv.saving import load, save
from jkv.sharing import Fork, fork, reorder, truncate
from jkv.state import (
    NO_SEQUENCE,
    Cache,
    Metadata,
    PrefixIndex,
    Ring,
    init,
    num_free_blocks,
)
from jkv.statistics import MemoryProfile, Stats, memory_profile, stats
from jkv.status import (
    BatchFull,
    CacheError,
    ContextFull,
    InvalidArgument,
    InvalidSequence,
    InvariantError,
    OutOfBlocks,
    OutOfSequences,
    Status,
    raise_for_status,
)
from jkv.transfer import SwapIn, Swapped, swap_in, swap_out

__version__ = "0.1.0"

__all__ = [
    "NO_SEQUENCE",
    "Allocation",
    "Batch",
    "BatchFull",
    "BlockInfo",
    "Cache",
    "CacheConfig",
    "CacheError",
    "ContextFull",
    "FileError",
    "FinishReason",
    "Fork",
    "Fragmentation",
    "Generation",
    "InvalidArgument",
    "InvalidSequence",
    "InvariantError",
    "MemoryProfile",
    "Metadata",
    "Model",
    "OutOfBlocks",
    "OutOfSequences",
    "PrefixIndex",
    "Ring",
    "Sampling",
    "Slots",
    "Stats",
    "Status",
    "SwapIn",
    "Swapped",
    "allocate",
    "append",
    "attend",
    "block_ids",
    "block_info",
    "can_allocate",
    "check",
    "clear_prefixes",
    "clock",
    "commit",
    "compact",
    "evict",
    "evict_cached",
    "evict_older_than",
    "fork",
    "fragmentation",
    "free",
    "generate",
    "init",
    "memory_profile",
    "invalidate",
    "least_recently_used",
    "load",
    "match",
    "num_free_blocks",
    "paged_attention",
    "raise_for_status",
    "read",
    "read_slot",
    "reorder",
    "resize",
    "save",
    "should_compact",
    "slots",
    "stats",
    "swap_in",
    "swap_out",
    "tokens",
    "touch",
    "truncate",
    "write",
]
