"""Swapped-out sequences of a group with blocks, on the host."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks import contents
from jkv.blocks.contents import Contents
from jkv.formats.format import Formats
from jkv.formats.table import FORMATS
from jkv.state import BlockGroup, Cache


class SwapInBlocks(NamedTuple):
    """Blocks of B swapped-out sequences in a group; arrays of the host."""

    block_tables: Any  # i32[B, M], local block numbers; M of the cache to enter
    is_first: Any  # bool[B, M], first entry of each block
    num_released: Any  # i32[B], released columns between mapped ones
    num_blocks: Any  # i32[], number of blocks; marks unmapped entries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwappedGroup:
    """Blocks of B sequences in one group of layers, as a small pool of their own.

    The blocks are numbered from 0. The first P hold tokens, and `contents` has their
    contents. The others are reserved for later tokens.
    """

    kind = "blocks"

    block_tables: np.ndarray  # i32[B, M], block numbers, `num_blocks` if not mapped
    num_released: np.ndarray  # i32[B], columns released by a sliding window
    contents: Contents  # of the P blocks with tokens
    # P plus the reserved blocks; static, as no shape implies it.
    num_blocks: int = dataclasses.field(metadata={"static": True})
    # Encoded by the stored bits; static, as in `BlockStorage`.
    dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    value_dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})

    @property
    def formats(self) -> Formats:
        """Storage formats of keys and values."""
        return Formats(FORMATS[self.dtype], FORMATS[self.value_dtype])

    @property
    def num_filled_blocks(self) -> int:
        """Number of blocks with contents, P."""
        return sum(a.shape[1] for a in next(iter(self.contents.storage.values())))

    def to_enter(self, columns: int) -> SwapInBlocks:
        """Fit the tables to a cache with `columns` columns."""
        tables = self.block_tables[:, :columns]
        padding = ((0, 0), (0, columns - tables.shape[1]))
        tables = np.pad(tables, padding, constant_values=self.num_blocks)
        is_first = np.zeros(tables.size, bool)
        is_first[np.unique(tables, return_index=True)[1]] = True
        return SwapInBlocks(
            block_tables=tables,
            is_first=is_first.reshape(tables.shape),
            num_released=self.num_released,
            num_blocks=np.int32(self.num_blocks),
        )

    def encoded_dtype(self, path: str) -> np.dtype[Any] | None:
        name = path.removeprefix("contents.storage.")
        return None if name == path else self.formats.encoded_dtype(name)

    def fits(self, columns: int) -> bool:
        return not np.any(self.block_tables[:, columns:] < self.num_blocks)

    def compare(
        self, cache: Cache, number: int, lengths: np.ndarray
    ) -> dict[str, tuple[Any, Any]]:
        """Return storage properties, here and in a cache; refuse a larger window."""
        self._check_released(cache.metadata.groups[number], lengths)
        storage = cache.storage[number]
        pieces_of, arrays = self.contents.storage, storage.arrays
        kinds: dict[str, tuple[Any, Any]] = {
            "dtype": (str(self.formats), str(storage.formats)),
            "arrays": (sorted(pieces_of), sorted(arrays)),
        }
        for name in sorted(pieces_of.keys() & arrays.keys()):
            pool = arrays[name]
            of_block = storage.num_kv_heads, *pool.shape[3:]
            kind = f"{pool.dtype}[{pool.shape[0]}, blocks, {str(of_block)[1:-1]}]"
            for piece in pieces_of[name]:
                same = piece.shape[:1] + piece.shape[2:] == pool.shape[:1] + of_block
                if not same or piece.dtype != pool.dtype:
                    kinds[name] = (f"{piece.dtype}{list(piece.shape)}", kind)
        return kinds

    def _check_released(self, group: BlockGroup, lengths: np.ndarray) -> None:
        gone = np.flatnonzero(self.num_released)
        if len(gone) == 0:
            return
        size, window = group.block_size, group.window
        # The gap begins after the sinks' blocks, at the first unmapped column.
        first = np.argmax(self.block_tables[gone] >= self.num_blocks, axis=1)
        unseen = np.asarray(window.unseen_from(jnp.asarray(lengths[gone]), size))
        is_seen = np.any(self.num_released[gone] > unseen)
        if is_seen or np.any(first != window.sink_columns(size)):
            raise ValueError(
                "swapped sequences lack tokens inside the cache's window; create the "
                "cache with the sliding_window and num_sink_tokens of the sequences' "
                "previous one"
            )

    def put(
        self,
        cache: Cache,
        number: int,
        _seq_ids: np.ndarray,
        tables: jax.Array | None,
        *,
        donate: bool,
    ) -> Cache:
        """Write the contents to the blocks of the new tables, i32[B, M]."""
        nothing = cache.metadata.groups[number].num_blocks
        blocks = np.full(self.num_blocks + 1, nothing, np.int32)
        new = np.asarray(tables)
        columns = min(self.block_tables.shape[1], new.shape[1])
        blocks[self.block_tables[:, :columns]] = new[:, :columns]
        blocks = blocks[: self.num_filled_blocks]
        return contents.put(cache, number, blocks, self.contents, donate=donate)


def fetch_group(
    cache: Cache, number: int, lengths: np.ndarray, left: tuple[np.ndarray, np.ndarray]
) -> SwappedGroup:
    """Copy the blocks of sequences in one group to the host.

    The cache is on a device or of numpy arrays, as read from a file. `left` has the
    tables, i32[B, M], and released columns, i32[B], of sequences of `lengths`, i32[B].
    """
    tables, num_released = left
    mapped = tables < cache.metadata.groups[number].num_blocks
    num_filled = -(-lengths[:, None] // cache.block_size)
    filled = mapped & (np.arange(mapped.shape[1]) < num_filled)
    blocks, num_blocks, renumbered = _renumbered(tables, filled, mapped)
    return SwappedGroup(
        block_tables=renumbered,
        num_released=num_released,
        contents=contents.fetch(cache, number, blocks),
        num_blocks=num_blocks,
        dtype=cache.storage[number].dtype,
        value_dtype=cache.storage[number].value_dtype,
    )


def _renumbered(
    tables: np.ndarray, filled: np.ndarray, mapped: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray]:
    """Renumber the blocks of sequences from 0, in order of their first entry.

    Entries of the tables, i32[B, M], are filled with tokens, or only mapped and
    numbered last. Return the old ids of the filled blocks, i32[P]; the number of all
    blocks; and the renumbered tables, with that number for unmapped entries.
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
