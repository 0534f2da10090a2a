"""Sequences on the host, apart from any cache."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks import contents
from jkv.blocks.contents import Contents
from jkv.blocks.plans import Brought
from jkv.formats.format import Formats
from jkv.formats.table import formats_of
from jkv.metadata import requests
from jkv.metadata.requests import Integers
from jkv.state import NO_SEQUENCE, BlockStorage, Cache, Metadata
from jkv.states.swapped import (
    SwappedStates,
    compare_states,
    fetch_states,
    put_states,
)
from jkv.status import Status, UsageError, raise_for_status


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwappedGroup:
    """What B sequences have in one group of layers: a small pool of their own.

    They share its blocks, which are numbered from 0. The first P blocks hold tokens,
    and their contents are here. The others are reserved: the sequences may still fill
    them.
    """

    block_tables: np.ndarray  # i32[B, M], numbers of blocks, `num_blocks`: not mapped
    num_given_back: np.ndarray  # i32[B], columns that a sliding window gave back
    contents: Contents  # of the P blocks with tokens
    # P and the reserved ones; static, as no shape tells it.
    num_blocks: int = dataclasses.field(metadata={"static": True})
    # That the stored bits mean; static, as in `BlockStorage`.
    dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    value_dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})

    @property
    def formats(self) -> Formats:
        """How rows of keys and of values are stored."""
        return formats_of(self.dtype, self.value_dtype)

    @property
    def num_filled_blocks(self) -> int:
        """Blocks whose contents are held, P."""
        return sum(a.shape[1] for a in next(iter(self.contents.storage.values())))

    def brought(self, columns: int) -> Brought:
        """Fit the tables to those of a cache with so many columns."""
        tables = self.block_tables[:, :columns]
        padding = ((0, 0), (0, columns - tables.shape[1]))
        tables = np.pad(tables, padding, constant_values=self.num_blocks)
        is_first = np.zeros(tables.size, bool)
        is_first[np.unique(tables, return_index=True)[1]] = True
        return Brought(
            block_tables=tables,
            is_first=is_first.reshape(tables.shape),
            num_given_back=self.num_given_back,
            num_blocks=np.int32(self.num_blocks),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Swapped:
    """Sequences on the host, apart from any cache, with all that they have.

    A `Swapped` can be pickled, and swapped in as often as you like.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [16])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, 5, capacity=5)
      >>> jkv.swap_out(cache, 0)[1]
      Swapped(1 sequences, 5 tokens, 2 of 4 blocks with contents, 288 bytes)
    """

    seq_ids: np.ndarray  # i32[B], the ids that the sequences had
    context_lengths: np.ndarray  # i32[B], tokens of each sequence
    num_uses: np.ndarray  # u32[B], as in `Sequences`
    committed: np.ndarray | None  # i32[B], as in `PrefixIndex`
    salts: np.ndarray | None  # i32[B], likewise
    groups: tuple[SwappedGroup, ...]  # what they have in each group with blocks
    block_size: int  # tokens per block, T
    states: tuple[SwappedStates, ...] = ()  # and in each group with a state
    num_pending: np.ndarray | None = None  # i32[B], as in `Sequences`

    @property
    def num_sequences(self) -> int:
        """Sequences held, B."""
        return len(self.context_lengths)

    @property
    def num_blocks(self) -> int:
        """Blocks that the sequences have, in all groups together."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_filled_blocks(self) -> int:
        """Those of them whose contents are held."""
        return sum(group.num_filled_blocks for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in jax.tree.leaves(self.__dict__) if np.ndim(a))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle plain numpy arrays, wherever the pieces are."""
        arrays = jax.tree.map(np.asarray, (self.groups, self.states))
        return {**self.__dict__, "groups": arrays[0], "states": arrays[1]}

    def __repr__(self) -> str:
        """Fit one line."""
        blocks = " and ".join(
            f"{group.num_filled_blocks} of {group.num_blocks}" for group in self.groups
        )
        return (
            f"Swapped({self.num_sequences} sequences, "
            f"{int(self.context_lengths.sum(dtype=np.int64))} tokens, "
            f"{blocks} blocks with contents, {self.nbytes:,} bytes)"
        )


def copy_out(cache: Cache, seq_ids: Integers) -> Swapped:
    """Return sequences as a host value; the cache stays as it is.

    Args:
      cache: on a device, or of numpy arrays, as a file gives it.
      seq_ids: i32[B] or int, the sequences; -1 is padding.

    Raises:
      InvalidSequence: for an id that is not open or is named twice.
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    rows = jax.device_get(_look_up(cache.metadata, seq_ids))
    raise_for_status(rows.status, cache)
    named = np.asarray(seq_ids) != NO_SEQUENCE
    rows = jax.tree.map(lambda array: array[named], rows)
    return Swapped(
        seq_ids=np.asarray(seq_ids)[named],
        context_lengths=rows.context_lengths,
        num_uses=rows.num_uses,
        committed=rows.committed,
        salts=rows.salts,
        groups=tuple(
            _copy_group(cache, number, rows) for number in cache.metadata.block_numbers
        ),
        block_size=cache.block_size,
        states=tuple(
            fetch_states(each, rows.seq_ids)
            for each in cache.storage
            if not each.has_blocks
        ),
        num_pending=rows.num_pending,
    )


def _copy_group(cache: Cache, number: int, rows: "_Found") -> SwappedGroup:
    """Return what sequences have in one group."""
    tables, num_given_back = rows.of_groups[number]
    mapped = tables < cache.metadata.groups[number].num_blocks
    num_filled = -(-rows.context_lengths[:, None] // cache.block_size)
    filled = mapped & (np.arange(mapped.shape[1]) < num_filled)
    blocks, num_blocks, renumbered = _renumbered(tables, filled, mapped)
    return SwappedGroup(
        block_tables=renumbered,
        num_given_back=num_given_back,
        contents=contents.fetch(cache, number, blocks),
        num_blocks=num_blocks,
        dtype=cache.storage[number].dtype,
        value_dtype=cache.storage[number].value_dtype,
    )


def copy_in(
    cache: Cache,
    swapped: Swapped,
    seq_ids: np.ndarray,
    tables: tuple[np.ndarray, ...],
    *,
    donate: bool,
) -> Cache:
    """Return the cache with what sequences hold, now that they have a place in it.

    Args:
      cache: that the sequences have entered.
      swapped: the sequences.
      seq_ids: i32[B], their ids in the cache.
      tables: of each group with blocks i32[B, M], their block tables there.
      donate: write in place of the old arrays, which are then gone, not in copies.
    """
    if cache.num_layers:
        cache = put_states(cache, swapped.states, seq_ids, donate=donate)
    numbers = cache.metadata.block_numbers
    for number, group, rows in zip(numbers, swapped.groups, tables, strict=True):
        blocks = _find_blocks(cache, number, group, rows)
        cache = contents.put(cache, number, blocks, group.contents, donate=donate)
    return cache


def _find_blocks(
    cache: Cache, number: int, group: SwappedGroup, tables: np.ndarray
) -> np.ndarray:
    """Return where the P blocks with tokens are now, i32[P].

    Args:
      cache: that the sequences have entered.
      number: of the group.
      group: what they brought.
      tables: i32[B, M], their new block tables.
    """
    nothing = cache.metadata.groups[number].num_blocks
    blocks = np.full(group.num_blocks + 1, nothing, np.int32)
    columns = min(group.block_tables.shape[1], tables.shape[1])
    blocks[group.block_tables[:, :columns]] = tables[:, :columns]
    return blocks[: group.num_filled_blocks]


class _Found(NamedTuple):
    """What the metadata says of the sequences asked for, one row each."""

    status: Any  # i32[B]
    context_lengths: Any  # i32[B]
    num_uses: Any  # u32[B]
    committed: Any  # i32[B] or None
    salts: Any  # i32[B] or None
    # By group i32[B, M] of the tables, and i32[B] columns given back.
    of_groups: dict[int, tuple[Any, Any]]
    seq_ids: Any  # i32[B]
    num_pending: Any  # i32[B] or None


@jax.jit
def _look_up(metadata: Metadata, seq_ids: jax.Array) -> _Found:
    closable = requests.is_live_once(metadata, seq_ids)
    padding = requests.is_padding(seq_ids)
    sequences = metadata.sequences
    committed, salts = metadata.index.leave(seq_ids) or (None, None)

    def rows(array: jax.Array) -> jax.Array:
        return array.at[seq_ids].get(mode="clip")

    def gaps(gap: jax.Array | int) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(gap, jnp.int32), seq_ids.shape)

    return _Found(
        requests.find_status(padding, [(Status.INVALID_SEQUENCE, ~closable)]),
        rows(sequences.context_lengths),
        rows(sequences.num_uses),
        committed,
        salts,
        {
            number: (rows(group.block_tables), gaps(group.window.gaps_of(seq_ids)))
            for number, group in enumerate(metadata.groups)
            if group.has_blocks
        },
        seq_ids,
        sequences.pending_of(seq_ids) if metadata.has_states else None,
    )


def _renumbered(
    tables: np.ndarray, filled: np.ndarray, mapped: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray]:
    """Number the blocks of some sequences anew, in order of their first mention.

    Args:
      tables: i32[B, M], block ids.
      filled: bool[B, M], entries whose block holds tokens.
      mapped: bool[B, M], these and the reserved ones, which are numbered last.

    Returns:
      i32[P], the old ids of the blocks with tokens; the number of all blocks; and
      i32[B, M], the tables in new numbers, that number where nothing is mapped.
    """
    reserved = mapped & ~filled
    named = np.concatenate([tables[filled], tables[reserved]])
    ids, first, which = np.unique(named, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(ids), np.int32)
    number[order] = np.arange(len(ids), dtype=np.int32)
    renumbered = np.full(tables.shape, len(ids), np.int32)
    num_filled = int(filled.sum())
    renumbered[filled] = number[which[:num_filled]]
    renumbered[reserved] = number[which[num_filled:]]
    return ids[order][: len(ids) - int(reserved.sum())], len(ids), renumbered


def check_same_kind(cache: Cache, swapped: Swapped) -> None:
    """Reject sequences from a cache of other groups, or another shape or dtype.

    And those that have given back what this cache's layers see.
    """
    numbers = cache.metadata.block_numbers
    there, here = len(swapped.groups), len(numbers)
    if there != here:
        raise UsageError(
            f"these sequences left a cache of {_count_groups(there)}, and this cache "
            f"has {_count_groups(here)}: make it with the configuration of that cache"
        )
    kinds = {"block_size": (swapped.block_size, cache.block_size)}
    kinds |= compare_states(swapped.states, cache)
    for number, group in zip(numbers, swapped.groups, strict=True):
        _check_given_back(cache, number, group, swapped)
        within = f"group {number}: " if here > 1 else ""
        found = _compare_storage(cache.storage[number], group)
        kinds |= {within + name: both for name, both in found.items()}
    different = [
        f"{name} is {there}, in this cache {here}"
        for name, (there, here) in kinds.items()
        if there != here
    ]
    if different:
        raise ValueError(
            f"sequences can be swapped into a cache of the same layers, heads, sizes "
            f"and dtype only: {'; '.join(different)}"
        )


def _count_groups(number: int) -> str:
    return "one group of layers" if number == 1 else f"{number} groups of layers"


def _compare_storage(
    storage: BlockStorage, group: SwappedGroup
) -> dict[str, tuple[Any, Any]]:
    """Return what the storage of a group is, of the sequences and of the cache."""
    pieces_of, arrays = group.contents.storage, storage.arrays
    kinds: dict[str, tuple[Any, Any]] = {
        "dtype": (str(group.formats), str(storage.formats)),
        "arrays": (sorted(pieces_of), sorted(arrays)),
    }
    for name in sorted(pieces_of.keys() & arrays.keys()):
        pool = arrays[name]
        of_block = storage.num_kv_heads, *pool.shape[3:]
        kind = f"{pool.dtype}[{pool.shape[0]}, blocks, {str(of_block)[1:-1]}]"
        for piece in pieces_of[name]:
            same = piece.shape[:1] + piece.shape[2:] == pool.shape[:1] + of_block
            if not same or piece.dtype != pool.dtype:
                found = f"{piece.dtype}{list(piece.shape)}"
                kinds[name] = (found, kind)
    return kinds


def _check_given_back(
    cache: Cache, number: int, group: SwappedGroup, swapped: Swapped
) -> None:
    """Reject sequences that have given back what this cache's layers would see."""
    window = cache.metadata.groups[number].window
    gone = np.flatnonzero(group.num_given_back)
    if len(gone) == 0:
        return
    size = swapped.block_size
    # The gap begins behind the sinks' blocks: the first column that maps nothing.
    first = np.argmax(group.block_tables[gone] >= group.num_blocks, axis=1)
    lengths = jnp.asarray(swapped.context_lengths[gone])
    unseen = np.asarray(window.unseen_from(lengths, size))
    is_seen = np.any(group.num_given_back[gone] > unseen)
    if is_seen or np.any(first != window.sink_columns(size)):
        raise ValueError(
            "these sequences have given back tokens that this cache's layers see: make "
            "it with the sliding_window and num_sink_tokens of the cache they left"
        )
