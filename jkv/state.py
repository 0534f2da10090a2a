"""The cache as a value: immutable pytrees of arrays.

Small integers (`Metadata`) stand apart from the large K/V arrays, so that everything
about blocks can be tested, simulated and jitted without touching storage.

Symbols in shape comments: L layers, N blocks in the pool, K kv heads, T tokens per
block, D (Dv) key (value) head dim, S sequences, M blocks per sequence, B requests in a
call, R token rows in a batch.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.dtypes import STORAGE_NAMES
from jkv.config.units import human_bytes
from jkv.status import Status

NO_SEQUENCE = -1  # as a `seq_id`: padding, ignored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """FIFO of free ids: entry `i` from the head is `ids[(head + i) % len(ids)]`.

    The ring has room for every id there is, so a push cannot overflow. What lies
    outside the `span` entries from the head on is stale. Every entry in the span is a
    free id, unless a prefix index takes cached blocks out of the middle: it leaves
    holes there, and gives the ring of blocks room for as many holes as blocks.
    """

    ids: jax.Array  # i32[C], the ids; C blocks or sequences in all, twice with holes
    bounds: jax.Array  # i32[4], the four numbers below, in their order

    @property
    def head(self) -> jax.Array:
        """Index of the entry that leaves next, i32[]."""
        return self.bounds[0]

    @property
    def span(self) -> jax.Array:
        """Entries from the head to the tail, holes included, i32[]."""
        return self.bounds[1]

    @property
    def count(self) -> jax.Array:
        """Ids in the ring, i32[]."""
        return self.bounds[2]

    @property
    def fewest(self) -> jax.Array:
        """Lowest count so far, i32[]."""
        return self.bounds[3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixIndex:
    """Which full blocks can be found by the tokens that lead up to their end.

    A block is *indexed* from the `commit` that made it visible until the pool hands it
    out again, whether live or free (then it is a *cached* block). Its parent is the
    block before it; the parents of a block lead back to the first block of a prompt.
    A parent stays indexed as long as its children: every table row that names a child
    names the parent one column before, and rows are released from their end.

    Buckets and children are hash tables with 8 and 16 places to a row. What they name
    need not be indexed any more: whoever reads them compares with the arrays below.
    """

    buckets: jax.Array  # i32[N, 8], blocks by the hash of their prefix, N where empty
    children: jax.Array  # i32[N, 16], blocks by the hash of their parent, N where empty
    hashes: jax.Array  # u32[N], hash of the prefix to the block's end, 0 if not indexed
    parents: jax.Array  # i32[N], the block before, N for the first of a prompt
    salts: jax.Array  # i32[N], domain of the block
    positions: jax.Array  # i32[N], a free block's place in the ring, -1 if it is live
    committed: jax.Array  # i32[S], tokens made visible; -1: none will ever be
    sequence_salts: jax.Array  # i32[S], domain of each sequence
    epochs: jax.Array  # u32[S], clock when the sequence was opened or last cut back


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """Who owns which block. All that the verbs decide on, without the K/V arrays.

    A context length counts the tokens appended, the newest included. A table entry that
    maps no block holds N: too high to be an index, so scatters drop it.

    Invariants, by the names `jkv.check` reports:

    1. `reference_counts`: each block's count is the number of table entries naming it.
    2. `partition`: a block is free (count 0) or live; together they are the pool.
    3. `free_blocks`: each free block is in the ring exactly once, nothing else is.
    4. `free_sequences`: each closed row is in its ring exactly once, nothing else is.
    5. `private_tail`: a block its sequence may still write to has no second owner.
    6. `mapped_blocks`: ceil(context length / T) <= mapped blocks <= M; lengths lie in
       0..max_context_length.
    7. `block_tables`: mapped entries are block ids, all others are N, none twice a row.
    8. `closed_rows`: a closed row has length 0 and no blocks.
    9. `shapes`: every array has the shape and dtype that the others imply.
    10. `prefix_index`: an indexed block has all its tokens, stands in a bucket, has no
       equal, and a parent that is indexed and is not handed out before it.
    11. `committed`: what a sequence committed is a chain of indexed blocks, the rest of
       what it maps is not indexed; 0 <= committed <= context length, or -1.
    """

    block_tables: jax.Array  # i32[S, M], block ids of each sequence, N where unmapped
    context_lengths: jax.Array  # i32[S], tokens of each sequence
    num_mapped_blocks: jax.Array  # i32[S], blocks of each sequence, reserved ones too
    is_open: jax.Array  # bool[S], handed out by allocate or fork, not yet freed
    reference_counts: jax.Array  # i32[N], table entries that name each block
    free_blocks: Ring  # [N], blocks with reference count 0, oldest first
    free_sequences: Ring  # [S], closed rows, oldest first
    created: jax.Array  # u32[S], clock when each sequence was opened
    last_used: jax.Array  # u32[S], clock when it was last appended to, forked, touched
    num_uses: jax.Array  # u32[S], how often it was, since it was opened
    counters: jax.Array  # u32[counters, 2], `Counter` rows: low word, high word
    tokens: jax.Array | None  # i32[N, T], token ids if the configuration records them
    prefix: PrefixIndex | None  # if the configuration has prefix caching
    # Static, as no shape tells them: T when there are no tokens, and a maximum that
    # need not be a multiple of T.
    block_size: int = dataclasses.field(metadata={"static": True})
    max_context_length: int = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, N."""
        return self.reference_counts.shape[0]

    @property
    def refusals(self) -> jax.Array:
        """Refused requests by `Status`, u32[statuses, 2]: low word, high word."""
        return self.counters[: len(Status)]

    @property
    def max_sequences(self) -> int:
        """Rows of the block tables, S."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M."""
        return self.block_tables.shape[1]

    def locate(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the table column and the offset of positions, i32[...], of 0 or more.

        It truncates: XLA on CPU takes the corrections of a floor division for work that
        is worth a second thread, which costs far more than they do.
        """
        size = jnp.int32(self.block_size)
        return jax.lax.div(positions, size), jax.lax.rem(positions, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache:
    """A paged key/value cache. Make one with `init`; every verb returns a new one.

    Example:
      >>> import jkv
      >>> jkv.init(jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=4, block_size=4,
      ...     max_sequences=2, max_context_length=16))
      Cache(2 layers, 1 kv heads, head dim 8, bfloat16, 1.3 KiB)
        blocks     4 of 4 free, 4 tokens each
        sequences  0 of 2 open, 0 tokens, at most 16 each
    """

    metadata: Metadata
    keys: jax.Array  # [L, N, K, T, D], bfloat16 and fp8 as their bits
    # [L, N, K, T, Dv], likewise; None: they are the first Dv elements of the keys
    values: jax.Array | None
    # u16[L, N, K, T], bits of bfloat16: what int8 and fp8 elements are multiplied by.
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    # Static: the dtype that the stored bits mean, which the arrays' own need not be,
    dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    # and Dv where no shape tells it.
    latent_value_dim: int | None = dataclasses.field(metadata={"static": True})

    @property
    def storage(self) -> dict[str, jax.Array]:
        """The arrays beside the metadata by field name, each [L, N, K, T, ...].

        Whoever moves blocks moves them in all of these.
        """
        arrays = {name: getattr(self, name) for name in STORAGE_NAMES}
        return {name: array for name, array in arrays.items() if array is not None}

    def with_storage(self, storage: dict[str, jax.Array]) -> Self:
        """Return the cache with other arrays beside the metadata."""
        return dataclasses.replace(self, **storage)  # type: ignore[arg-type]

    @property
    def num_layers(self) -> int:
        """Layers stored, L; 0 for a cache without storage."""
        return self.keys.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, N."""
        return self.metadata.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block, T."""
        return self.metadata.block_size

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, K."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Size of one key, D."""
        return self.keys.shape[4]

    @property
    def value_head_dim(self) -> int:
        """Size of one value, Dv."""
        if self.latent_value_dim is not None:
            return self.latent_value_dim
        assert self.values is not None
        return self.values.shape[4]

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open at one time, S."""
        return self.metadata.max_sequences

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks one sequence can have, M."""
        return self.metadata.max_blocks_per_sequence

    @property
    def max_context_length(self) -> int:
        """Tokens one sequence can have."""
        return self.metadata.max_context_length

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; `CacheConfig.bytes` when there is storage."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(self))

    @property
    def devices(self) -> set[jax.Device]:
        """Devices that hold the K/V arrays."""
        return self.keys.devices()

    def occupancy(self) -> str:
        """Say in one line how full the cache is (host only)."""
        free, is_open, _ = self._use()
        return (
            f"{free.count} of {self.num_blocks} blocks free, "
            f"{is_open.sum()} of {self.max_sequences} sequences open"
        )

    def __repr__(self) -> str:
        """Fit one screen at any size; a traced or deleted cache shows no counts."""
        layers = f"{self.num_layers} layers" if self.num_layers else "no storage"
        heads = f"{self.num_kv_heads} kv heads, head dim {self.head_dim}"
        size = human_bytes(self.nbytes)
        head = f"Cache({layers}, {heads}, {self.dtype.name}, {size})"
        if not all(map(_is_concrete, jax.tree.leaves(self.metadata))):
            return head
        free, is_open, lengths = self._use()
        return (
            f"{head}\n"
            f"  blocks     {free.count} of {self.num_blocks} free, "
            f"{self.block_size} tokens each\n"
            f"  sequences  {is_open.sum()} of {self.max_sequences} open, "
            f"{lengths.sum(dtype=np.int64)} tokens, "
            f"at most {self.max_context_length} each"
        )

    def _use(self) -> tuple[Ring, np.ndarray, np.ndarray]:
        """Fetch the ring of free blocks, bool[S] open rows and i32[S] lengths."""
        meta = self.metadata
        return jax.device_get((meta.free_blocks, meta.is_open, meta.context_lengths))


def _is_concrete(array: Any) -> bool:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return not array.is_deleted()
    return isinstance(array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The plan of one step: B requests over R token rows.

    Request i owns the rows from `query_starts[i]` on; of a served one, the first
    `query_lengths[i]` rows are its new tokens, the last of them at position
    `context_lengths[i] - 1`. A refused request has the length its sequence had before
    the call; padding and ids that are not open have 0.
    """

    seq_ids: jax.Array  # i32[B], as asked
    status: jax.Array  # i32[B], `Status`
    query_starts: jax.Array  # i32[B], first row; R or above when past the end
    query_lengths: jax.Array  # i32[B], tokens appended, 0 for a refused request
    context_lengths: jax.Array  # i32[B], tokens of the sequence after the step
    positions: jax.Array  # i32[R], position of each row in its sequence, 0 if invalid
    valid: jax.Array  # bool[R], whether a served request owns the row
    block_ids: jax.Array  # i32[R], block of the row's slot, N if invalid
    offsets: jax.Array  # i32[R], offset in the block, 0 if invalid
    epochs: jax.Array | None  # u32[B], for `commit`: when the sequence last lost tokens
    # Static: whether it is known from the call that each request has one row at most.
    is_decoding: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Token rows, R."""
        return self.positions.shape[0]

    @property
    def last_rows(self) -> jax.Array:
        """Row of each request's last token, i32[B]; R where it has none."""
        last = self.query_starts + self.query_lengths - 1
        return jnp.where(self.query_lengths > 0, last, self.num_rows)
