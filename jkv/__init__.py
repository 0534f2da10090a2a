"""jkv: a functional paged key/value cache for JAX.

A cache is an immutable pytree; every verb is a pure function that returns a new cache,
and can be jitted, scanned and donated. In the order of a sequence's life:

    init -> allocate -> (append -> write, attend per layer -> commit)* -> free

Further verbs fork, truncate and reorder sequences, match cached prefixes, and evict
sequences when the pool is full. `decoding` runs a model over a cache inside one jit,
`serving` serves requests, and `grammar` constrains their output. Start with the sizes
(`config.cache_config`) and the state (`state`), then with the verbs
(`verbs.allocation`); docs/design/core.md names the files in reading order.
"""

from typing import TYPE_CHECKING

from jkv import serialization
from jkv.attention import paged_attention
from jkv.config.cache_config import CacheConfig
from jkv.lazy import imports_later
from jkv.masks import CausalMask, MixedMask, SpanMask, TreeMask
from jkv.prefixes.index import PrefixIndex
from jkv.state import (
    NO_SEQUENCE,
    Batch,
    BlockGroup,
    BlockStorage,
    Cache,
    GroupLayer,
    Metadata,
    Ring,
    Sequences,
    Slots,
    States,
    StateStorage,
)
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
    UsageError,
    raise_for_status,
)
from jkv.verbs.allocation import Allocation, allocate, can_allocate, free
from jkv.verbs.appending import append
from jkv.verbs.attending import attend
from jkv.verbs.branching import Fork, fork, reorder, truncate
from jkv.verbs.lookups import (
    BlockInfo,
    block_ids,
    block_info,
    context_lengths,
    kept_from,
    next_positions,
    num_free_blocks,
    slots,
    tokens,
)
from jkv.verbs.masking import peek, with_mask
from jkv.verbs.reading import read, read_slot
from jkv.verbs.writing import commit, write

if TYPE_CHECKING:  # imported on first access
    from jkv import jitted, press
    from jkv.adapters import Step, model_of
    from jkv.commands.compiled_programs import keep_compiled_programs
    from jkv.config.grouped_config import GroupedConfig
    from jkv.config.state_config import StateConfig
    from jkv.decoding import (
        BeamSearch,
        DraftModel,
        ExactDifference,
        ExactReport,
        FinishReason,
        FormatAccuracy,
        Generation,
        Model,
        PromptLookup,
        Roll,
        Sampling,
        beam_search,
        check_exact,
        extend,
        generate,
        measure_formats,
        score,
    )
    from jkv.decoding.model.drafter import Drafter, with_drafter
    from jkv.inspection.debugging import debug
    from jkv.inspection.findings import DebugError
    from jkv.inspection.invariants import check
    from jkv.inspection.memory import MemoryProfile, memory_profile
    from jkv.inspection.statistics import GroupStats, Stats, stats
    from jkv.inspection.utilisation import Fragmentation, fragmentation, should_compact
    from jkv.logits_processors import LogitsProcessor
    from jkv.making.initialization import init, partition_specs
    from jkv.making.saving import load, save
    from jkv.prefixes.verbs import (
        clear_prefixes,
        demote,
        evict_cached,
        invalidate,
        match,
        snapshots,
    )
    from jkv.press import top_tokens
    from jkv.states.folding import fold_state
    from jkv.states.verbs import read_pending, read_state, write_state
    from jkv.storage.files import FileError
    from jkv.storage.swapped import Swapped
    from jkv.tiers.restoring import restore
    from jkv.tiers.spilled import Spilled
    from jkv.tiers.spilling import spill
    from jkv.tiers.store import BlockStore
    from jkv.trees import TrajectoryTree
    from jkv.verbs.compaction import compact
    from jkv.verbs.eviction import (
        clock,
        evict,
        evict_older_than,
        least_recently_used,
        touch,
    )
    from jkv.verbs.observing import observe, read_queries
    from jkv.verbs.overwriting import overwrite, scrub
    from jkv.verbs.page_tables import PageTable, page_table
    from jkv.verbs.pooling import over_pools, split_pools
    from jkv.verbs.pruning import prune
    from jkv.verbs.recording import record
    from jkv.verbs.resizing import resize
    from jkv.verbs.row_selection import keep_rows
    from jkv.verbs.swapping import SwapIn, swap_in, swap_out

__version__ = "0.3.0"
__getattr__ = imports_later(
    __name__,
    {
        "jkv.adapters": "Step model_of",
        "jkv.commands.compiled_programs": "keep_compiled_programs",
        "jkv.config.grouped_config": "GroupedConfig",
        "jkv.config.state_config": "StateConfig",
        "jkv.decoding.model.drafter": "Drafter with_drafter",
        "jkv.decoding": (
            "BeamSearch DraftModel ExactDifference ExactReport FinishReason "
            "FormatAccuracy Generation Model PromptLookup Roll Sampling beam_search "
            "check_exact extend generate measure_formats score"
        ),
        "jkv.inspection.debugging": "debug",
        "jkv.inspection.findings": "DebugError",
        "jkv.inspection.invariants": "check",
        "jkv.inspection.memory": "MemoryProfile memory_profile",
        "jkv.inspection.statistics": "GroupStats Stats stats",
        "jkv.inspection.utilisation": "Fragmentation fragmentation should_compact",
        "jkv.making.initialization": "init partition_specs",
        "jkv.making.saving": "load save",
        "jkv.press": "top_tokens",
        "jkv.prefixes.verbs": (
            "clear_prefixes demote evict_cached invalidate match snapshots"
        ),
        "jkv.states.folding": "fold_state",
        "jkv.states.verbs": "read_pending read_state write_state",
        "jkv.logits_processors": "LogitsProcessor",
        "jkv.storage.files": "FileError",
        "jkv.storage.swapped": "Swapped",
        "jkv.tiers.restoring": "restore",
        "jkv.tiers.spilled": "Spilled",
        "jkv.tiers.spilling": "spill",
        "jkv.tiers.store": "BlockStore",
        "jkv.trees": "TrajectoryTree",
        "jkv.verbs.compaction": "compact",
        "jkv.verbs.eviction": "clock evict evict_older_than least_recently_used touch",
        "jkv.verbs.observing": "observe read_queries",
        "jkv.verbs.page_tables": "PageTable page_table",
        "jkv.verbs.pooling": "over_pools split_pools",
        "jkv.verbs.overwriting": "overwrite scrub",
        "jkv.verbs.pruning": "prune",
        "jkv.verbs.recording": "record",
        "jkv.verbs.resizing": "resize",
        "jkv.verbs.row_selection": "keep_rows",
        "jkv.verbs.swapping": "SwapIn swap_in swap_out",
    },
    (
        "adapters",
        "decoding",
        "drafters",
        "grammar",
        "inspection",
        "jitted",
        "making",
        "press",
        "recurrence",
        "serving",
        "logits_processors",
        "trees",
    ),
)

serialization.register()


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])


__all__ = [
    "NO_SEQUENCE",
    "Allocation",
    "Batch",
    "BatchFull",
    "BeamSearch",
    "BlockGroup",
    "BlockInfo",
    "BlockStorage",
    "BlockStore",
    "Cache",
    "CacheConfig",
    "CacheError",
    "CausalMask",
    "ContextFull",
    "DebugError",
    "DraftModel",
    "Drafter",
    "FileError",
    "ExactDifference",
    "ExactReport",
    "FinishReason",
    "Fork",
    "FormatAccuracy",
    "Fragmentation",
    "Generation",
    "GroupLayer",
    "GroupStats",
    "GroupedConfig",
    "InvalidArgument",
    "InvalidSequence",
    "InvariantError",
    "MemoryProfile",
    "Metadata",
    "MixedMask",
    "Model",
    "OutOfBlocks",
    "OutOfSequences",
    "PageTable",
    "PrefixIndex",
    "PromptLookup",
    "Ring",
    "Roll",
    "Sampling",
    "Sequences",
    "Slots",
    "SpanMask",
    "Spilled",
    "StateConfig",
    "StateStorage",
    "States",
    "Stats",
    "Status",
    "Step",
    "LogitsProcessor",
    "SwapIn",
    "Swapped",
    "TrajectoryTree",
    "TreeMask",
    "UsageError",
    "allocate",
    "append",
    "attend",
    "beam_search",
    "block_ids",
    "block_info",
    "can_allocate",
    "check",
    "check_exact",
    "clear_prefixes",
    "clock",
    "commit",
    "compact",
    "context_lengths",
    "debug",
    "evict",
    "demote",
    "evict_cached",
    "evict_older_than",
    "extend",
    "fold_state",
    "fork",
    "fragmentation",
    "free",
    "generate",
    "init",
    "memory_profile",
    "invalidate",
    "jitted",
    "keep_compiled_programs",
    "keep_rows",
    "kept_from",
    "least_recently_used",
    "load",
    "match",
    "measure_formats",
    "model_of",
    "next_positions",
    "num_free_blocks",
    "observe",
    "over_pools",
    "overwrite",
    "page_table",
    "paged_attention",
    "partition_specs",
    "peek",
    "press",
    "prune",
    "raise_for_status",
    "read",
    "read_pending",
    "read_queries",
    "read_slot",
    "read_state",
    "record",
    "reorder",
    "resize",
    "restore",
    "save",
    "score",
    "scrub",
    "should_compact",
    "slots",
    "snapshots",
    "spill",
    "split_pools",
    "stats",
    "swap_in",
    "swap_out",
    "tokens",
    "touch",
    "top_tokens",
    "truncate",
    "with_drafter",
    "with_mask",
    "write",
    "write_state",
]
