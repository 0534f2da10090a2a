"""What sequences have in a group with blocks, on the host."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks import contents
from jkv.blocks.contents import Contents
from jkv.blocks.plans import Brought
from jkv.formats.format import Formats
from jkv.formats.table import formats_of
from jkv.state import BlockGroup, Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwappedGroup:
    """What B sequences have in one group of layers: a small pool of their own.

    They share its blocks, which are numbered from 0. The first P blocks hold tokens,
    and their contents are here. The others are reserved: the sequences may still fill
    them.
    """

    kind = "blocks"

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

    def meaning(self, path: str) -> np.dtype[Any] | None:
        name = path.removeprefix("contents.storage.")
        return None if name == path else self.formats.meaning(name)

    def fits(self, columns: int) -> bool:
        return not np.any(self.block_tables[:, columns:] < self.num_blocks)

    def compare(
        self, cache: Cache, number: int, lengths: np.ndarray
    ) -> dict[str, tuple[Any, Any]]:
        """Return what storage is, here and in a cache; refuse one that sees more."""
        self._check_given_back(cache.metadata.groups[number], lengths)
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

    def _check_given_back(self, group: BlockGroup, lengths: np.ndarray) -> None:
        gone = np.flatnonzero(self.num_given_back)
        if len(gone) == 0:
            return
        size, window = group.block_size, group.window
        # The gap begins behind the sinks' blocks: the first column that maps nothing.
        first = np.argmax(self.block_tables[gone] >= self.num_blocks, axis=1)
        unseen = np.asarray(window.unseen_from(jnp.asarray(lengths[gone]), size))
        is_seen = np.any(self.num_given_back[gone] > unseen)
        if is_seen or np.any(first != window.sink_columns(size)):
            raise ValueError(
                "these sequences have given back tokens that this cache's layers see: "
                "make it with the sliding_window and num_sink_tokens of the cache they "
                "left"
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
        """Write what the blocks hold to those in new block tables, i32[B, M]."""
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
    """Copy what sequences have in one group to the host.

    The cache is on a device, or of numpy arrays, as a file gives it. Of sequences of
    lengths, i32[B], are known the tables, i32[B, M], and columns given back, i32[B].
    """
    tables, num_given_back = left
    mapped = tables < cache.metadata.groups[number].num_blocks
    num_filled = -(-lengths[:, None] // cache.block_size)
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


def _renumbered(
    tables: np.ndarray, filled: np.ndarray, mapped: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray]:
    """Number the blocks of some sequences anew, in order of their first mention.

    Entries of the tables, i32[B, M], are filled with tokens or only mapped; these are
    numbered last. Returned are the old ids of the blocks with tokens, i32[P]; the
    number of all blocks; and the tables in new numbers, that number where nothing is
    mapped.
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
