"""Metadata: small integers that say who owns which block, as pytrees.

Symbols in shape comments: L layers, N blocks in the pool, K kv heads, T tokens per
block, D (Dv) key (value) head dim, S sequences, M blocks per sequence, B requests in a
call, R token rows in a batch.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jkv.config.counts import count_window_blocks
from jkv.status import Counter, Status

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
    bounds: jax.Array  # i32[4], the four numbers that `of` names, in their order

    @classmethod
    def of(
        cls,
        ids: jax.Array,
        *,
        head: jax.Array,
        span: jax.Array,
        count: jax.Array,
        fewest: jax.Array,
    ) -> Self:
        """Make a ring of its ids, i32[C], and its four numbers, i32[] each."""
        return cls(ids=ids, bounds=jnp.stack([head, span, count, fewest]))

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
    names the parent one column before, and rows are released from their end. (Not with
    a sliding window: see the fields at the end.)

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
    # With a sliding window, which gives parents back before their children: no block
    # has a parent, and what came before it is known by more hashes.
    wide_hashes: jax.Array | None = None  # u32[N, 2], of the prefix to the block's end
    hashes_above: jax.Array | None = None  # u32[N], of the prefix to its beginning


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlidingWindow:
    """How far back the rows of a sequence see, and which of its blocks are gone.

    A *given back* column of the block tables maps no block any more, as no row will see
    its tokens again. Those of a sequence follow each other: before them are the blocks
    of the sinks, behind them what the window needs.
    """

    num_given_back: jax.Array  # i32[S], given back columns of each sequence
    # Tokens that a row sees, itself counted; static, as no shape tells it.
    length: int = dataclasses.field(metadata={"static": True})
    # Tokens at the start of a sequence that are never given back; static, likewise.
    num_sink_tokens: int = dataclasses.field(metadata={"static": True})

    def most_blocks(self, block_size: int, num_tokens: int) -> int:
        """Return the most blocks of a sequence that grows by so many at a time."""
        return count_window_blocks(
            self.length, self.num_sink_tokens, block_size, num_tokens
        )


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
    6. `mapped_blocks`: ceil(context length / T) <= mapped blocks <= M, those given back
       counted; lengths lie in 0..max_context_length.
    7. `block_tables`: mapped entries are block ids, all others and those given back are
       N, none twice a row.
    8. `closed_rows`: a closed row has length 0 and no blocks.
    9. `shapes`: every array has the shape and dtype that the others imply.
    10. `prefix_index`: an indexed block has all its tokens, stands in a bucket, has no
       equal, and a parent that is indexed and is not handed out before it; with a
       window it has none.
    11. `committed`: what a sequence committed is a chain of indexed blocks but for what
       was given back, the rest of what it maps is not indexed; 0 <= committed <=
       context length, or -1.
    12. `given_back`: all tokens that the next row of a sequence will see are kept; a
       closed row has given nothing back.
    """

    block_tables: jax.Array  # i32[S, M], block ids of each sequence, N where unmapped
    context_lengths: jax.Array  # i32[S], tokens of each sequence
    # i32[S], blocks of each sequence, those reserved and those given back too
    num_mapped_blocks: jax.Array
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
    window: SlidingWindow | None  # if the configuration has a sliding window
    # T; static, as no shape tells it when there are no tokens.
    block_size: int = dataclasses.field(metadata={"static": True})
    # Most tokens of a sequence; static, as it need not be a multiple of T.
    max_context_length: int = dataclasses.field(metadata={"static": True})

    @property
    def now(self) -> jax.Array:
        """The low word of the clock, u32[]: calls that served a request."""
        return self.counters[int(Counter.CLOCK), 0]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, N."""
        return self.reference_counts.shape[0]

    @property
    def num_kept_blocks(self) -> jax.Array:
        """Blocks of each sequence without those given back, i32[S]."""
        if self.window is None:
            return self.num_mapped_blocks
        return self.num_mapped_blocks - self.window.num_given_back

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
