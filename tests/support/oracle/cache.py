"""Sequences, their tokens and blocks, and the verbs that change them."""

import copy
import dataclasses
from collections import Counter
from typing import Any, NamedTuple

from support.oracle.groups import Group, held

OK, OUT_OF_BLOCKS, OUT_OF_SEQUENCES, CONTEXT_FULL = 0, 1, 2, 3
BATCH_FULL, INVALID_SEQUENCE, INVALID_ARGUMENT = 4, 5, 6
PADDING = -1


@dataclasses.dataclass
class Sequence:
    """An open sequence."""

    # Blocks by group, None if a window released one.
    tables: list[list[int | None]]
    tokens: list[Any] = dataclasses.field(default_factory=list)  # stored tokens
    created: int = 0  # clock at opening
    last_used: int = 0  # clock at the last use
    epoch: int = 0  # clock at opening or at the last loss of tokens
    # Prefix caching: the salt, and the number of visible tokens, None once the chain
    # has a gap.
    salt: int = 0
    visible: int | None = 0
    # Recurrent layers: the state's token count, and the input tokens, -1 if unknown to
    # this cache.
    base: int = 0
    written: list[Any] = dataclasses.field(default_factory=list)
    # Pruning: all tokens, dropped ones included; the slots after the last prune; their
    # tokens by layer and head.
    past: list[Any] = dataclasses.field(default_factory=list)
    left: int = 0
    kept: dict[tuple[int, int], list[Any]] = dataclasses.field(default_factory=dict)
    # Overwritten contents by (layer, slot).
    patches: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)

    def restart(self):
        """Reset a sequence that was truncated to length 0."""
        self.past, self.left, self.kept, self.patches = [], 0, {}, {}

    @property
    def dropped(self):
        return len(self.past) - len(self.tokens)

    @property
    def is_pruned(self):
        return self.dropped > 0 or self.left > 0


def cut_patches(patches, length):
    """Return the overwritten contents of the first slots."""
    return {place: each for place, each in patches.items() if place[1] < length}


class StateRules(NamedTuple):
    """Limits of recurrent layers."""

    max_pending: int = 0  # tokens that can be rolled back
    num_snapshots: int = 0
    snapshot_every: int = 0


class Row(NamedTuple):
    """Location of one row of a batch that holds a token."""

    seq_id: int
    position: int
    blocks: list[int]  # by group
    offset: int
    slot: int


class Batch(NamedTuple):
    """The results of `append`; a row without a token is None."""

    seq_ids: list[int]
    status: list[int]
    query_starts: list[int]
    query_lengths: list[int]
    context_lengths: list[int]
    rows: list[Row | None]
    epochs: list[int]
    pending_before: list[int]
    pending_after: list[int]


class Cache:
    """The cache; its verbs serve requests one after another, in all groups."""

    def __init__(
        self, groups, *, block_size, max_sequences, max_context_length, states=None
    ):
        """Take (blocks, window or None, sink tokens) of each group."""
        self.states: StateRules | None = states
        # Token count of each snapshot's state by (salt, tokens), least recently used
        # first.
        self.snapshots: dict[tuple[int, tuple[Any, ...]], int] = {}
        self.groups = [Group(size, block_size, *window) for size, *window in groups]
        self.block_size, self.max_context = block_size, max_context_length
        self.max_sequences = max_sequences
        self.open: dict[int, Sequence] = {}
        self.free_ids = list(range(max_sequences))
        self.refusals: Counter[int] = Counter()
        self.clock = 0
        self.num_classes = 1
        self.pruning = False
        # The block of each group, or None, by (salt, tokens up to the block's end). The
        # leading group always has one: the first without a window, or the widest.
        self.index: dict[tuple[int, tuple[Any, ...]], list[int | None]] = {}
        windows = [group.window or float("inf") for group in self.groups]
        self.leader = windows.index(max(windows)) if windows else 0

    def append(
        self, seq_ids, num_tokens, contents, max_query_length=None, num_pending=None
    ):
        """Store contents[row] in each served request's rows; return a Batch.

        `contents` has one entry per row, so its length is the capacity. With
        `max_query_length` Q, request i owns Q rows from i * Q; else rows are packed.
        """
        self._begin()
        batch = Batch(list(seq_ids), [], [], [], [], [None] * len(contents), [], [], [])
        most = self.states.max_pending if self.states else 0
        if not (most and num_pending):
            num_pending = [min(max(count, 0), most) for count in num_tokens]
        before = {seq_id: len(each.tokens) for seq_id, each in self.open.items()}
        pending = {i: len(each.tokens) - each.base for i, each in self.open.items()}
        start, grows = 0, []
        for i, (seq_id, count) in enumerate(zip(seq_ids, num_tokens, strict=True)):
            room = len(contents) - start
            if max_query_length is not None:
                start, room = i * max_query_length, max_query_length
            mine, length = self.open.get(seq_id), before.get(seq_id, 0)
            cause, needs = self._why_not_first(seq_ids, i), []
            if cause == OK and mine:
                blocks = self._blocks_for(length + count)
                needs = [blocks - len(table) for table in mine.tables]
                if count < 0 or not 0 <= num_pending[i] <= most:
                    cause = INVALID_ARGUMENT
                elif length + count > self.max_context:
                    cause = CONTEXT_FULL
                elif count > 0 and count > room:
                    cause = BATCH_FULL
                elif not self._fits(needs):
                    cause = OUT_OF_BLOCKS
            served = count if cause == OK and mine else 0
            if served:
                grows.append((seq_id, needs, range(start, start + served)))
            batch.status.append(cause)
            batch.query_starts.append(start)
            batch.query_lengths.append(served)
            batch.context_lengths.append(length + served)
            batch.epochs.append(mine.epoch if mine else 0)
            batch.pending_before.append(pending.get(seq_id, 0))
            batch.pending_after.append(pending.get(seq_id, 0))
            if served:
                known = pending[seq_id] + served
                batch.pending_after[-1] = min(num_pending[i], known)
                mine.base = length + served - batch.pending_after[-1]
            start += max(count, 0)
        # Release unneeded blocks first, at the end of their class.
        for seq_id, _, _ in grows:
            for g, group in enumerate(self.groups):
                table = self.open[seq_id].tables[g]
                for column in group.gone(before[seq_id]):
                    block, table[column] = table[column], None
                    self._drop(g, block)
        for seq_id, needs, rows in grows:
            mine = self.open[seq_id]
            self._extend(mine, needs)
            for row in rows:
                column, offset = divmod(len(mine.tokens), self.block_size)
                blocks = [table[column] for table in mine.tables]
                slot, position = len(mine.tokens), len(mine.past)
                batch.rows[row] = Row(seq_id, position, blocks, offset, slot)
                mine.tokens.append(contents[row])
                mine.written.append(-1 if mine.is_pruned else contents[row])
                mine.past.append(contents[row])
        self._settle(batch.status, used=self._served(seq_ids, batch.status))
        return batch

    def fork(self, seq_ids, lengths=None):
        """Open one child per parent, with all its tokens or a prefix."""
        self._begin()
        parents = dict(self.open)  # A child of this call is not a parent in it.
        children, status = [], []
        for i, seq_id in enumerate(seq_ids):
            cause, child, parent = OK, PADDING, parents.get(seq_id)
            if parent is not None:
                length = lengths[i] if lengths else len(parent.tokens)
                if not self._can_go_on(parent, length):
                    cause = INVALID_ARGUMENT
                elif not self.free_ids:
                    cause = OUT_OF_SEQUENCES
                elif not self._fits(self._tails(length)):
                    cause = OUT_OF_BLOCKS
                else:
                    child = self._open()
                    past = self._past(parent, length)
                    if lengths and length == 0:
                        past.restart()
                    self._continue(self.open[child], past)
            elif seq_id != PADDING:
                cause = INVALID_SEQUENCE
            children.append(child)
            status.append(cause)
        used = self._served(seq_ids, status)
        return children, self._settle(status, used=used, opened=children)

    def free(self, seq_ids, keep=None, until=None):
        """Close sequences; a block is freed with its last reference.

        Cached blocks are kept with priorities and deadlines.
        """
        keep = keep or [0] * len(seq_ids)
        until = until or [self.clock + 1] * len(seq_ids)
        status = [self._why_not_first(seq_ids, i) for i in range(len(seq_ids))]
        for i, each in enumerate(keep):
            if status[i] == OK != seq_ids[i] + 1 and not 0 <= each < self.num_classes:
                status[i] = INVALID_ARGUMENT
        closed = self._served(seq_ids, status)
        for i, seq_id in enumerate(seq_ids):
            if seq_id in closed and status[i] == OK:
                for g, table in enumerate(self.open[seq_id].tables):
                    for block in {*held(table)} & {*self.known(g)}:
                        self.groups[g].keep(block, keep[i], until[i])
        for seq_id in closed:
            self._close(seq_id)
        return self._settle(status, used=closed)

    def truncate(self, seq_ids, lengths):
        """Drop tokens and every block past the new end; copy a shared new tail."""
        self._begin()
        before = copy.deepcopy(self)
        status = []
        for i, (seq_id, length) in enumerate(zip(seq_ids, lengths, strict=True)):
            cause = self._why_not_first(seq_ids, i)
            if cause == OK and seq_id != PADDING:
                cause = self._cut(self.open[seq_id], length, before)
            status.append(cause)
        return self._settle(status, used=self._served(seq_ids, status))

    def reorder(self, seq_ids, parents):
        """Continue sequence i from parent i's tokens before the call."""
        status, moves = [], []
        for i, (seq_id, parent) in enumerate(zip(seq_ids, parents, strict=True)):
            cause = self._why_not_first(seq_ids, i)
            if seq_id != PADDING and parent not in self.open:
                cause = INVALID_SEQUENCE
            # A sequence that is its own parent does not change.
            if cause == OK and seq_id not in (PADDING, parent):
                past = self.open[parent]
                moves.append((i, seq_id, self._past(past, len(past.tokens))))
            status.append(cause)
        # Moves without a new block are served. Of the others, as many as fit, in order:
        # they may also take blocks that the served sequences release.
        needy = [move for move in moves if any(self._tails(len(move[2].tokens)))]
        for num_served in range(len(needy), -1, -1):
            refused = needy[num_served:]
            served = [move for move in moves if move not in refused]
            after = self.open | {seq_id: past for _, seq_id, past in served}
            kept = [
                {block for each in after.values() for block in held(each.tables[g])}
                for g in range(len(self.groups))
            ]
            pairs = zip(self.groups, kept, strict=True)
            if all(num_served <= g.num_blocks - len(blocks) for g, blocks in pairs):
                break
        for i, _, _ in refused:
            status[i] = OUT_OF_BLOCKS
        # In one step: release unused blocks, share, then take the new tails.
        for _, seq_id, _ in served:
            for g, table in enumerate(self.open[seq_id].tables):
                self._shrink(g, table, 0, kept[g])
        for _, seq_id, past in served:
            self.open[seq_id].tables = copy.deepcopy(past.tables)
        for _, seq_id, past in served:
            self._continue(self.open[seq_id], past)
            self.open[seq_id].epoch = self.clock + 1
        return self._settle(status, used=[seq_id for _, seq_id, _ in served])

    # Look-ups.

    def table(self, seq_id, g=0):
        """Return the blocks of a sequence in a group, empty if it is closed."""
        return self.open[seq_id].tables[g] if seq_id in self.open else []

    def tokens(self, seq_id):
        """Return the stored tokens of a sequence, empty if it is closed."""
        return self.open[seq_id].tokens if seq_id in self.open else []

    def slot(self, seq_id, position, g=0):
        """Return (block, offset) of a position, or None if no block is mapped."""
        table = self.table(seq_id, g)
        column, offset = divmod(position, self.block_size)
        if not 0 <= column < len(table) or table[column] is None:
            return None
        return table[column], offset

    def reference_count(self, block, g=0):
        return sum(each.tables[g].count(block) for each in self.open.values())

    def num_free_blocks(self):
        return min((len(group.free) for group in self.groups), default=2**31 - 1)

    def known(self, g):
        """Return the indexed blocks of a group."""
        return {blocks[g] for blocks in self.index.values()} - {None}

    # Reasons for refusals.

    def _why_not_open(self, count):
        if count == PADDING:
            return OK
        if count < 0:
            return INVALID_ARGUMENT
        if count > self.max_context:
            return CONTEXT_FULL
        return OK if self.free_ids else OUT_OF_SEQUENCES

    def _why_not_first(self, seq_ids, i):
        is_first = seq_ids[i] in self.open and seq_ids[i] not in seq_ids[:i]
        return OK if seq_ids[i] == PADDING or is_first else INVALID_SEQUENCE

    def _can_go_on(self, mine, length):
        """Return True if a sequence can continue from a length, in all groups."""
        return (
            0 <= length <= len(mine.tokens)
            and (length == 0 or length >= mine.left)
            and (not self.states or self._base_at(mine, length) is not None)
            and all(
                group.can_go_on(mine.tables[g], length)
                for g, group in enumerate(self.groups)
            )
        )

    def _base_at(self, mine, length):
        """Return the token count of the state that continues from a length, or None."""
        if not self.states or length == 0 or mine.base <= length:
            return min(mine.base, length)
        return self.snapshots.get((mine.salt, tuple(mine.written[:length])))

    def _use_snapshot(self, salt, tokens):
        """Mark a snapshot as most recently used."""
        self.snapshots[salt, tokens] = self.snapshots.pop((salt, tokens))

    def _begin(self):
        """Start a call: requests are judged by the blocks free at its start."""
        self.available = [len(group.free) for group in self.groups]
        self.is_shut = False

    def _fits(self, needs, wants=False):
        """Return True if a request gets its blocks in all groups.

        A refusal blocks all later requests, except those that need no free block.
        """
        if not wants and all(need <= 0 for need in needs):
            return True
        pairs = list(zip(self.available, needs, strict=True))
        self.is_shut = self.is_shut or any(need > room for room, need in pairs)
        if not self.is_shut:
            self.available = [room - max(need, 0) for room, need in pairs]
        return not self.is_shut

    # Effects of served requests.

    def _open(self):
        seq_id = self.free_ids.pop(0)
        self.open[seq_id] = Sequence([[] for _ in self.groups])
        return seq_id

    def _close(self, seq_id):
        for g, table in enumerate(self.open[seq_id].tables):
            self._shrink(g, table, 0)
        del self.open[seq_id]
        self.free_ids.append(seq_id)

    def _past(self, sequence, length):
        """Return the shared past: tokens up to a length, and the full blocks."""
        full = length // self.block_size
        return dataclasses.replace(
            sequence,
            tables=[table[:full] for table in sequence.tables],
            tokens=sequence.tokens[:length],
            written=sequence.written[:length],
            past=sequence.past[: sequence.dropped + length],
            patches=cut_patches(sequence.patches, length),
            base=self._base_at(sequence, length) or 0,
            visible=None if sequence.visible is None else min(sequence.visible, length),
        )

    def _continue(self, mine, past):
        """Adopt a past: share its full blocks, and own a copy of its tail."""
        mine.tables, mine.tokens = copy.deepcopy(past.tables), list(past.tokens)
        mine.visible, mine.salt = past.visible, past.salt
        mine.base, mine.written = past.base, list(past.written)
        mine.past, mine.left, mine.kept = list(past.past), past.left, dict(past.kept)
        mine.patches = dict(past.patches)
        if self.pruning and not mine.past:
            mine.visible = 0
        self._extend(mine, self._tails(len(mine.tokens)))

    def _cut(self, mine, length, before):
        """Truncate a sequence; return the reason if impossible."""
        if not self._can_go_on(mine, length):
            return INVALID_ARGUMENT
        full, tails = length // self.block_size, self._tails(length)
        # A writer owns its tail, so a tail shared before the call is copied.
        copies = [
            int(tail and before.reference_count(mine.tables[g][full], g) > 1)
            for g, tail in enumerate(tails)
        ]
        if not self._fits(copies):
            return OUT_OF_BLOCKS
        for g, table in enumerate(mine.tables):
            if tails[g] and not copies[g]:
                self._forget_from(g, table[full])
            self._shrink(g, table, full + tails[g] - copies[g])
        self._extend(mine, copies)
        if self.states and 0 < length < mine.base:
            self._use_snapshot(mine.salt, tuple(mine.written[:length]))
        mine.base = self._base_at(mine, length)
        del mine.past[mine.dropped + length :]
        del mine.tokens[length:], mine.written[length:]
        mine.patches = cut_patches(mine.patches, length)
        if length == 0:
            mine.restart()
        if mine.visible is not None or length == 0:
            mine.visible = min(mine.visible or 0, length)
        mine.epoch = self.clock + 1
        return OK

    def _extend(self, mine, counts):
        """Append `counts` blocks of each group to a sequence."""
        for g, count in enumerate(counts):
            mine.tables[g] += self._take(g, count)

    def _take(self, g, count):
        """Allocate the blocks of a pool that have been free longest."""
        group = self.groups[g]
        taken = group.order[: max(count, 0)]
        group.free = [block for block in group.free if block not in taken]
        self._forget(g, taken)
        group.reset(taken)
        return taken

    def _shrink(self, g, table, count, kept=()):
        """Drop blocks from the end of a table."""
        while len(table) > count:
            self._drop(g, table.pop(), kept)

    def _drop(self, g, block, kept=()):
        """Free a block that a table referenced, if it was the last reference."""
        if block is not None and not self.reference_count(block, g):
            self.groups[g].free += [] if block in kept else [block]

    def _forget(self, g, blocks):
        """Remove blocks from the index."""
        for key, found in list(self.index.items()):
            if found[g] in blocks:
                found[g] = None
                if g == self.leader:
                    del self.index[key]

    def _forget_from(self, g, block):
        """Remove a block and its successors in the chain from the index."""
        if g == self.leader and self.groups[g].window is None:
            for salt, tokens in [k for k, b in self.index.items() if b[g] == block]:
                for own_salt, written in list(self.index):
                    if (own_salt, written[: len(tokens)]) == (salt, tokens):
                        del self.index[own_salt, written]
        self._forget(g, [block])

    def _blocks_for(self, length):
        return -(-length // self.block_size)

    def _tails(self, length):
        """Return the number of partly filled blocks in each group, one or none."""
        return [int(length % self.block_size > 0)] * len(self.groups)

    def _served(self, seq_ids, status):
        """Return the sequences that a call served."""
        pairs = zip(seq_ids, status, strict=True)
        return [seq_id for seq_id, cause in pairs if seq_id != PADDING and cause == OK]

    def _settle(self, status, used=(), opened=()):
        """Count the refusals; advance the clock if the call served a request."""
        self.refusals.update(cause for cause in status if cause != OK)
        opened = {*opened} - {PADDING}
        self.clock += bool(opened) or bool(used)
        for seq_id in {*opened, *used} & self.open.keys():
            self.open[seq_id].last_used = self.clock
        for seq_id in opened:
            self.open[seq_id].created = self.open[seq_id].epoch = self.clock
        return status
