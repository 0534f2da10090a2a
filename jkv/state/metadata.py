"""Metadata: small integers that say which sequence has which blocks, as pytrees.

A sequence is one thing; what it has in each group of layers is another. So `Sequences`
say which are open and how long, and each `BlockGroup` which blocks of its pool they
have.

Symbols in shape comments: G groups, L layers, N blocks in the pool of a group, K kv
heads, T tokens per block, D (Dv) key (value) head dim, S sequences, M blocks per
sequence, B requests in a call, R token rows in a batch.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.config.layers import find_leader
from jkv.indexing import gather, scatter
from jkv.state.no_index import NoIndex
from jkv.state.rings import Ring
from jkv.state.windows import Window
from jkv.status import Counter, Status

NO_SEQUENCE = -1  # as a `seq_id`: padding, ignored


class SequenceRow(NamedTuple):
    """Numbers of a sequence that verbs read and write together, i32[...] each.

    Stamps and counts are the bits of u32.
    """

    context_length: jax.Array | int  # tokens
    is_open: jax.Array | int  # 1 if opened by allocate or fork and not freed, else 0
    created: jax.Array | int  # clock when it was opened
    last_used: jax.Array | int  # clock when it was last appended to, forked, touched
    num_uses: jax.Array | int  # uses since it was opened


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Which sequences are open, how long each is, and what happened when.

    A context length counts the tokens appended, the newest included.
    """

    rows: jax.Array  # i32[S, 5], the columns of `SequenceRow`
    free_rows: Ring  # [S], closed rows, oldest first
    counters: jax.Array  # u32[counters, 2], `Counter` rows: low word, high word
    # i32[S], of each sequence's newest tokens those that no state stands behind yet, so
    # that they can be taken back; None if none ever are.
    num_pending: jax.Array | None
    # Most tokens of a sequence; static, as it need not be a multiple of T.
    max_context_length: int = dataclasses.field(metadata={"static": True})
    # T of all groups; static, as there may be no group with blocks.
    block_size: int = dataclasses.field(metadata={"static": True})

    def pending_of(self, seq_ids: jax.Array) -> jax.Array:
        """Return how many tokens of sequences, i32[B], are pending, i32[B]."""
        if self.num_pending is None:
            return jnp.zeros(seq_ids.shape, jnp.int32)
        return gather(self.num_pending, seq_ids)

    def read(self, seq_ids: jax.Array) -> "SequenceRow":
        """Return the rows of sequences, i32[...]; an id out of range is clamped."""
        rows = gather(self.rows, seq_ids)
        return SequenceRow(*(rows[..., i] for i in range(rows.shape[-1])))

    def write(self, row: jax.Array, values: "SequenceRow") -> Self:
        """Replace distinct rows, i32[B]; one of S or above is dropped."""
        columns = [jnp.broadcast_to(each, row.shape) for each in values]
        rows = scatter(self.rows, row, jnp.stack(columns, axis=-1))
        return dataclasses.replace(self, rows=rows)

    @property
    def context_lengths(self) -> jax.Array:
        """Tokens of each sequence, i32[S]."""
        return self._column("context_length")

    @property
    def is_open(self) -> jax.Array:
        """True for sequences opened by `allocate` or `fork` and not freed, bool[S]."""
        return self._column("is_open") != 0

    @property
    def created(self) -> jax.Array:
        """Clock when each sequence was opened, u32[S]."""
        return jax.lax.bitcast_convert_type(self._column("created"), jnp.uint32)

    @property
    def last_used(self) -> jax.Array:
        """Clock when each was last appended to, forked or touched, u32[S]."""
        return jax.lax.bitcast_convert_type(self._column("last_used"), jnp.uint32)

    @property
    def num_uses(self) -> jax.Array:
        """Uses of each sequence since it was opened, u32[S]."""
        return jax.lax.bitcast_convert_type(self._column("num_uses"), jnp.uint32)

    def _column(self, name: str) -> jax.Array:
        # With a pool for each rank the rows have a leading axis.
        return self.rows[..., SequenceRow._fields.index(name)]

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open at one time, S."""
        return self.rows.shape[-2]

    @property
    def now(self) -> jax.Array:
        """The low word of the clock, u32[]: calls that served a request."""
        return self.counters[int(Counter.CLOCK), 0]

    @property
    def next_stamp(self) -> jax.Array:
        """Clock after this call, i32[], the bits of a u32."""
        return jax.lax.bitcast_convert_type(self.now + jnp.uint32(1), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockGroup:
    """What the sequences have in one group of layers: blocks of a pool.

    A table entry that maps no block holds N: too high to be an index, so scatters drop
    it.
    """

    kind = "blocks"
    max_pending = 0

    block_tables: jax.Array  # i32[S, M], block ids of each sequence, N where unmapped
    # i32[S], blocks of each sequence, those reserved and those given back too
    num_mapped_blocks: jax.Array
    reference_counts: jax.Array  # i32[N], table entries that name each block
    free_blocks: Ring  # [N], blocks with reference count 0, oldest first
    window: Window  # how far back the layers see, and what was given back
    # i32[N, T], token ids, if the configuration records them and the group leads.
    tokens: jax.Array | None
    # T, the same in all groups; static, as no shape tells it without tokens.
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, N."""
        return self.reference_counts.shape[0]

    @property
    def max_sequences(self) -> int:
        """Rows of the block tables, S."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M."""
        return self.block_tables.shape[1]

    @property
    def num_kept_blocks(self) -> jax.Array:
        """Blocks of each sequence without those given back, i32[S]."""
        rows = jnp.arange(self.max_sequences, dtype=jnp.int32)
        return self.num_mapped_blocks - self.window.gaps_of(rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """Which sequence has which blocks: what verbs decide on, without the K/V arrays.

    Invariants, by the names `jkv.check` reports; with several groups those of a group
    hold in each:

    1. `reference_counts`: each block's count is the number of table entries naming it.
    2. `partition`: a block is free (count 0) or live; together they are the pool.
    3. `free_blocks`: each free block is in the ring of its class exactly once, nothing
       else is.
    4. `free_sequences`: each closed row is in its ring exactly once, nothing else is.
    5. `private_tail`: a block its sequence may still write to has no second owner.
    6. `mapped_blocks`: ceil(context length / T) <= mapped blocks <= M, those given back
       counted; lengths lie in 0..max_context_length.
    7. `block_tables`: mapped entries are block ids, all others and those given back are
       N, none twice a row.
    8. `closed_rows`: a closed row has length 0 and no blocks.
    9. `shapes`: every array has the shape and dtype that the others imply.
    10. `prefix_index`: an indexed block has all its tokens, stands in a bucket, has no
       equal, and a parent that is indexed, of no lower class, and is not handed out
       before it; with a window it has none. No sequence may write a block while another
       group finds it beside an indexed one.
    11. `committed`: what a sequence committed is a chain of indexed blocks but for what
       was given back, the rest of what it maps is not indexed; 0 <= committed <=
       context length, or -1.
    12. `given_back`: all tokens that the next row of a sequence will see are kept; a
       closed row has given nothing back.
    13. `pending_rows`: of a sequence's tokens 0 to the most that may be are pending.
    14. `snapshots`: a snapshot's length is a multiple of what it must be, its text is
       told up to there, and no other snapshot has the same text.
    """

    sequences: Sequences  # which are open, and how long
    # What they have in each group of the configuration: a `BlockGroup`, or `States`.
    groups: tuple[Any, ...]
    index: NoIndex  # what can be found again: with prefix caching, or nothing
    # Static: what verbs ask, a `jkv.metadata.part.Part` for one group or several.
    parts: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def with_group(self, number: int, group: Any) -> Self:
        """Return the metadata with another group under one number."""
        if group is self.groups[number]:
            return self
        groups = (*self.groups[:number], group, *self.groups[number + 1 :])
        return dataclasses.replace(self, groups=groups)

    def changed(self, number: int, **changes: Any) -> Self:
        """Return the metadata with other values in fields of one group."""
        group = dataclasses.replace(self.groups[number], **changes)
        return self.with_group(number, group)

    def with_sequences(self, **changes: jax.Array | Ring) -> Self:
        """Return the metadata with other values in fields of the sequences."""
        sequences = dataclasses.replace(self.sequences, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(self, sequences=sequences)

    def with_rows(self, row: jax.Array, values: SequenceRow) -> Self:
        """Return the metadata with other rows of sequences, i32[B]; S is dropped."""
        return dataclasses.replace(self, sequences=self.sequences.write(row, values))

    def with_pending(self, row: jax.Array, count: jax.Array | int) -> Self:
        """Note how many tokens of rows, i32[B], are pending; one of S is dropped."""
        pending = self.sequences.num_pending
        if pending is None:
            return self
        pending = scatter(pending, row, jnp.int32(count))
        return self.with_sequences(num_pending=pending)

    @property
    def max_pending(self) -> int:
        """Tokens of a sequence that may be pending, 0 without states."""
        return max(group.max_pending for group in self.groups)

    @property
    def block_numbers(self) -> tuple[int, ...]:
        """The numbers of the groups with blocks."""
        return tuple(i for i, group in enumerate(self.groups) if group.kind == "blocks")

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups with blocks."""
        return tuple(group for group in self.groups if group.kind == "blocks")

    @property
    def has_states(self) -> bool:
        """Whether there are groups with a state, which cannot be cut back at will."""
        return any(group.kind == "states" for group in self.groups)

    @property
    def num_classes(self) -> int:
        """The classes that cached blocks can be of; static."""
        rings = [group.free_blocks for group in self.block_groups]
        return len(rings[0].by_class) if rings else 1

    @property
    def records_tokens(self) -> bool:
        """Whether `append` keeps the tokens that it is told."""
        return self.index.is_there or self.tokens is not None

    @property
    def leader(self) -> int:
        """The number of the group whose blocks the index knows and tokens are in.

        The first that sees everything, or else the one that sees furthest.
        """
        numbers = self.block_numbers
        return numbers[find_leader([self.groups[i].window.length for i in numbers])]

    @property
    def leading(self) -> BlockGroup:
        """The leading group."""
        group: BlockGroup = self.groups[self.leader]
        return group

    @property
    def followers(self) -> tuple[int, ...]:
        """The numbers of the other groups with blocks."""
        return tuple(i for i in self.block_numbers if i != self.leader)

    @property
    def tokens(self) -> jax.Array | None:
        """Recorded token ids, i32[N, T] of the leading group, if they are recorded."""
        return self.leading.tokens if self.block_numbers else None

    @property
    def context_lengths(self) -> jax.Array:
        """Tokens of each sequence, i32[S]."""
        return self.sequences.context_lengths

    @property
    def is_open(self) -> jax.Array:
        """Whether each sequence is open, bool[S]."""
        return self.sequences.is_open

    @property
    def now(self) -> jax.Array:
        """The low word of the clock, u32[]: calls that served a request."""
        return self.sequences.now

    @property
    def refusals(self) -> jax.Array:
        """Refused requests by `Status`, u32[statuses, 2]: low word, high word."""
        return self.sequences.counters[: len(Status)]

    @property
    def block_size(self) -> int:
        """Tokens per block in all groups, T."""
        return self.sequences.block_size

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open at one time, S."""
        return self.sequences.max_sequences

    @property
    def max_context_length(self) -> int:
        """Tokens one sequence can have."""
        return self.sequences.max_context_length

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M."""
        return -(-self.max_context_length // self.block_size)
