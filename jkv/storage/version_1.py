"""What version 0.1 wrote, files and pickled sequences, under the names of today.

Its caches had one group of layers, whose arrays stood beside those of the sequences,
and its counters counted the blocks taken and evicted, as the ring of blocks does now.
This file and its three mentions can go when such files are no longer in use.
"""

from typing import Any

import numpy as np

Leaves = dict[str, Any]

# What a cache's metadata said of its sequences.
_OF_SEQUENCES = (
    "context_lengths",
    "counters",
    "created",
    "is_open",
    "last_used",
    "max_context_length",
    "num_uses",
)

# What swapped sequences had that each group has now.
_OF_GROUP = ("block_tables", "num_blocks", "num_given_back", "contents", "dtype")

_POOLS = {"keys": "key_pool", "values": "value_pool"}

# Rows of the counters then that are not among them now.
_BLOCKS_TAKEN, _BLOCKS_EVICTED = 8, 10


def rename(holds: str, leaves: Leaves) -> Leaves:
    """Return the leaves of a file under the names of today.

    Args:
      holds: what the file holds, as its header says.
      leaves: its arrays and constants by name.

    Raises:
      LookupError: if one is missing.
    """
    return rename_sequences(leaves) if holds == "sequences" else _rename_cache(leaves)


def rename_sequences(leaves: Leaves) -> Leaves:
    """Return the leaves of swapped sequences under the names of today."""
    renamed = {_rename_of_sequences(name): leaf for name, leaf in leaves.items()}
    if "num_given_back" not in leaves:  # there was no sliding window
        none = np.zeros_like(leaves["context_lengths"])
        renamed["groups.0.num_given_back"] = none
    return renamed


def _rename_of_sequences(name: str) -> str:
    if name.partition(".")[0] not in _OF_GROUP:
        return name
    before, dot, last = name.rpartition(".")
    return f"groups.0.{before}{dot}{_POOLS.get(last, last)}"


def _rename_cache(leaves: Leaves) -> Leaves:
    """Return the leaves of a cache; of pools, with an axis of ranks in each array."""
    renamed = {_rename_of_cache(name): leaf for name, leaf in leaves.items()}
    counters = leaves["metadata.counters"]
    counts = counters[..., [_BLOCKS_TAKEN, _BLOCKS_EVICTED], :].view(np.int32)
    counts = counts.reshape(*counts.shape[:-2], -1)
    rows, blocks = (
        leaves[f"metadata.{ring}.bounds"] for ring in ("free_sequences", "free_blocks")
    )
    return renamed | {
        "metadata.sequences.counters": np.delete(
            counters, [_BLOCKS_TAKEN, _BLOCKS_EVICTED], axis=-2
        ),
        # Version 0.1 did not count the rows that were taken.
        "metadata.sequences.free_rows.bounds": _extend(rows, np.zeros_like(counts)),
        "metadata.groups.0.free_blocks.bounds": _extend(blocks, counts),
        "layer_groups": [[0]] * leaves["keys"].shape[-5],
    }


def _extend(bounds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Add counts, i32[..., 4], to the numbers of a ring, i32[..., 4]."""
    return np.concatenate([bounds, counts], axis=-1)


def _rename_of_cache(name: str) -> str:
    if not name.startswith("metadata."):
        return f"storage.0.{_POOLS.get(name, name)}"
    name = name.removeprefix("metadata.")
    first, _, rest = name.partition(".")
    if name == "prefix.positions":
        return "metadata.groups.0.free_blocks.indices"
    if first == "prefix":
        return f"metadata.index.{rest}"
    if first == "free_sequences":
        return f"metadata.sequences.free_rows.{rest}"
    where = "sequences" if first in _OF_SEQUENCES else "groups.0"
    return f"metadata.{where}.{name}"
