"""Swapped-out sequences in host memory, independent of a cache."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jkv.metadata import requests
from jkv.metadata.part import SwappedContents
from jkv.metadata.requests import Integers
from jkv.operations import gather
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.status import Status, UsageError, raise_for_status


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Swapped:
    """Swapped-out sequences in host memory, with their complete state.

    A `Swapped` is a pytree, can be pickled, and can be swapped in any number of times.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [16])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, 5, capacity=5)
      >>> jkv.swap_out(cache, 0)[1]
      Swapped(1 sequences, 5 tokens, 2 of 4 blocks with contents, 288 bytes)
    """

    seq_ids: np.ndarray  # i32[B], former ids
    context_lengths: np.ndarray  # i32[B], tokens of each sequence
    num_uses: np.ndarray  # u32[B], as in `Sequences`
    committed: np.ndarray | None  # i32[B], as in `PrefixIndex`
    salts: np.ndarray | None  # i32[B], likewise
    groups: tuple[SwappedContents, ...]  # contents in each group
    # Tokens per block, T; static, since no shape has it.
    block_size: int = dataclasses.field(metadata={"static": True})
    num_pending: np.ndarray | None = None  # i32[B], as in `Sequences`
    num_dropped: np.ndarray | None = None  # i32[B], as in `Pruned`
    num_left: np.ndarray | None = None  # i32[B], likewise

    @property
    def num_sequences(self) -> int:
        """Number of sequences, B."""
        return len(self.context_lengths)

    @property
    def num_blocks(self) -> int:
        """Number of the sequences' blocks, summed over groups."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_filled_blocks(self) -> int:
        """Number of these blocks with contents."""
        return sum(group.num_filled_blocks for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in jax.tree.leaves(self.__dict__) if np.ndim(a))

    @property
    def is_pruned(self) -> np.ndarray:
        """True for sequences that were pruned, bool[B]."""
        if self.num_dropped is None or self.num_left is None:
            return np.zeros(self.num_sequences, bool)
        return (self.num_dropped > 0) | (self.num_left > 0)

    def __getstate__(self) -> dict[str, Any]:
        """Convert the pieces to numpy arrays for pickling."""
        return {**self.__dict__, "groups": jax.tree.map(np.asarray, self.groups)}

    def __repr__(self) -> str:
        blocks = " and ".join(
            f"{group.num_filled_blocks} of {group.num_blocks}"
            for group in self.groups
            if group.num_blocks
        )
        return (
            f"Swapped({self.num_sequences} sequences, "
            f"{int(self.context_lengths.sum(dtype=np.int64))} tokens, "
            f"{blocks or '0 of 0'} blocks with contents, {self.nbytes:,} bytes)"
        )


def copy_out(cache: Cache, seq_ids: Integers) -> Swapped:
    """Return sequences as a host value; the cache is unchanged.

    The cache is on a device, or consists of numpy arrays read from a file. Padding is
    omitted. Raises InvalidSequence for an id that is not open or is repeated.
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    found = jax.device_get(_look_up(cache.metadata, seq_ids))
    raise_for_status(found.pop("status"), cache)
    named = np.asarray(seq_ids) != NO_SEQUENCE
    found = jax.tree.map(lambda array: array[named], found)
    groups: dict[int, SwappedContents] = {}
    for part, left in zip(cache.metadata.parts, found.pop("of_parts"), strict=True):
        groups |= part.fetch(cache, found["seq_ids"], found["context_lengths"], left)
    in_order = tuple(groups[number] for number in sorted(groups))
    return Swapped(**found, groups=in_order, block_size=cache.block_size)


@jax.jit
def _look_up(metadata: Metadata, seq_ids: jax.Array) -> dict[str, Any]:
    """Return the sequences' metadata: fields of `Swapped`, and the parts' results."""
    closable = requests.is_live_once(metadata, seq_ids)
    padding = requests.is_padding(seq_ids)
    sequences = metadata.sequences
    committed, salts = metadata.index.leave(seq_ids) or (None, None)
    num_dropped, num_left = sequences.pruned.leave(seq_ids) or (None, None)
    return dict(
        status=requests.find_status(padding, [(Status.INVALID_SEQUENCE, ~closable)]),
        of_parts=tuple(part.leave(metadata, seq_ids) for part in metadata.parts),
        seq_ids=seq_ids,
        context_lengths=gather(sequences.context_lengths, seq_ids),
        num_uses=gather(sequences.num_uses, seq_ids),
        committed=committed,
        salts=salts,
        num_pending=sequences.pending_of(seq_ids) if metadata.has_states else None,
        num_dropped=num_dropped,
        num_left=num_left,
    )


def match_groups(cache: Cache, swapped: Swapped) -> tuple[SwappedContents, ...]:
    """Return the contents for each group of the cache; raise if the groups differ."""
    if np.any(swapped.is_pruned) and not cache.metadata.sequences.pruned.is_there:
        raise UsageError(
            "cache must have pruning=True for pruned sequences, whose positions differ "
            "from their slots; create it with CacheConfig(pruning=True)"
        )
    there, here = (_list_kinds(groups) for groups in (swapped.groups, cache.storage))
    if there != here:
        raise UsageError(
            f"cache must have {there}, like the cache of the sequences, got {here}; "
            f"create it with the same configuration"
        )
    kinds: dict[str, tuple[Any, Any]] = {
        "block_size": (swapped.block_size, cache.block_size)
    }
    for number, own in enumerate(swapped.groups):
        compared = own.compare(cache, number, swapped.context_lengths)
        within = f"group {number}: " if len(cache.storage) > 1 else ""
        kinds |= {within + name: both for name, both in compared.items()}
    different = [
        f"{name} is {there}, in this cache {here}"
        for name, (there, here) in kinds.items()
        if there != here
    ]
    if different:
        raise ValueError(
            f"cache must have the layers, heads, sizes and dtype of the swapped "
            f"sequences: {'; '.join(different)}"
        )
    return swapped.groups


def _list_kinds(groups: Sequence[Any]) -> str:
    """Return a description of consecutive groups by kind."""
    runs = [
        (kind, len([*run])) for kind, run in itertools.groupby(g.kind for g in groups)
    ]
    return ", then ".join(
        f"{'one group' if count == 1 else f'{count} groups'} of layers with {kind}"
        for kind, count in runs
    )
