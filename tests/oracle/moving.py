"""Sequences that leave and come back, and blocks that get other numbers."""

import copy

from oracle.cache import (
    CONTEXT_FULL,
    OK,
    OUT_OF_BLOCKS,
    OUT_OF_SEQUENCES,
    PADDING,
    Cache,
    held,
    served_of,
)


class Oracle(Cache):
    """The whole cache but for its index of prefixes."""

    def touch(self, seq_ids):
        """Mark sequences as used."""
        status = [self._why_not_first(seq_ids, i) for i in range(len(seq_ids))]
        self._tick(used=served_of(seq_ids, status))
        return self._count(status)

    def least_recently_used(self, exclude=()):
        """The open sequences, the one used longest ago first."""
        by_age = [
            (each.last_used, each.created, seq_id)
            for seq_id, each in self.open.items()
            if seq_id not in exclude
        ]
        return [seq_id for _, _, seq_id in sorted(by_age)]

    def evict(self, num_blocks, protect):
        """Free the least recently used until that many blocks are free."""
        gone = []
        for seq_id in self.least_recently_used(protect):
            if len(self.free_blocks) < num_blocks:
                self._close(seq_id)
                gone.append(seq_id)
        self.clock += bool(gone)
        return gone

    def evict_older_than(self, age, protect):
        """Free what has not been used for more than `age` ticks."""
        order = self.least_recently_used(protect)
        gone = [i for i in order if self.clock - self.open[i].last_used > age]
        for seq_id in gone:
            self._close(seq_id)
        self.clock += bool(gone)
        return gone

    def compact(self):
        """Number blocks by their first mention, row by row; then the free in order."""
        named = [block for _, each in sorted(self.open.items()) for block in held(each)]
        order = [*dict.fromkeys(named), *self.free_blocks]
        self._rename({block: number for number, block in enumerate(order)})

    def resize(self, num_blocks):
        """A pool of another size; False where live blocks would not fit.

        Free blocks leave, in order. Ids change only if they must.
        """
        if self.num_blocks - len(self.free_blocks) > num_blocks:
            return False
        surplus = max(self.num_blocks - num_blocks, 0)
        gone = self._first_to_leave()[:surplus]
        self._forget(gone)
        if max(self._not_to_be_lost(), default=0) >= num_blocks:
            self.free_blocks = [b for b in self.free_blocks if b not in gone]
            self.compact()
        else:
            old = [block for block in self.free_blocks if block < num_blocks]
            self.free_blocks = [*range(self.num_blocks, num_blocks), *old]
        self.num_blocks = num_blocks
        return True

    def swap_out(self, seq_ids):
        """Close sequences and return copies of them; None if one is refused."""
        status = [self._why_not_first(seq_ids, i) for i in range(len(seq_ids))]
        if any(status):
            return None  # an exception: not even counted
        swapped = [copy.deepcopy(self.open[i]) for i in seq_ids if i != PADDING]
        self.free(seq_ids)
        return swapped

    def swap_in(self, swapped):
        """Open such sequences again, all or none; returns (seq_ids, status)."""
        # Their blocks only tell apart what is shared. Each is taken once, all that hold
        # tokens before the reserved ones.
        filled, reserved = [], []
        for each in swapped:
            filled += each.table[: self._blocks_for(len(each.tokens))]
            reserved += each.table[self._blocks_for(len(each.tokens)) :]
        old = [block for block in dict.fromkeys(filled + reserved) if block is not None]
        most = self._blocks_for(self.max_context)
        if any(
            len(each.table) > most or len(each.tokens) > self.max_context
            for each in swapped
        ):
            cause = CONTEXT_FULL
        elif len(swapped) > len(self.free_ids):
            cause = OUT_OF_SEQUENCES
        elif len(old) > len(self.free_blocks):
            cause = OUT_OF_BLOCKS
        else:
            cause = OK
        seq_ids = [PADDING] * len(swapped)
        if cause == OK:
            new = {None: None} | dict(zip(old, self._take(len(old)), strict=True))
            for i, each in enumerate(swapped):
                seq_ids[i] = self._open([new[block] for block in each.table])
                opened = self.open[seq_ids[i]]
                opened.tokens, opened.salt = list(each.tokens), each.salt
                opened.num_gone = each.num_gone
                opened.visible = None if each.visible != 0 else 0
            self._tick(opened=seq_ids)
        return seq_ids, self._count([cause] * len(swapped))

    # What an index of prefixes changes.

    def visible_blocks(self):
        """Blocks that a prompt may find."""
        return set()

    def _not_to_be_lost(self):
        """Blocks that keep their contents."""
        return {block for each in self.open.values() for block in held(each)}

    def _first_to_leave(self):
        """The free blocks, in the order in which a smaller pool gives them up."""
        return list(self.free_blocks)

    def _rename(self, number):
        """Give all blocks their new numbers."""
        for each in self.open.values():
            each.table = [None if b is None else number[b] for b in each.table]
        self.free_blocks = [number[block] for block in self.free_blocks]
