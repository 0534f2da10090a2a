"""Metadata: small integers that assign blocks to sequences, as pytrees.

`Sequences` hold the open sequences and their lengths, once for all groups of layers;
each `BlockGroup` holds the blocks of all sequences in its pool, and a `Ring` the free
ids of either; `jkv.metadata` operates on them.

A *slot* is a token's index among the cached tokens of its sequence, and a *position*
its index in the sequence. `prune` drops tokens and packs the others, so that the next
token has a slot below its position. The difference is the same for all later tokens:
one number per sequence (`Pruned`), which verbs that change lengths need not update.

Symbols in shape comments: G groups, L layers, N blocks in the pool of a group, K kv
heads, T tokens per block, D (Dv) key (value) head dim, S sequences, M blocks per
sequence, B requests in a call, R token rows in a batch.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import find_leader
from jkv.operations import gather, scatter
from jkv.state.index import NoIndex
from jkv.state.observed import Observing
from jkv.state.windows import Window
from jkv.status import Counter, Status


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """FIFO of free ids: entry `i` from the head is `ids[(head + i) % len(ids)]`.

    The ring has room for all ids, so a push cannot overflow. Outside the `span` entries
    from the head on it is stale. Every entry in the span is a free id, unless ids may
    leave the middle, as cached blocks do on a prefix cache hit: then `indices`
    distinguishes entries from holes, and the ring has room for as many holes as ids.

    The ring counts the ids that leave it, in 64 bits. With several classes it holds
    class 0, and `kept` has a ring for each other class.
    """

    ids: jax.Array  # i32[C]; C is the number of ids, twice that with `indices`
    bounds: jax.Array  # i32[8], named by `NUMBERS`
    # i32[N], index in `ids` of each free id, -1 if not free; None: no holes.
    indices: jax.Array | None
    kept: "Kept | None" = None  # None: a single class

    @property
    def head(self) -> jax.Array:
        """Index of the next entry to leave, i32[]."""
        return self.bounds[0]

    @property
    def by_class(self) -> tuple["Ring", ...]:
        """The rings of all classes, lowest first."""
        if self.kept is None:
            return (self,)
        return dataclasses.replace(self, kept=None), *self.kept.rings

    @property
    def span(self) -> jax.Array:
        """Entries from head to tail, holes included, i32[]; of all classes."""
        return _sum([each.bounds[1] for each in self.by_class])

    @property
    def count(self) -> jax.Array:
        """Number of ids in the ring, i32[]; of all classes."""
        return _sum([each.bounds[2] for each in self.by_class])

    @property
    def fewest(self) -> jax.Array:
        """Lowest count so far, i32[]."""
        return self.bounds[3]

    @property
    def num_taken(self) -> jax.Array:
        """Number of ids taken so far, u32[2]: low word, high word."""
        return jax.lax.bitcast_convert_type(self.bounds[4:6], jnp.uint32)

    @property
    def num_forgotten(self) -> jax.Array:
        """Number of ids evicted from the index so far, u32[2]: low word, high word."""
        return jax.lax.bitcast_convert_type(self.bounds[6:8], jnp.uint32)

    def changed(
        self, *, ids: jax.Array | None = None, indices: jax.Array | None = None
    ) -> Self:
        """Return the ring with other ids, i32[C], or indices, i32[N]."""
        return dataclasses.replace(
            self,
            ids=self.ids if ids is None else ids,
            indices=self.indices if indices is None else indices,
        )

    def added(
        self, num: jax.Array, *, fewest: jax.Array | None = None, **signs: int
    ) -> Self:
        """Add `num`, i32[], times a sign to numbers by name.

        The head wraps around, and 64-bit sums carry. `fewest`, i32[], is a count that
        the lowest one becomes if it is lower.
        """
        steps = np.zeros(len(NUMBERS), np.int32)
        for name, sign in signs.items():
            steps[NUMBERS.index(name)] = sign
        bounds = self.bounds + num * steps
        if "head" in signs:
            is_past = bounds >= np.int32(self.ids.shape[0])
            wrapped = bounds - np.int32(self.ids.shape[0])
            bounds = jnp.where(is_past & _NUMBER["head"], wrapped, bounds)
        for name in {"taken", "forgotten"} & {*signs}:
            high = NUMBERS.index(f"{name}, high")
            word, more = (
                jax.lax.bitcast_convert_type(number, jnp.uint32)
                for number in (self.bounds[high - 1], jnp.int32(num) * signs[name])
            )
            carry = (word + more < word).astype(jnp.int32)
            bounds = bounds + jnp.where(np.arange(len(NUMBERS)) == high, carry, 0)
        if fewest is not None:
            most = jnp.where(_NUMBER["fewest"], fewest, _NO_LIMIT)
            bounds = jnp.minimum(bounds, most)
        return dataclasses.replace(self, bounds=bounds)

    def with_numbers(self, **numbers: jax.Array) -> Self:
        """Return the ring with other numbers, i32[] each, by name."""
        bounds = self.bounds
        for name, number in numbers.items():
            bounds = jnp.where(_NUMBER[name], number, bounds)
        return dataclasses.replace(self, bounds=bounds)

    def joined(self, rings: Sequence["Ring"], **of_kept: jax.Array) -> "Ring":
        """Return the ring with other rings by class and other fields of `kept`."""
        if self.kept is None:
            return rings[0]
        kept = dataclasses.replace(self.kept, rings=(*rings[1:],), **of_kept)
        return dataclasses.replace(rings[0], kept=kept)

    def with_account_of(self, other: Self) -> Self:
        """Copy the counters of another ring."""
        bounds = jnp.concatenate([self.bounds[:3], other.bounds[3:]])
        return dataclasses.replace(self, bounds=bounds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """The ids of classes above 0, which leave after all lower classes."""

    rings: tuple[Ring, ...]  # of class 1, 2, ...; their counters are unused
    classes: jax.Array  # i32[N], of each id, free or not
    kept_until: jax.Array  # u32[N], tick up to which the class holds
    entered: jax.Array  # u32[N], running count of entries at each entry
    num_entered: jax.Array  # u32[], total of ids entered


# Names of the bounds; 64-bit sums have a high word after the low one.
NUMBERS = (
    *("head", "span", "count", "fewest"),
    *("taken", "taken, high", "forgotten", "forgotten, high"),
)
_NUMBER = {name: np.arange(len(NUMBERS)) == i for i, name in enumerate(NUMBERS)}
_NO_LIMIT = np.int32(np.iinfo(np.int32).max)


def _sum(counts: list[jax.Array]) -> jax.Array:
    """Return the sum of one or more counts, i32[]."""
    return functools.reduce(operator.add, counts)


NO_SEQUENCE = -1  # a `seq_id` that marks padding


class SequenceRow(NamedTuple):
    """Numbers of a sequence that are read and written together, i32[...] each.

    Stamps and counts are the bits of u32.
    """

    context_length: jax.Array | int  # tokens
    is_open: jax.Array | int  # 1 if opened by allocate or fork and not freed, else 0
    created: jax.Array | int  # tick of the opening
    last_used: jax.Array | int  # tick of the last append, fork or touch
    num_uses: jax.Array | int  # uses since the opening


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unpruned:
    """Sequences with all their tokens: a token's position is its slot.

    There are no arrays, and methods return their arguments, so that a program gets no
    operations.
    """

    is_there = False  # static: True if sequences can be pruned

    def positions_of(self, _seq_ids: jax.Array, slots: jax.Array) -> jax.Array:
        """Return the positions of tokens after the kept ones, i32[...]: their slots."""
        return slots

    def is_pruned(self, seq_ids: jax.Array) -> np.ndarray:
        """Return False: no sequence was pruned."""
        return np.zeros(seq_ids.shape, bool)

    def unpruned(self, rows: jax.Array) -> jax.Array:
        """Return the rows of sequences that were not pruned, i32[...]: all."""
        return rows

    def leave(self, _seq_ids: jax.Array) -> None:
        """Return None: there are no numbers to swap out."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """Sequences that `prune` may have shortened."""

    is_there = True

    # i32[S], dropped tokens: positions after the last prune minus slots.
    num_dropped: jax.Array
    # i32[S], tokens kept by the last prune, which a truncation may not cut.
    num_left: jax.Array

    def positions_of(self, seq_ids: jax.Array, slots: jax.Array) -> jax.Array:
        """Return the positions of tokens after the kept ones, i32[...]; slots of S."""
        return slots + gather(self.num_dropped, seq_ids, fill=0)

    def is_pruned(self, seq_ids: jax.Array) -> jax.Array:
        """Return True for sequences that were pruned, bool[...]."""
        dropped, left = self.leave(seq_ids)
        return (dropped > 0) | (left > 0)

    def unpruned(self, rows: jax.Array) -> jax.Array:
        """Return the rows of sequences that were not pruned, i32[...], else S."""
        return jnp.where(self.is_pruned(rows), self.num_left.shape[0], rows)

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of swapped-out sequences, i32[B] each."""
        return gather(self.num_dropped, seq_ids), gather(self.num_left, seq_ids)

    def with_rows(
        self, row: jax.Array, num_dropped: jax.Array | int, num_left: jax.Array | int
    ) -> Self:
        """Replace distinct rows, i32[B]; rows >= S are dropped."""
        return dataclasses.replace(
            self,
            num_dropped=scatter(self.num_dropped, row, num_dropped),
            num_left=scatter(self.num_left, row, num_left),
        )


Pruning: TypeAlias = Unpruned | Pruned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """The open sequences, their lengths and their use.

    A context length counts all appended tokens.
    """

    rows: jax.Array  # i32[S, 5], the columns of `SequenceRow`
    free_rows: Ring  # [S], closed rows, oldest first
    counters: jax.Array  # u32[counters, 2], `Counter` rows: low word, high word
    # i32[S], newest tokens of each sequence not yet in the state, which can be rolled
    # back; None without pending tokens.
    num_pending: jax.Array | None
    pruned: Pruning  # tokens dropped by `prune`, or none
    # Maximum tokens of a sequence; static, as it need not be a multiple of T.
    max_context_length: int = dataclasses.field(metadata={"static": True})
    # T of all groups; static, as there may be no group with blocks.
    block_size: int = dataclasses.field(metadata={"static": True})

    def pending_of(self, seq_ids: jax.Array) -> jax.Array:
        """Return the pending tokens of sequences, i32[B]."""
        if self.num_pending is None:
            return jnp.zeros(seq_ids.shape, jnp.int32)
        return gather(self.num_pending, seq_ids)

    def read(self, seq_ids: jax.Array) -> "SequenceRow":
        """Return the rows of sequences, i32[...]; ids out of range are clamped."""
        rows = gather(self.rows, seq_ids)
        return SequenceRow(*(rows[..., i] for i in range(rows.shape[-1])))

    def write(self, row: jax.Array, values: "SequenceRow") -> Self:
        """Replace distinct rows, i32[B]; rows >= S are dropped."""
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
        """Tick of each sequence's opening, u32[S]."""
        return jax.lax.bitcast_convert_type(self._column("created"), jnp.uint32)

    @property
    def last_used(self) -> jax.Array:
        """Tick of each sequence's last append, fork or touch, u32[S]."""
        return jax.lax.bitcast_convert_type(self._column("last_used"), jnp.uint32)

    @property
    def num_uses(self) -> jax.Array:
        """Uses of each sequence since its opening, u32[S]."""
        return jax.lax.bitcast_convert_type(self._column("num_uses"), jnp.uint32)

    def _column(self, name: str) -> jax.Array:
        # With a pool for each rank the rows have a leading axis.
        return self.rows[..., SequenceRow._fields.index(name)]

    @property
    def max_sequences(self) -> int:
        """Maximum number of open sequences, S."""
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
    """Blocks of the sequences in one group of layers.

    Unmapped table entries hold N: out of range, so scatters drop them.
    """

    kind = "blocks"
    max_pending = 0

    block_tables: jax.Array  # i32[S, M], block ids of each sequence, N where unmapped
    # i32[S], mapped columns of each sequence, reserved and released ones included
    num_mapped_blocks: jax.Array
    reference_counts: jax.Array  # i32[N], number of table entries of each block
    free_blocks: Ring  # [N], blocks with reference count 0, in LRU order
    window: Window  # window size of the layers, and released columns
    observed: Observing  # newest queries of each sequence, or none
    # i32[N, T], token ids if recorded, in the leading group; else None.
    tokens: jax.Array | None
    # T, the same in all groups; static, as no shape implies it without tokens.
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, N."""
        return self.reference_counts.shape[0]

    @property
    def max_sequences(self) -> int:
        """Number of rows of the block tables, S."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_sequence(self) -> int:
        """Number of columns of the block tables, M."""
        return self.block_tables.shape[1]

    @property
    def num_kept_blocks(self) -> jax.Array:
        """Mapped blocks of each sequence without released ones, i32[S]."""
        rows = jnp.arange(self.max_sequences, dtype=jnp.int32)
        return self.num_mapped_blocks - self.window.gaps_of(rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """Assignment of blocks to sequences: the input of all verbs, without K/V arrays.

    Invariants, by the names that `jkv.check` reports; with several groups, each holds
    in every group:

    1. `reference_counts`: a block's count is the number of its table entries.
    2. `partition`: a block is free (count 0) or live; together they are the pool.
    3. `free_blocks`: each free block is in the ring of its class exactly once, nothing
      else is.
    4. `free_sequences`: each closed row is in its ring exactly once, nothing else is.
    5. `private_tail`: a block that its sequence may write has a reference count of 1.
    6. `mapped_blocks`: ceil(context length / T) <= mapped blocks <= M, released ones
      included; lengths lie in 0..max_context_length. 7. `block_tables`: mapped entries
    are block ids, unmapped and released ones are N, and
      no block is twice in a row. 8. `closed_rows`: a closed row has length 0 and no
    blocks. 9. `shapes`: every array has the shape and dtype that the others imply. 10.
    `prefix_index`: an indexed block has all its tokens, is in a bucket, has no equal,
      and an indexed parent of no lower class that is not evicted before it; with a
      window it has no parent. No sequence may write a block that another group finds
      with an indexed one.
    11. `committed`: the committed blocks of a sequence are a chain of indexed blocks
      except for released ones, its other blocks are not indexed; 0 <= committed <=
      context length, or -1. Of a pruned sequence only leading blocks are indexed.
    12. `released`: all tokens in the window of a sequence's next row are cached; a
      closed row has released nothing.
    13. `pending_rows`: 0 to `max_pending` tokens of a sequence are pending. 14.
    `snapshots`: a snapshot's length is a multiple of `snapshot_every`, its tokens are
      recorded up to there, and no other snapshot has the same tokens.
    15. `pruned`: 0 <= tokens kept by the last prune <= context length; nothing was
      dropped from a closed row.
    """

    sequences: Sequences  # the open sequences and their lengths
    # By group of the configuration: a `BlockGroup`, or `States`.
    groups: tuple[Any, ...]
    index: NoIndex  # the prefix index, or none
    # Static: the interface of verbs, a `jkv.metadata.part.Part` for one or more groups.
    parts: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def with_group(self, number: int, group: Any) -> Self:
        """Return the metadata with another group at an index."""
        if group is self.groups[number]:
            return self
        groups = (*self.groups[:number], group, *self.groups[number + 1 :])
        return dataclasses.replace(self, groups=groups)

    def changed(self, number: int, **changes: Any) -> Self:
        """Return the metadata with other fields of one group."""
        group = dataclasses.replace(self.groups[number], **changes)
        return self.with_group(number, group)

    def with_sequences(self, **changes: jax.Array | Ring) -> Self:
        """Return the metadata with other fields of the sequences."""
        sequences = dataclasses.replace(self.sequences, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(self, sequences=sequences)

    def with_rows(self, row: jax.Array, values: SequenceRow) -> Self:
        """Return the metadata with other rows of sequences, i32[B]; S is dropped."""
        return dataclasses.replace(self, sequences=self.sequences.write(row, values))

    def with_pruned(self, pruned: Pruning) -> Self:
        """Return the metadata with other dropped tokens of sequences."""
        if pruned is self.sequences.pruned:
            return self
        sequences = dataclasses.replace(self.sequences, pruned=pruned)
        return dataclasses.replace(self, sequences=sequences)

    def with_pending(self, row: jax.Array, count: jax.Array | int) -> Self:
        """Set the pending tokens of rows, i32[B]; S is dropped."""
        pending = self.sequences.num_pending
        if pending is None:
            return self
        pending = scatter(pending, row, jnp.int32(count))
        return self.with_sequences(num_pending=pending)

    @property
    def max_pending(self) -> int:
        """Maximum number of pending tokens of a sequence, 0 without states."""
        return max(group.max_pending for group in self.groups)

    @property
    def block_numbers(self) -> tuple[int, ...]:
        """Indices of the groups with blocks."""
        return self._numbers_of("blocks")

    @property
    def state_numbers(self) -> tuple[int, ...]:
        """Indices of the groups with a recurrent state."""
        return self._numbers_of("states")

    def _numbers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, group in enumerate(self.groups) if group.kind == kind)

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups with blocks."""
        return tuple(self.groups[number] for number in self.block_numbers)

    @property
    def has_states(self) -> bool:
        """True if there are recurrent-state layers, which limit truncation."""
        return bool(self.state_numbers)

    @property
    def num_classes(self) -> int:
        """Number of retention classes of cached blocks; static."""
        rings = [group.free_blocks for group in self.block_groups]
        return len(rings[0].by_class) if rings else 1

    @property
    def records_tokens(self) -> bool:
        """True if `append` stores token ids."""
        return self.index.is_there or self.tokens is not None

    @property
    def leader(self) -> int:
        """Index of the group whose blocks are in the prefix index and hold the tokens.

        The first with full attention, or the one with the largest window.
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
        """Indices of the other groups with blocks."""
        return tuple(i for i in self.block_numbers if i != self.leader)

    @property
    def tokens(self) -> jax.Array | None:
        """Recorded token ids of the leading group, i32[N, T], or None."""
        return self.leading.tokens if self.block_numbers else None

    @property
    def context_lengths(self) -> jax.Array:
        """Tokens of each sequence, i32[S]."""
        return self.sequences.context_lengths

    @property
    def is_open(self) -> jax.Array:
        """True for open sequences, bool[S]."""
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
        """Maximum number of open sequences, S."""
        return self.sequences.max_sequences

    @property
    def max_context_length(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.sequences.max_context_length

    @property
    def max_blocks_per_sequence(self) -> int:
        """Number of columns of the block tables, M."""
        return -(-self.max_context_length // self.block_size)
