"""Sequences, their blocks and their tokens, and the verbs that change them."""

import copy
import dataclasses
from collections import Counter
from typing import Any, NamedTuple

OK, OUT_OF_BLOCKS, OUT_OF_SEQUENCES, CONTEXT_FULL = 0, 1, 2, 3
BATCH_FULL, INVALID_SEQUENCE, INVALID_ARGUMENT = 4, 5, 6
PADDING = -1


@dataclasses.dataclass
class Sequence:
    """An open sequence."""

    table: list[int | None]  # its blocks, None where a window gave one back
    tokens: list[Any]  # its stored tokens
    created: int  # the clock when it was opened
    last_used: int  # and when it was last used
    epoch: int  # and when it was opened or lost tokens
    # For prefix caching: its domain, and how many of its tokens it has made visible,
    # None once its chain has a gap.
    salt: int = 0
    visible: int | None = 0
    # With a sliding window: the blocks it gave back, those behind the sinks'.
    num_gone: int = 0


class Row(NamedTuple):
    """One row of a batch that holds a token: where it is written."""

    seq_id: int
    position: int
    block: int
    offset: int


class Batch(NamedTuple):
    """What `append` promises; a row without a token is None."""

    seq_ids: list[int]
    status: list[int]
    query_starts: list[int]
    query_lengths: list[int]
    context_lengths: list[int]
    rows: list[Row | None]
    epochs: list[int]


class Cache:
    """The cache. Its verbs serve requests one after the other."""

    def __init__(
        self,
        *,
        num_blocks,
        block_size,
        max_sequences,
        max_context_length,
        sliding_window=None,
        num_sink_tokens=0,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.window = sliding_window
        self.num_sinks = self._blocks_for(num_sink_tokens)  # blocks never given back
        self.max_sequences, self.max_context = max_sequences, max_context_length
        self.open: dict[int, Sequence] = {}
        self.free_blocks = list(range(num_blocks))
        self.free_ids = list(range(max_sequences))
        self.refusals: Counter[int] = Counter()
        self.clock = 0

    def allocate(self, num_tokens):
        """Open one sequence per request; returns (seq_ids, status)."""
        self._begin()
        seq_ids, status = [], []
        for count in num_tokens:
            cause = self._why_not_open(count)
            if cause == OK and not self._fits(self._blocks_for(count)):
                cause = OUT_OF_BLOCKS
            seq_id = PADDING
            if cause == OK and count != PADDING:
                seq_id = self._open(self._take(self._blocks_for(count)))
            seq_ids.append(seq_id)
            status.append(cause)
        self._tick(opened=seq_ids)
        return seq_ids, self._count(status)

    def can_allocate(self, num_tokens):
        """What `allocate` would serve, nothing changed."""
        return [cause == OK for cause in self.copy().allocate(num_tokens)[1]]

    def append(self, seq_ids, num_tokens, contents, max_query_length=None):
        """Store contents[row] in each served request's rows; returns a Batch.

        `contents` has one entry per row, so its length is the capacity. With
        `max_query_length` Q, request i owns Q rows from i * Q, else rows are packed.
        """
        self._begin()
        batch = Batch(list(seq_ids), [], [], [], [], [None] * len(contents), [])
        before = {seq_id: len(each.tokens) for seq_id, each in self.open.items()}
        start = 0
        for i, (seq_id, count) in enumerate(zip(seq_ids, num_tokens, strict=True)):
            room = len(contents) - start
            if max_query_length is not None:
                start, room = i * max_query_length, max_query_length
            length = before.get(seq_id, 0)
            mapped = len(self.open[seq_id].table) if seq_id in self.open else 0
            need = self._blocks_for(length + count) - mapped
            if seq_id == PADDING:
                cause = OK
            elif not self._is_first_open(seq_ids, i):
                cause = INVALID_SEQUENCE
            elif count < 0:
                cause = INVALID_ARGUMENT
            elif length + count > self.max_context:
                cause = CONTEXT_FULL
            elif count > 0 and count > room:
                cause = BATCH_FULL
            elif not self._fits(need):
                cause = OUT_OF_BLOCKS
            else:
                cause = OK
            served = count if cause == OK and seq_id != PADDING else 0
            if served:
                self.open[seq_id].table += self._take(need)
            for row in range(start, start + served):
                position = len(self.open[seq_id].tokens)
                batch.rows[row] = Row(seq_id, position, *self.slot(seq_id, position))
                self.open[seq_id].tokens.append(contents[row])
            batch.status.append(cause)
            batch.query_starts.append(start)
            batch.query_lengths.append(served)
            batch.context_lengths.append(length + served)
            batch.epochs.append(self.open[seq_id].epoch if seq_id in self.open else 0)
            start += max(count, 0)
        # What rows see is given back by no request of the call, and what is given back
        # is free for later calls only: it is behind all that was taken.
        for seq_id, served in zip(seq_ids, batch.query_lengths, strict=True):
            if served:
                self._give_back(self.open[seq_id], before[seq_id])
        self._tick(used=served_of(seq_ids, batch.status))
        self._count(batch.status)
        return batch

    def fork(self, seq_ids):
        """Open one child per parent; returns (seq_ids, status)."""
        self._begin()
        parents = dict(self.open)  # A child opened in this call is no parent in it.
        children, status = [], []
        for seq_id in seq_ids:
            parent, child = parents.get(seq_id), PADDING
            if seq_id == PADDING:
                cause = OK
            elif parent is None:
                cause = INVALID_SEQUENCE
            elif not self.free_ids:
                cause = OUT_OF_SEQUENCES
            elif not self._fits(self._tail(parent)):
                cause = OUT_OF_BLOCKS
            else:
                cause = OK
                child = self._open([])
                self._continue(child, parent)
            children.append(child)
            status.append(cause)
        self._tick(opened=children, used=served_of(seq_ids, status))
        return children, self._count(status)

    def free(self, seq_ids):
        """Close sequences; a block comes back with its last reference."""
        status = []
        for i, seq_id in enumerate(seq_ids):
            status.append(self._why_not_first(seq_ids, i))
            if seq_id != PADDING and status[i] == OK:
                self._close(seq_id)
        self.clock += bool(served_of(seq_ids, status))
        return self._count(status)

    def truncate(self, seq_ids, lengths):
        """Drop tokens and every block past the new end; copy a shared new tail."""
        self._begin()
        shared = {b for b in range(self.num_blocks) if self.reference_count(b) > 1}
        status = []
        for i, (seq_id, length) in enumerate(zip(seq_ids, lengths, strict=True)):
            cause = self._why_not_first(seq_ids, i)
            if cause == OK and seq_id != PADDING:
                cause = self._cut(self.open[seq_id], length, shared)
            status.append(cause)
        self._tick(used=served_of(seq_ids, status))
        return self._count(status)

    def reorder(self, seq_ids, parents):
        """Sequence i continues from what parent i was before the call."""
        status = []
        for i, (seq_id, parent) in enumerate(zip(seq_ids, parents, strict=True)):
            cause = self._why_not_first(seq_ids, i)
            if seq_id != PADDING and parent not in self.open:
                cause = INVALID_SEQUENCE
            status.append(cause)
        # Who moves, in order: a sequence that is its own parent stays as it is.
        before = copy.deepcopy(self.open)
        moves = [
            (i, seq_id, before[parent])
            for i, (seq_id, parent) in enumerate(zip(seq_ids, parents, strict=True))
            if seq_id != PADDING and status[i] == OK and seq_id != parent
        ]
        # Moves that need no block are served. Of those that need one, as many as fit,
        # the first ones: they may also take what the served sequences give up.
        needy = [move for move in moves if self._tail(move[2])]
        for num_served in range(len(needy), -1, -1):
            refused = needy[num_served:]
            served = [move for move in moves if move not in refused]
            tables = {seq_id: each.table for seq_id, each in self.open.items()}
            tables |= {
                seq_id: self._full_blocks(parent) for _, seq_id, parent in served
            }
            kept = {block for table in tables.values() for block in table} - {None}
            if num_served <= self.num_blocks - len(kept):
                break
        for i, _, _ in refused:
            status[i] = OUT_OF_BLOCKS
        # One step for all: drop what nobody keeps, then share, then take the new tails.
        for _, seq_id, _ in served:
            self._shrink(self.open[seq_id], 0, kept)
        for _, seq_id, parent in served:
            self.open[seq_id].table = self._full_blocks(parent)
        for _, seq_id, parent in served:
            self._continue(seq_id, parent)
            self.open[seq_id].epoch = self.clock + 1
        self._tick(used=[seq_id for _, seq_id, _ in served])
        return self._count(status)

    def copy(self):
        """Return the cache as it is now, as a saved one is."""
        return copy.deepcopy(self)

    # Looking things up.

    def table(self, seq_id):
        """The blocks of a sequence, none if it is not open."""
        return self.open[seq_id].table if seq_id in self.open else []

    def tokens(self, seq_id):
        """The stored tokens of a sequence, none if it is not open."""
        return self.open[seq_id].tokens if seq_id in self.open else []

    def is_kept(self, seq_id, position):
        """Whether a token of an open sequence has not been given back."""
        return self.table(seq_id)[position // self.block_size] is not None

    def kept_from(self, seq_id):
        """The first position that is kept, but for the sinks; 0 if nothing is gone."""
        gone = self.open[seq_id].num_gone if seq_id in self.open else 0
        return (self.num_sinks + gone) * self.block_size if gone else 0

    def reference_count(self, block):
        return sum(each.table.count(block) for each in self.open.values())

    def slot(self, seq_id, position):
        """(block, offset) of a position, None where no block is mapped."""
        table = self.table(seq_id)
        if not 0 <= position < len(table) * self.block_size:
            return None
        if not self.is_kept(seq_id, position):
            return None
        return table[position // self.block_size], position % self.block_size

    def check(self):
        """The oracle's own sanity: every block and every id is somewhere once."""
        live = {block for each in self.open.values() for block in held(each)}
        assert sorted([*self.free_blocks, *live]) == list(range(self.num_blocks))
        assert sorted([*self.free_ids, *self.open]) == list(range(self.max_sequences))
        for each in self.open.values():
            assert self._blocks_for(len(each.tokens)) <= len(each.table)
            assert self._can_go_on(each, len(each.tokens))
            gone = range(self.num_sinks, self.num_sinks + each.num_gone)
            for column, block in enumerate(each.table):
                assert (block is None) == (column in gone)
            owned = each.table[len(each.tokens) // self.block_size :]
            assert all(self.reference_count(block) == 1 for block in owned)

    # What an index of prefixes changes.

    def _forget(self, blocks):
        """What these blocks held is found no more."""

    def _forget_from(self, block):
        """Nor is what this block held, or what followed it."""

    # Why a request is refused.

    def _why_not_open(self, count):
        if count == PADDING:
            return OK
        if count < 0:
            return INVALID_ARGUMENT
        if count > self.max_context:
            return CONTEXT_FULL
        return OK if self.free_ids else OUT_OF_SEQUENCES

    def _why_not_first(self, seq_ids, i):
        known = seq_ids[i] == PADDING or self._is_first_open(seq_ids, i)
        return OK if known else INVALID_SEQUENCE

    def _is_first_open(self, seq_ids, i):
        return seq_ids[i] in self.open and seq_ids[i] not in seq_ids[:i]

    def _begin(self):
        """A call is judged by the blocks free before it."""
        self.available, self.is_shut = len(self.free_blocks), False

    def _fits(self, need):
        """Whether a request gets its blocks; one that does not shuts the rest out."""
        if need > 0:
            self.is_shut = self.is_shut or need > self.available
            self.available -= 0 if self.is_shut else need
        return need <= 0 or not self.is_shut

    # What becomes of one that is served.

    def _open(self, table):
        seq_id = self.free_ids.pop(0)
        self.open[seq_id] = Sequence(table, [], 0, 0, 0)
        return seq_id

    def _close(self, seq_id):
        self._shrink(self.open[seq_id], 0)
        del self.open[seq_id]
        self.free_ids.append(seq_id)

    def _continue(self, seq_id, parent):
        """Take over a past: share its full blocks, and own a copy of its tail."""
        mine = self.open[seq_id]
        mine.table = self._full_blocks(parent) + self._take(self._tail(parent))
        mine.tokens, mine.num_gone = list(parent.tokens), parent.num_gone
        mine.visible, mine.salt = parent.visible, parent.salt

    def _cut(self, mine, length, shared):
        """Cut a sequence back; returns the cause where that cannot be."""
        if not 0 <= length <= len(mine.tokens) or not self._can_go_on(mine, length):
            return INVALID_ARGUMENT
        # A writer owns its tail, so one that was shared before the call is copied.
        full, blocks = length // self.block_size, self._blocks_for(length)
        is_copied = blocks > full and mine.table[full] in shared
        if not self._fits(int(is_copied)):
            return OUT_OF_BLOCKS
        if blocks > full and not is_copied:
            self._forget_from(mine.table[full])
        self._shrink(mine, full if is_copied else blocks)
        mine.num_gone = mine.num_gone if length else 0
        mine.table += self._take(int(is_copied))
        del mine.tokens[length:]
        if mine.visible is not None or length == 0:
            mine.visible = min(mine.visible or 0, length)
        mine.epoch = self.clock + 1
        return OK

    def _give_back(self, mine, length):
        """Give back what no row from this length on sees, the last block first."""
        if self.window is None:
            return
        seen_from = max(length - self.window + 1, 0)
        gone = max(seen_from // self.block_size - self.num_sinks, mine.num_gone)
        for column in reversed(range(mine.num_gone, gone)):
            block = mine.table[self.num_sinks + column]
            mine.table[self.num_sinks + column] = None
            if self.reference_count(block) == 0:
                self.free_blocks.append(block)
        mine.num_gone = gone

    def _can_go_on(self, mine, length):
        """Whether all that a row at this position sees is kept; at 0 it sees none."""
        if self.window is None or length == 0 or mine.num_gone == 0:
            return True
        kept_from = (self.num_sinks + mine.num_gone) * self.block_size
        return kept_from <= length - self.window + 1

    def _take(self, count):
        """Take the blocks that have been free longest."""
        taken = self.free_blocks[: max(count, 0)]
        del self.free_blocks[: len(taken)]
        self._forget(taken)
        return taken

    def _shrink(self, mine, count, kept=()):
        """Drop blocks from the end; one is free when nobody names it any more."""
        while len(mine.table) > count:
            block = mine.table.pop()
            if (
                block is not None
                and self.reference_count(block) == 0
                and block not in kept
            ):
                self.free_blocks.append(block)

    def _blocks_for(self, length):
        return -(-length // self.block_size)

    def _tail(self, sequence):
        """How many blocks of a sequence are partly filled: one or none."""
        return int(len(sequence.tokens) % self.block_size != 0)

    def _full_blocks(self, sequence):
        return sequence.table[: len(sequence.tokens) // self.block_size]

    def _tick(self, opened=(), used=()):
        """Time goes on with each call that serves somebody."""
        opened = [seq_id for seq_id in opened if seq_id != PADDING]
        self.clock += bool(opened) or bool(used)
        for seq_id in opened:
            each = self.open[seq_id]
            each.created = each.epoch = self.clock
        for seq_id in [*opened, *used]:
            self.open[seq_id].last_used = self.clock

    def _count(self, status):
        self.refusals.update(cause for cause in status if cause != OK)
        return status


def held(sequence):
    """The blocks that a sequence has."""
    return [block for block in sequence.table if block is not None]


def served_of(seq_ids, status):
    """The sequences that a call served."""
    pairs = zip(seq_ids, status, strict=True)
    return [seq_id for seq_id, cause in pairs if seq_id != PADDING and cause == OK]
