"""Sequences on the host, apart from any cache."""

import dataclasses
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.metadata import requests
from jkv.metadata.requests import Integers
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.status import Status, raise_for_status
from jkv.storage import contents
from jkv.storage.contents import Contents


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Swapped:
    """Sequences on the host, apart from any cache: a small pool of their own.

    B sequences share its blocks, which are numbered from 0. The first P blocks hold
    tokens, and their contents are here. The others are reserved: the sequences may
    still fill them. A `Swapped` can be pickled, and swapped in as often as you like.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [16])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, 5, capacity=5)
      >>> jkv.swap_out(cache, 0)[1]
      Swapped(1 sequences, 5 tokens, 2 of 4 blocks with contents, 284 bytes)
    """

    seq_ids: np.ndarray  # i32[B], the ids that the sequences had
    block_tables: np.ndarray  # i32[B, M], numbers of blocks, `num_blocks`: not mapped
    context_lengths: np.ndarray  # i32[B], tokens of each sequence
    num_uses: np.ndarray  # u32[B], as in `Metadata`
    committed: np.ndarray | None  # i32[B], as in `PrefixIndex`
    salts: np.ndarray | None  # i32[B], likewise
    contents: Contents  # of the P blocks with tokens
    num_blocks: int  # P and the reserved ones
    block_size: int  # tokens per block, T
    # i32[B], columns that a sliding window gave back; None without one. Earlier
    # versions wrote none.
    num_given_back: np.ndarray | None = None
    dtype: np.dtype[Any]  # that the stored bits mean

    @property
    def num_sequences(self) -> int:
        """Sequences held, B."""
        return len(self.context_lengths)

    @property
    def num_filled_blocks(self) -> int:
        """Blocks whose contents are held, P."""
        return sum(a.shape[1] for a in next(iter(self.contents.storage.values())))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in jax.tree.leaves(self.__dict__) if np.ndim(a))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle plain numpy arrays, wherever the pieces are."""
        return {**self.__dict__, "contents": jax.tree.map(np.asarray, self.contents)}

    def __repr__(self) -> str:
        """Fit one line."""
        return (
            f"Swapped({self.num_sequences} sequences, "
            f"{int(self.context_lengths.sum(dtype=np.int64))} tokens, "
            f"{self.num_filled_blocks} of {self.num_blocks} blocks with contents, "
            f"{self.nbytes:,} bytes)"
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
    mapped = rows.block_tables < cache.num_blocks
    num_filled = -(-rows.context_lengths[:, None] // cache.block_size)
    filled = mapped & (np.arange(mapped.shape[1]) < num_filled)
    blocks, num_blocks, tables = _renumbered(rows.block_tables, filled, mapped)
    return Swapped(
        seq_ids=np.asarray(seq_ids)[named],
        block_tables=tables,
        context_lengths=rows.context_lengths,
        num_uses=rows.num_uses,
        committed=rows.committed,
        salts=rows.salts,
        contents=contents.fetch(cache, blocks),
        num_blocks=num_blocks,
        block_size=cache.block_size,
        num_given_back=rows.num_given_back,
        dtype=cache.dtype,
    )


class _Found(NamedTuple):
    """What the metadata says of the sequences asked for, one row each."""

    status: Any  # i32[B]
    block_tables: Any  # i32[B, M]
    context_lengths: Any  # i32[B]
    num_uses: Any  # u32[B]
    committed: Any  # i32[B] or None
    salts: Any  # i32[B] or None
    num_given_back: Any  # i32[B] or None


@jax.jit
def _look_up(metadata: Metadata, seq_ids: jax.Array) -> _Found:
    closable = requests.is_live(metadata, seq_ids)
    closable &= requests.is_first_mention(metadata, seq_ids)
    padding = requests.is_padding(seq_ids)
    prefix, window = metadata.prefix, metadata.window

    def rows(array: jax.Array) -> jax.Array:
        return array.at[seq_ids].get(mode="clip")

    return _Found(
        requests.find_status(padding, [(Status.INVALID_SEQUENCE, ~closable)]),
        rows(metadata.block_tables),
        rows(metadata.context_lengths),
        rows(metadata.num_uses),
        None if prefix is None else rows(prefix.committed),
        None if prefix is None else rows(prefix.sequence_salts),
        None if window is None else rows(window.num_given_back),
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
    """Reject sequences from a cache of another shape, dtype or window."""
    _check_given_back(cache, swapped)
    pools = cache.storage
    kinds = {
        "block_size": (swapped.block_size, cache.block_size),
        "dtype": (swapped.dtype.name, cache.dtype.name),
        "arrays": (sorted(swapped.contents.storage), sorted(pools)),
    }
    for name in sorted(swapped.contents.storage.keys() & pools.keys()):
        pool = pools[name]
        of_block = cache.num_kv_heads, *pool.shape[3:]
        kind = f"{pool.dtype}[{pool.shape[0]}, blocks, {str(of_block)[1:-1]}]"
        for piece in swapped.contents.storage[name]:
            same = piece.shape[:1] + piece.shape[2:] == pool.shape[:1] + of_block
            if not same or piece.dtype != pool.dtype:
                found = f"{piece.dtype}{list(piece.shape)}"
                kinds[name] = (found, kind)
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


def _check_given_back(cache: Cache, swapped: Swapped) -> None:
    """Reject sequences that have given back what this cache's layers would see."""
    given_back = swapped.num_given_back
    if given_back is None or not np.any(given_back):
        return
    window, size = cache.metadata.window, swapped.block_size
    if window is None:
        raise ValueError(
            "these sequences have given back what their sliding window does not see; "
            "this cache keeps all tokens: make it with the same sliding_window"
        )
    # The gap begins behind the sinks' blocks: the first column that maps nothing.
    gone = np.flatnonzero(given_back)
    first = np.argmax(swapped.block_tables[gone] >= swapped.num_blocks, axis=1)
    end = (first + given_back[gone]) * size
    seen = swapped.context_lengths[gone] - window.length + 1
    sinks = -(-window.num_sink_tokens // size)
    if np.any(first != sinks) or np.any(end > seen):
        raise ValueError(
            f"these sequences have given back tokens that this cache keeps, with a "
            f"window of {window.length} and {window.num_sink_tokens} sinks; make it "
            f"with the sliding_window and num_sink_tokens of the cache they left"
        )


# What version 0.1 pickled names these classes by the modules of its day.
sys.modules["jkv.transfer"] = sys.modules[__name__]
sys.modules["jkv.contents"] = contents
