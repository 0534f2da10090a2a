"""The cache in plain Python: an independent second reading of the contract.

Everything is a list or a dict, every batch is a loop over its requests, and nothing
is stored that can be counted: a reference count is a count over the block tables, a
context length is the length of the list of stored tokens. A stored token is whatever
the test hands to `append`, so its contents travel with the sequence and not with the
blocks; the blocks are kept beside them only to say which ids the cache must use.
"""

import copy
from collections import Counter, deque
from typing import Any, NamedTuple

OK, OUT_OF_BLOCKS, OUT_OF_SEQUENCES, CONTEXT_FULL = 0, 1, 2, 3
BATCH_FULL, INVALID_SEQUENCE, INVALID_ARGUMENT = 4, 5, 6
PADDING = -1


class Row(NamedTuple):
    """One row of a batch that holds a token: where it is written."""

    seq_id: int
    position: int
    block: int
    offset: int


class Batch(NamedTuple):
    """What `append` promises; a row without a token is None."""

    status: list[int]
    query_starts: list[int]
    query_lengths: list[int]
    context_lengths: list[int]
    rows: list[Row | None]
    seq_ids: list[int]
    epochs: list[int]


class Oracle:
    """The cache: free blocks and free sequence ids in order, tables, tokens."""

    def __init__(
        self,
        *,
        num_blocks,
        block_size,
        max_sequences,
        max_context_length,
        prefix_caching=False,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching = prefix_caching
        self.max_sequences, self.max_context = max_sequences, max_context_length
        self.free_blocks = deque(range(num_blocks))
        self.free_ids = deque(range(max_sequences))
        self.tables: dict[int, list[int]] = {}  # open sequences: their block ids
        self.tokens: dict[int, list[Any]] = {}  # and their stored tokens
        self.refusals: Counter[int] = Counter()
        # Visible blocks by (salt, all tokens up to their end), and what each sequence
        # has made visible: a number of tokens, None once its chain has a gap.
        self.index: dict[tuple[int, tuple[Any, ...]], int] = {}
        self.visible: dict[int, int | None] = {}
        self.salts: dict[int, int] = {}
        # The clock, and when each sequence was last used, opened, and cut back.
        self.clock = 0
        self.last_used: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.epochs: dict[int, int] = {}

    # The verbs. Requests are served one after the other.

    def allocate(self, num_tokens, prompts=None, salts=None):
        """Open one sequence per request; returns (seq_ids, status, num_cached)."""
        self._begin()
        prompts = prompts or [[]] * len(num_tokens)
        salts = salts or [0] * len(num_tokens)
        found = [self.find(*each) for each in zip(prompts, salts, strict=True)]
        is_free = set(self.free_blocks)
        claimed, seq_ids, status, served = set(), [], [], []
        for i, count in enumerate(num_tokens):
            seq_id = PADDING
            blocks, length, _ = found[i]
            fresh = max(self._blocks_for(count), self._blocks_for(length)) - len(blocks)
            revived = is_free & set(blocks)
            if count == PADDING:
                cause = OK
            elif count < 0:
                cause = INVALID_ARGUMENT
            elif count > self.max_context:
                cause = CONTEXT_FULL
            elif not self.free_ids:
                cause = OUT_OF_SEQUENCES
            elif not self._fits(fresh + len(revived - claimed), bool(revived)):
                cause = OUT_OF_BLOCKS
            else:
                cause = OK
                claimed |= revived
                seq_id = self._open(salts[i])
                served.append((seq_id, fresh, *found[i]))
            seq_ids.append(seq_id)
            status.append(cause)
        # What was found is pinned before any block is taken.
        for seq_id, _, blocks, _, _ in served:
            self._share(seq_id, blocks)
        for seq_id, fresh, _, length, prompt in served:
            self._grow(seq_id, fresh)
            self.tokens[seq_id] = list(prompt[:length])
            self.visible[seq_id] = length
        opened = {seq_id: length for seq_id, _, _, length, _ in served}
        self._tick(opened)
        return seq_ids, self._count(status), [opened.get(i, 0) for i in seq_ids]

    def find(self, prompt, salt):
        """The visible blocks of a prompt's beginning, and how many tokens they hold,
        those of a block that only begins like the rest included."""
        usable = min(max(len(prompt) - 1, 0), self.max_context)
        blocks = []
        while (end := (len(blocks) + 1) * self.block_size) <= usable:
            if (salt, tuple(prompt[:end])) not in self.index:
                break
            blocks.append(self.index[salt, tuple(prompt[:end])])
        start = len(blocks) * self.block_size
        past, rest = tuple(prompt[:start]), prompt[start:usable]
        best = 0
        for domain, tokens in self.index:
            if domain == salt and tokens[:start] == past and len(tokens) > start:
                child = tokens[start : start + self.block_size]
                is_next = len(tokens) == start + self.block_size
                best = max(best, is_next * common(child, rest))
        return blocks, start + min(best, self.block_size - 1), prompt

    def can_allocate(self, num_tokens):
        """What `allocate` would serve, nothing changed."""
        return [cause == OK for cause in self.copy().allocate(num_tokens)[1]]

    def commit(self, batch):
        """Make full blocks visible; a block equal to a visible one gives way to it."""
        if not self.prefix_caching:
            return
        indexed, counts = dict(self.index), self._reference_counts()
        given_back = []
        for i, seq_id in enumerate(batch.seq_ids):
            end = batch.context_lengths[i]
            start = end - batch.query_lengths[i]
            if (
                batch.query_lengths[i] == 0
                or self.epochs.get(seq_id) != batch.epochs[i]
                or self.visible[seq_id] != start
                or len(self.tokens[seq_id]) < end
            ):
                continue
            table, contents = self.tables[seq_id], self.tokens[seq_id]
            self.visible[seq_id] = end
            T = self.block_size
            for column in range(start // T, end // T):
                tokens = tuple(contents[: (column + 1) * T])
                key = self.salts[seq_id], tokens
                is_told = all(token >= 0 for token in tokens[column * T :])
                is_alone = counts[table[column]] == 1
                if not is_told or not (is_alone or key in indexed):
                    self.visible[seq_id] = column * T
                    break
                if self.index.setdefault(key, table[column]) != table[column]:
                    given_back.append((seq_id, column))
        mine = [self.tables[seq_id][column] for seq_id, column in given_back]
        for seq_id, column in given_back:
            tokens = tuple(self.tokens[seq_id][: (column + 1) * self.block_size])
            theirs = self.index[self.salts[seq_id], tokens]
            self.tables[seq_id][column] = theirs
            if theirs in self.free_blocks:
                self.free_blocks.remove(theirs)
        for i, block in enumerate(mine):
            if self.reference_count(block) == 0 and block not in mine[i + 1 :]:
                self.free_blocks.append(block)

    def forget(self, salt=None):
        """Forget one domain, or all; what its sequences hold never becomes visible."""
        self.index = {
            key: block
            for key, block in self.index.items()
            if salt is not None and key[0] != salt
        }
        for seq_id, contents in self.tokens.items():
            if contents and salt in (None, self.salts[seq_id]):
                self.visible[seq_id] = None

    def evict_cached(self, num_blocks):
        """Forget the cached blocks that have been free longest."""
        visible = {block: key for key, block in self.index.items()}
        cached = [block for block in self.free_blocks if block in visible]
        for block in cached[: max(num_blocks, 0)]:
            del self.index[visible[block]]

    def append(self, seq_ids, num_tokens, contents, max_query_length=None):
        """Store contents[row] in each served request's rows; returns a Batch.

        `contents` has one entry per row, so its length is the capacity. With
        `max_query_length` Q, request i owns Q rows from i * Q, else rows are packed.
        """
        self._begin()
        batch = Batch([], [], [], [], [None] * len(contents), seq_ids, [])
        before = {seq_id: len(tokens) for seq_id, tokens in self.tokens.items()}
        start = 0
        for i, (seq_id, count) in enumerate(zip(seq_ids, num_tokens, strict=True)):
            if max_query_length is not None:
                start, room = i * max_query_length, max_query_length
            else:
                room = len(contents) - start
            length = before.get(seq_id, 0)
            need = self._blocks_for(length + count) - len(self.tables.get(seq_id, []))
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
            served = cause == OK and seq_id != PADDING
            if served:
                self._grow(seq_id, need)
                for row in range(start, start + count):
                    batch.rows[row] = self._slot(seq_id, len(self.tokens[seq_id]))
                    self.tokens[seq_id].append(contents[row])
            batch.status.append(cause)
            batch.query_starts.append(start)
            batch.query_lengths.append(count if served else 0)
            batch.context_lengths.append(length + count if served else length)
            batch.epochs.append(self.epochs.get(seq_id, 0))
            start += max(count, 0)
        self._use(seq_ids, batch.status)
        self._count(batch.status)
        return batch

    def fork(self, seq_ids):
        """Open one child per parent; returns (seq_ids, status)."""
        self._begin()
        parents = set(self.tables)  # A child opened in this call is no parent in it.
        children, status, opened = [], [], {}
        for parent in seq_ids:
            child = PADDING
            if parent == PADDING:
                cause = OK
            elif parent not in parents:
                cause = INVALID_SEQUENCE
            elif not self.free_ids:
                cause = OUT_OF_SEQUENCES
            elif not self._fits(self._has_tail(len(self.tokens[parent]))):
                cause = OUT_OF_BLOCKS
            else:
                cause = OK
                child = self._open(self.salts[parent])
                opened[child] = parent
                self.tokens[child] = list(self.tokens[parent])
                self.tables[child] = self._full_blocks(parent)
                self.visible[child] = self.visible[parent]
                self._grow(child, self._has_tail(len(self.tokens[child])))
            children.append(child)
            status.append(cause)
        self._tick(opened, used=opened.values())
        return children, self._count(status)

    def free(self, seq_ids):
        """Close sequences; a block comes back with its last reference."""
        status = []
        for i, seq_id in enumerate(seq_ids):
            if seq_id == PADDING:
                status.append(OK)
            elif not self._is_first_open(seq_ids, i):
                status.append(INVALID_SEQUENCE)
            else:
                status.append(OK)
                self._close(seq_id)
        self.clock += any(map(self._serves, seq_ids, status))
        return self._count(status)

    def touch(self, seq_ids):
        """Mark sequences as used."""
        status = []
        for i, seq_id in enumerate(seq_ids):
            known = seq_id == PADDING or self._is_first_open(seq_ids, i)
            status.append(OK if known else INVALID_SEQUENCE)
        self._use(seq_ids, status)
        return self._count(status)

    def least_recently_used(self, exclude=()):
        """The open sequences, the one used longest ago first."""
        open_ids = [seq_id for seq_id in self.tables if seq_id not in exclude]
        return sorted(open_ids, key=lambda i: (self.last_used[i], self.created[i], i))

    def evict(self, num_blocks, protect):
        """Free the least recently used until that many blocks are free."""
        gone = []
        for seq_id in self.least_recently_used(protect):
            if len(self.free_blocks) >= num_blocks:
                break
            self._close(seq_id)
            gone.append(seq_id)
        self.clock += bool(gone)
        return gone

    def evict_older_than(self, age, protect):
        """Free what has not been used for more than `age` ticks."""
        order = self.least_recently_used(protect)
        gone = [i for i in order if self.clock - self.last_used[i] > age]
        for seq_id in gone:
            self._close(seq_id)
        self.clock += bool(gone)
        return gone

    def truncate(self, seq_ids, lengths):
        """Drop tokens and every block past the new end; copy a shared new tail."""
        self._begin()
        # A block that is shared or visible must not be written.
        counts = self._reference_counts()
        shared = {b for b in counts if counts[b] > 1} | set(self.index.values())
        status = []
        for i, (seq_id, length) in enumerate(zip(seq_ids, lengths, strict=True)):
            if seq_id == PADDING:
                status.append(OK)
                continue
            if not self._is_first_open(seq_ids, i):
                status.append(INVALID_SEQUENCE)
                continue
            if not 0 <= length <= len(self.tokens[seq_id]):
                status.append(INVALID_ARGUMENT)
                continue
            # A writer may own no shared block, so a new tail that was shared before
            # the call is copied.
            tail = length // self.block_size
            copies = self._has_tail(length) and self.tables[seq_id][tail] in shared
            if not self._fits(int(copies)):
                status.append(OUT_OF_BLOCKS)
                continue
            status.append(OK)
            self._shrink(seq_id, tail if copies else self._blocks_for(length))
            self._grow(seq_id, int(copies))
            del self.tokens[seq_id][length:]
            if self.visible[seq_id] is not None:
                self.visible[seq_id] = min(self.visible[seq_id], length)
            if length == 0:
                self.visible[seq_id] = 0
            self.epochs[seq_id] = self.clock + 1
        self._use(seq_ids, status)
        return self._count(status)

    def reorder(self, seq_ids, parents):
        """Sequence i continues from what parent i was before the call."""
        status = []
        for i, (seq_id, parent) in enumerate(zip(seq_ids, parents, strict=True)):
            if seq_id == PADDING:
                status.append(OK)
            elif not self._is_first_open(seq_ids, i) or parent not in self.tables:
                status.append(INVALID_SEQUENCE)
            else:
                status.append(OK)
        # Who moves, in order: a sequence that is its own parent stays as it is.
        moves = [
            (i, seq_id, parent)
            for i, (seq_id, parent) in enumerate(zip(seq_ids, parents, strict=True))
            if seq_id != PADDING and status[i] == OK and seq_id != parent
        ]
        pasts = {parent: list(self.tokens[parent]) for _, _, parent in moves}
        full = {parent: self._full_blocks(parent) for _, _, parent in moves}
        # Moves that need no block are served. Of those that need one, as many as fit,
        # the first ones: they may also take what the served sequences give up.
        needy = [move for move in moves if self._has_tail(len(pasts[move[2]]))]
        for num_served in range(len(needy), -1, -1):
            refused = needy[num_served:]
            served = [move for move in moves if move not in refused]
            after = dict(self.tables) | {s: full[parent] for _, s, parent in served}
            kept = {block for table in after.values() for block in table}
            if num_served <= self.num_blocks - len(kept):
                break
        for i, _, _ in refused:
            status[i] = OUT_OF_BLOCKS
        past_state = {p: (self.visible[p], self.salts[p]) for _, _, p in moves}
        # One step for all: drop and share, then take the new tails.
        for _, seq_id, _ in served:
            self._shrink(seq_id, 0, kept)
        for _, seq_id, parent in served:
            self.tables[seq_id] = list(full[parent])
            self.tokens[seq_id] = list(pasts[parent])
            self.visible[seq_id], self.salts[seq_id] = past_state[parent]
            self.epochs[seq_id] = self.clock + 1
        for _, seq_id, _ in served:
            self._grow(seq_id, self._has_tail(len(self.tokens[seq_id])))
        self._tick({}, used=[seq_id for _, seq_id, _ in served])
        return self._count(status)

    def compact(self):
        """Number blocks by their first mention, row by row; then the free in order."""
        named = [block for _, table in sorted(self.tables.items()) for block in table]
        order = [*dict.fromkeys(named), *self.free_blocks]
        renamed = {block: i for i, block in enumerate(order)}
        self.tables = {s: [renamed[b] for b in t] for s, t in self.tables.items()}
        self.free_blocks = deque(renamed[block] for block in self.free_blocks)
        self.index = {key: renamed[block] for key, block in self.index.items()}

    def resize(self, num_blocks):
        """A pool of another size; False where live blocks would not fit.

        Free blocks leave, visible ones last, in order. Ids change only if they must.
        """
        live, visible = set(self._reference_counts()), set(self.index.values())
        if len(live) > num_blocks:
            return False
        surplus = max(self.num_blocks - num_blocks, 0)
        gone = sorted(self.free_blocks, key=lambda block: block in visible)[:surplus]
        self.index = {k: block for k, block in self.index.items() if block not in gone}
        if max(live | set(self.index.values()), default=0) >= num_blocks:
            self.free_blocks = deque(b for b in self.free_blocks if b not in gone)
            self.compact()
        else:
            old = [block for block in self.free_blocks if block < num_blocks]
            self.free_blocks = deque([*range(self.num_blocks, num_blocks), *old])
        self.num_blocks = num_blocks
        return True

    def swap_out(self, seq_ids):
        """Close sequences and return what they were, or their statuses if refused.

        Of each: its stored tokens, its blocks by names that only tell them apart, its
        domain, and whether it has made anything visible.
        """
        status = [
            OK if i == PADDING or self._is_first_open(seq_ids, n) else INVALID_SEQUENCE
            for n, i in enumerate(seq_ids)
        ]
        if any(cause != OK for cause in status):
            return None, status  # an exception: not even counted
        named = [seq_id for seq_id in seq_ids if seq_id != PADDING]
        swapped = [
            (list(self.tokens[i]), list(self.tables[i]), self.salts[i], self.visible[i])
            for i in named
        ]
        self.free(seq_ids)
        return swapped, status

    def swap_in(self, swapped):
        """Open such sequences again, all or none; returns (seq_ids, status)."""
        # Each block is taken once, all that hold tokens before the reserved ones.
        filled, reserved = [], []
        for tokens, table, _, _ in swapped:
            filled += table[: self._blocks_for(len(tokens))]
            reserved += table[self._blocks_for(len(tokens)) :]
        names = list(dict.fromkeys(filled + reserved))
        most = self._blocks_for(self.max_context)
        if any(len(table) > most for _, table, _, _ in swapped):
            cause = CONTEXT_FULL
        elif any(len(tokens) > self.max_context for tokens, _, _, _ in swapped):
            cause = CONTEXT_FULL
        elif len(swapped) > len(self.free_ids):
            cause = OUT_OF_SEQUENCES
        elif len(names) > len(self.free_blocks):
            cause = OUT_OF_BLOCKS
        else:
            cause = OK
        seq_ids = [PADDING] * len(swapped)
        if cause == OK:
            block = dict(zip(names, self._take(len(names)), strict=True))
            for i, (tokens, table, salt, visible) in enumerate(swapped):
                seq_ids[i] = self._open(salt)
                self.tokens[seq_ids[i]] = list(tokens)
                self.tables[seq_ids[i]] = [block[name] for name in table]
                self.visible[seq_ids[i]] = None if visible != 0 else 0
            self._tick(seq_ids)
        return seq_ids, self._count([cause] * len(swapped))

    def copy(self):
        """Return the cache as it is now, as a saved one is."""
        return copy.deepcopy(self)

    # Looking things up.

    def reference_count(self, block):
        return sum(table.count(block) for table in self.tables.values())

    def slot(self, seq_id, position):
        """(block, offset) of a position, None where no block is mapped."""
        table = self.tables.get(seq_id, [])
        if not 0 <= position < len(table) * self.block_size:
            return None
        return table[position // self.block_size], position % self.block_size

    def check(self):
        """The oracle's own sanity: every block and every id is somewhere once."""
        live = {block for table in self.tables.values() for block in table}
        assert sorted([*self.free_blocks, *live]) == list(range(self.num_blocks))
        assert sorted([*self.free_ids, *self.tables]) == list(range(self.max_sequences))
        for seq_id, table in self.tables.items():
            length = len(self.tokens[seq_id])
            assert self._blocks_for(length) <= len(table)
            owned = table[length // self.block_size :]
            assert all(self.reference_count(block) == 1 for block in owned)

    # Helpers.

    def _blocks_for(self, length):
        return -(-length // self.block_size)

    def _has_tail(self, length):
        return int(length % self.block_size != 0)

    def _full_blocks(self, seq_id):
        return self.tables[seq_id][: len(self.tokens[seq_id]) // self.block_size]

    def _reference_counts(self):
        return Counter(block for table in self.tables.values() for block in table)

    def _is_first_open(self, seq_ids, i):
        return seq_ids[i] in self.tables and seq_ids[i] not in seq_ids[:i]

    def _slot(self, seq_id, position):
        return Row(seq_id, position, *self.slot(seq_id, position))

    def _begin(self):
        """A call is judged by the blocks free before it."""
        self.available, self.shut = len(self.free_blocks), False

    def _fits(self, need, wants=False):
        """Whether a request gets its blocks; one that does not shuts the rest out."""
        if need <= 0 and not wants:
            return True
        self.shut = self.shut or need > self.available
        self.available -= 0 if self.shut else need
        return not self.shut

    def _open(self, salt=0):
        seq_id = self.free_ids.popleft()
        self.tables[seq_id], self.tokens[seq_id] = [], []
        self.visible[seq_id], self.salts[seq_id] = 0, salt
        return seq_id

    def _close(self, seq_id):
        self._shrink(seq_id, 0)
        del self.tables[seq_id], self.tokens[seq_id], self.epochs[seq_id]
        self.free_ids.append(seq_id)

    def _serves(self, seq_id, status):
        return seq_id != PADDING and status == OK

    def _use(self, seq_ids, status):
        """The call used the sequences it served."""
        pairs = zip(seq_ids, status, strict=True)
        self._tick({}, used=[i for i, cause in pairs if self._serves(i, cause)])

    def _tick(self, opened, used=()):
        """Time goes on with each call that serves somebody."""
        self.clock += bool(opened) or bool(used)
        for seq_id in opened:
            self.created[seq_id] = self.epochs[seq_id] = self.clock
        self.last_used.update(dict.fromkeys([*opened, *used], self.clock))

    def _share(self, seq_id, blocks):
        """Name blocks that are there already; a free one is free no more."""
        self.tables[seq_id] += blocks
        self.free_blocks = deque(b for b in self.free_blocks if b not in blocks)

    def _grow(self, seq_id, count):
        self.tables[seq_id] += self._take(count)

    def _take(self, count):
        """Take the blocks that have been free longest; what they held is forgotten."""
        taken = [self.free_blocks.popleft() for _ in range(count)]
        self.index = {k: block for k, block in self.index.items() if block not in taken}
        return taken

    def _shrink(self, seq_id, count, kept=()):
        """Drop blocks from the end; one is free when nobody names it any more."""
        table = self.tables[seq_id]
        while len(table) > count:
            block = table.pop()
            if self.reference_count(block) == 0 and block not in kept:
                self.free_blocks.append(block)

    def _count(self, status):
        self.refusals.update(cause for cause in status if cause != OK)
        return status


def common(first, second):
    """How many tokens two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
