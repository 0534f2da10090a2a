"""Out and back: sequences leave for host memory and return, to this cache or another.

What crosses is the blocks that hold tokens, each once however many of the sequences
share it (`jkv.contents`). What becomes of the rest of a sequence:

* Reservations are kept, as a number of blocks without contents. A reservation promises
  that `append` will not be refused; a sequence that was pushed aside for a while is
  owed that promise still. `truncate` to the current length gives it up.
* The stamps of the clock stay behind. They mean nothing on another cache's clock, and a
  sequence that just returned must not look like the one used longest ago: `swap_in`
  stamps as `allocate` does. How often it was used is no time, and goes along.
* Recorded tokens and the domain of the prefix index go along. What a sequence had made
  visible stays behind as cached blocks, for others to find as long as the pool can
  spare them. The sequence itself, once back, makes no more blocks visible.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import allocation, contents, counters, pool, prefix_index, requests, ring
from jkv.contents import Contents
from jkv.requests import Integers
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.status import Status, raise_for_status


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Swapped:
    """Sequences on the host, apart from any cache: a small pool of their own.

    Its blocks are numbered from 0, those with tokens first; P of them have contents.
    It can be pickled, and swapped in as often as you like.

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
    block_tables: np.ndarray  # i32[B, M], `num_blocks` where nothing is mapped
    context_lengths: np.ndarray  # i32[B], tokens of each sequence
    num_uses: np.ndarray  # u32[B], as in `Metadata`
    committed: np.ndarray | None  # i32[B], as in `PrefixIndex`
    salts: np.ndarray | None  # i32[B], likewise
    contents: Contents  # of the P blocks with tokens
    num_blocks: int  # reserved ones without contents included
    block_size: int  # tokens per block, T
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


class SwapIn(NamedTuple):
    """What `swap_in` answers, one entry per sequence, in the order swapped out."""

    seq_ids: jax.Array  # i32[B], the ids they have now, all -1 if refused
    status: jax.Array  # i32[B], `Status`, the same for all


def swap_out(cache: Cache, seq_ids: Integers) -> tuple[Cache, Swapped]:
    """Move sequences to the host; they are freed here. For the host, outside jit.

    Other sequences may share their blocks and stay. The blocks with tokens are gathered
    on the device, which takes that much memory there until they have crossed.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding and leaves no trace in the result.

    Returns:
      The new cache, as `free` leaves it, and the sequences.

    Raises:
      InvalidSequence: for an id that is not open or is named twice; nothing happened.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> cache, swapped = jkv.swap_out(cache, opened.seq_ids)
      >>> int(jkv.num_free_blocks(cache)), swapped.num_sequences
      (4, 1)
    """
    swapped = copy_out(cache, seq_ids)
    cache, _ = allocation.free(cache, seq_ids)
    return cache, swapped


def swap_in(
    cache: Cache, swapped: Swapped, *, donate: bool = False
) -> tuple[Cache, SwapIn]:
    """Open swapped sequences again, all or none. For the host, outside jit.

    They may return to any cache with the same layers, heads, sizes of head and block,
    and dtype. Blocks that they shared among each other they share again; what they
    shared with sequences that stayed, they now have for themselves. Tokens that were
    not recorded read as -1 in a cache that records them.

    Args:
      cache: the cache.
      swapped: what `swap_out` returned; it stays valid.
      donate: write in place of the old cache's storage, which is then gone, instead of
        in a copy. Without it the device must hold the storage twice for a moment.

    Returns:
      The new cache and a `SwapIn`. Status: OK, CONTEXT_FULL (a sequence exceeds this
      cache's `max_context_length`), OUT_OF_SEQUENCES or OUT_OF_BLOCKS.

    Raises:
      ValueError: for a cache of another shape or dtype.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [20, 64])
      >>> opened.seq_ids.tolist()
      [0, -1]
      >>> cache, swapped = jkv.swap_out(cache, 0)
      >>> cache, opened = jkv.allocate(cache, 64)
      >>> cache, back = jkv.swap_in(cache, swapped)
      >>> back.status.tolist() == [jkv.Status.OUT_OF_BLOCKS]
      True
      >>> cache, status = jkv.free(cache, opened.seq_ids)
      >>> cache, back = jkv.swap_in(cache, swapped)
      >>> back.seq_ids.tolist()
      [0]
    """
    _check_same_kind(cache, swapped)
    if swapped.num_sequences == 0:
        none = jnp.zeros((0,), jnp.int32)
        return cache, SwapIn(none, none)
    metadata, result, rows = _open(cache.metadata, _Entering.of(swapped, cache))
    if int(result.status[0]) != Status.OK:
        return dataclasses.replace(cache, metadata=metadata), result

    # Where each of the swapped blocks is now, by what the tables say.
    blocks = np.full(swapped.num_blocks + 1, cache.num_blocks, np.int32)
    columns = min(swapped.block_tables.shape[1], cache.max_blocks_per_sequence)
    blocks[swapped.block_tables[:, :columns]] = np.asarray(rows)[:, :columns]
    cache = dataclasses.replace(cache, metadata=metadata)
    filled = blocks[: swapped.num_filled_blocks]
    return contents.put(cache, filled, swapped.contents, donate=donate), result


def copy_out(cache: Cache, seq_ids: Integers) -> Swapped:
    """Return sequences as a host value; the cache, which may be on the host, stays.

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
    filled = np.arange(mapped.shape[1]) < num_filled
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
        dtype=cache.dtype,
    )


class _Rows(NamedTuple):
    """What the metadata says of the sequences asked for, one row each."""

    status: Any  # i32[B]
    block_tables: Any  # i32[B, M]
    context_lengths: Any  # i32[B]
    num_uses: Any  # u32[B]
    committed: Any  # i32[B] or None
    salts: Any  # i32[B] or None


@jax.jit
def _look_up(metadata: Metadata, seq_ids: jax.Array) -> _Rows:
    closable = requests.is_live(metadata, seq_ids)
    closable &= requests.is_first_mention(metadata, seq_ids)
    padding = requests.is_padding(seq_ids)
    prefix = metadata.prefix

    def rows(array: jax.Array) -> jax.Array:
        return array.at[seq_ids].get(mode="clip")

    return _Rows(
        requests.find_status(padding, [(Status.INVALID_SEQUENCE, ~closable)]),
        rows(metadata.block_tables),
        rows(metadata.context_lengths),
        rows(metadata.num_uses),
        None if prefix is None else rows(prefix.committed),
        None if prefix is None else rows(prefix.sequence_salts),
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


class _Entering(NamedTuple):
    """Sequences on their way in, as `_open` needs them; all arrays on the host."""

    block_tables: Any  # i32[B, M] in swapped numbers, M of the cache they enter
    is_first: Any  # bool[B, M], entries that name a block for the first time
    context_lengths: Any  # i32[B]
    num_uses: Any  # u32[B]
    committed: Any  # i32[B]
    salts: Any  # i32[B]
    num_blocks: Any  # i32[], blocks to be taken; the tables' "not mapped"
    too_long: Any  # bool[], whether one does not fit the block tables

    @classmethod
    def of(cls, swapped: Swapped, cache: Cache) -> "_Entering":
        """Fit the tables of swapped sequences to those of a cache."""
        columns = cache.max_blocks_per_sequence
        tables = swapped.block_tables[:, :columns]
        padding = ((0, 0), (0, columns - tables.shape[1]))
        tables = np.pad(tables, padding, constant_values=swapped.num_blocks)
        is_first = np.zeros(tables.size, bool)
        is_first[np.unique(tables, return_index=True)[1]] = True
        cut_off = swapped.block_tables[:, columns:] < swapped.num_blocks
        lengths = swapped.context_lengths
        salts = swapped.salts
        return cls(
            block_tables=tables,
            is_first=is_first.reshape(tables.shape),
            context_lengths=lengths,
            num_uses=swapped.num_uses,
            committed=_committed(swapped),
            salts=np.zeros_like(lengths) if salts is None else salts,
            num_blocks=np.int32(swapped.num_blocks),
            too_long=np.any(cut_off) | np.any(lengths > cache.max_context_length),
        )


def _committed(swapped: Swapped) -> np.ndarray:
    """Return how much of each sequence the prefix index it enters knows, i32[B].

    Blocks that come in are not in the index, and may not be replaced by equal ones that
    are, whose last bits can differ. As a block must not be visible before its parent, a
    sequence that had begun to make its blocks visible is done with that (-1).
    """
    if swapped.committed is None:
        begun = swapped.context_lengths > 0
    else:
        begun = swapped.committed != 0
    return np.where(begun, np.int32(-1), np.int32(0))


@jax.jit
def _open(
    metadata: Metadata, entering: _Entering
) -> tuple[Metadata, SwapIn, jax.Array]:
    """Open sequences with blocks for all, or refuse them all.

    Returns:
      The metadata, the answer, and i32[B, M], the sequences' new block tables.
    """
    num_rows = entering.context_lengths.shape[0]
    num_blocks = entering.num_blocks
    causes = [
        (Status.CONTEXT_FULL, entering.too_long),
        (Status.OUT_OF_SEQUENCES, metadata.free_sequences.count < num_rows),
        (Status.OUT_OF_BLOCKS, metadata.free_blocks.count < num_blocks),
    ]
    cause = requests.find_status(jnp.bool_(False), causes)
    status = jnp.full((num_rows,), cause)
    served = status == Status.OK
    metadata, seq_ids = allocation.open_sequences(metadata, served)
    row = jnp.where(served, seq_ids, metadata.max_sequences)

    # The blocks are numbered in the order in which they leave the pool.
    taken = jnp.where(cause == Status.OK, num_blocks, 0)
    metadata = pool.expose(metadata, taken)
    mapped = served[:, None] & (entering.block_tables < num_blocks)
    block = ring.peek(metadata.free_blocks, entering.block_tables)
    block = jnp.where(mapped, block, metadata.num_blocks)
    first = jnp.where(entering.is_first, block, metadata.num_blocks)
    metadata = pool.mark_taken(metadata, first.reshape(-1))
    again = jnp.where(entering.is_first, metadata.num_blocks, block)
    counts = metadata.reference_counts.at[again].add(1, mode="drop")
    num_mapped = jnp.sum(mapped, axis=1, dtype=jnp.int32)

    def enter(array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.at[row].set(rows, mode="drop")

    metadata = dataclasses.replace(
        metadata,
        block_tables=enter(metadata.block_tables, block),
        context_lengths=enter(metadata.context_lengths, entering.context_lengths),
        num_mapped_blocks=enter(metadata.num_mapped_blocks, num_mapped),
        num_uses=enter(metadata.num_uses, entering.num_uses),
        reference_counts=counts,
        free_blocks=ring.pop(metadata.free_blocks, taken),
    )
    metadata = prefix_index.open_sequences(
        metadata, row, entering.salts, entering.committed
    )
    need = jnp.zeros((num_rows,), jnp.int32).at[0].set(taken)
    metadata, _ = counters.settle(metadata, status, served, need)
    return metadata, SwapIn(seq_ids, status), block


def _check_same_kind(cache: Cache, swapped: Swapped) -> None:
    """Reject sequences from a cache of another shape or dtype."""
    pools = cache.storage
    kinds = {
        "block_size": (swapped.block_size, cache.block_size),
        "dtype": (swapped.dtype.name, cache.dtype.name),
        "arrays": (sorted(swapped.contents.storage), sorted(pools)),
    }
    for name in sorted(swapped.contents.storage.keys() & pools.keys()):
        pool = pools[name]
        kind = f"{pool.dtype}[{pool.shape[0]}, blocks, {str(pool.shape[2:])[1:-1]}]"
        for piece in swapped.contents.storage[name]:
            same = piece.shape[:1] + piece.shape[2:] == pool.shape[:1] + pool.shape[2:]
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
