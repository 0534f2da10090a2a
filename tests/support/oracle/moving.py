"""Sequences that are swapped out and in, and blocks that are renumbered."""

import copy

from support.oracle.cache import (
    CONTEXT_FULL,
    OK,
    OUT_OF_BLOCKS,
    OUT_OF_SEQUENCES,
    PADDING,
)
from support.oracle.groups import held
from support.oracle.pruning import PruningCache


class Oracle(PruningCache):
    """The complete cache."""

    def copy(self):
        """Return a copy of the cache, as saving makes one."""
        return copy.deepcopy(self)

    def touch(self, seq_ids):
        """Mark sequences as used."""
        status = [self._why_not_first(seq_ids, i) for i in range(len(seq_ids))]
        return self._settle(status, used=self._served(seq_ids, status))

    def least_recently_used(self, exclude=()):
        """Return the open sequences, least recently used first."""
        by_age = [
            (each.last_used, each.created, seq_id)
            for seq_id, each in self.open.items()
            if seq_id not in exclude
        ]
        return [seq_id for _, _, seq_id in sorted(by_age)]

    def evict(self, num_blocks, protect):
        """Free the least recently used until each group has enough free blocks."""
        gone = []
        for seq_id in self.least_recently_used(protect):
            if self.num_free_blocks() < num_blocks:
                self._close(seq_id)
                gone.append(seq_id)
        self.clock += bool(gone)
        return gone

    def evict_older_than(self, age, protect):
        """Free the sequences unused for more than `age` ticks."""
        order = self.least_recently_used(protect)
        gone = [i for i in order if self.clock - self.open[i].last_used > age]
        for seq_id in gone:
            self._close(seq_id)
        self.clock += bool(gone)
        return gone

    def compact(self):
        """Number blocks by their first mention in the tables, then the free ones."""
        for g in range(len(self.groups)):
            self._renumber(g)

    def resize(self, *num_blocks):
        """Resize the pools; return False if live blocks would not fit.

        Free blocks are removed, unindexed ones first, then in order. Ids change only if
        necessary.
        """
        sizes = list(zip(self.groups, num_blocks, strict=True))
        if any(group.num_blocks - len(group.free) > size for group, size in sizes):
            return False
        # Blocks that the leading group loses are lost in every other.
        for g in sorted(range(len(sizes)), key=lambda g: g != self.leader):
            (group, size), known = sizes[g], self.known(g)
            leaving = sorted(group.order, key=lambda block: block in known)
            gone = leaving[: max(group.num_blocks - size, 0)]
            self._forget(g, gone)
            if max({*self._live(g), *known} - {*gone}, default=0) >= size:
                group.free = [block for block in group.free if block not in gone]
                self._renumber(g)
            else:
                old = [block for block in group.free if block < size]
                group.free = [*range(group.num_blocks, size), *old]
                group.reset(range(size, group.num_blocks))
            group.num_blocks = size
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
        """Open swapped-out sequences, all or none; return (seq_ids, status)."""
        # Old block ids only identify shared blocks. Each is allocated once, the blocks
        # with tokens before the reserved ones.
        old, most = [], self._blocks_for(self.max_context)
        for g in range(len(self.groups)):
            tables = [(each.tables[g], len(each.tokens)) for each in swapped]
            filled = [b for table, n in tables for b in table[: self._blocks_for(n)]]
            every = [b for table, _ in tables for b in table]
            old.append(held(dict.fromkeys(filled + every)))
        sizes = list(zip(old, self.groups, strict=True))
        if any(
            len(each.tokens) > self.max_context
            or max(map(len, each.tables), default=0) > most
            for each in swapped
        ):
            cause = CONTEXT_FULL
        elif len(swapped) > len(self.free_ids):
            cause = OUT_OF_SEQUENCES
        elif any(len(blocks) > len(group.free) for blocks, group in sizes):
            cause = OUT_OF_BLOCKS
        else:
            cause = OK
        seq_ids = [PADDING] * len(swapped)
        if cause == OK:
            seq_ids = [self._open() for _ in swapped]
            for seq_id, each in zip(seq_ids, swapped, strict=True):
                mine = self.open[seq_id]
                mine.tokens, mine.salt = list(each.tokens), each.salt
                mine.base, mine.written = each.base, [-1] * len(each.tokens)
                mine.visible = None if each.visible != 0 or each.is_pruned else 0
                mine.past, mine.left = list(each.past), each.left
                mine.kept, mine.patches = dict(each.kept), dict(each.patches)
            for g, blocks in enumerate(old):
                new = dict(zip(blocks, self._take(g, len(blocks)), strict=True))
                for seq_id, each in zip(seq_ids, swapped, strict=True):
                    self.open[seq_id].tables[g] = [new.get(b) for b in each.tables[g]]
        return seq_ids, self._settle([cause] * len(swapped), opened=seq_ids)

    def spill(self, num_blocks):
        """Remove the next blocks to evict from the index, in all groups.

        Returns the groups that held each prefix's last block, by salt and tokens; the
        token counts of snapshots; and the priority and deadline of each last block.
        """
        count, places = max(num_blocks, 0), {}
        kept = {
            key: (group.classes[block], group.kept_until[block])
            for key, blocks in self.index.items()
            for group, block in [(self.groups[self.leader], blocks[self.leader])]
        }
        known = [self.known(g) for g in range(len(self.groups))]
        cached = [
            [block for block in group.order if block in known[g]][:count]
            for g, group in enumerate(self.groups)
        ]
        # Spilled blocks become the last to evict, in their order.
        beside = {blocks[self.leader]: blocks for blocks in self.index.values()}
        for g, group in enumerate(self.groups):
            pairs = [beside[block][g] for block in cached[self.leader]]
            group.lower(held(dict.fromkeys([*pairs, *cached[g]])))
        spilled = {}
        for key, blocks in list(self.index.items()):
            leads = blocks[self.leader] in cached[self.leader]
            in_groups = {
                g
                for g, block in enumerate(blocks)
                if block is not None and (leads or block in cached[g])
            }
            if in_groups:
                spilled[key] = in_groups
            if leads and key in self.snapshots:
                places[key] = self.snapshots.pop(key)
            for g in in_groups:
                blocks[g] = None
            if leads:
                del self.index[key]
        if self.states:
            most = self.states.num_snapshots
            lacking = min(count, most // 2) - (most - len(self.snapshots))
            lacking = lacking if self.groups else count
            for key in list(self.snapshots)[: max(lacking, 0)]:
                places[key] = self.snapshots.pop(key)
        return spilled, places, kept

    def restore(self, sequences, spilled, places, kept, snapshots):
        """Restore spilled blocks, as far as there are unused blocks.

        Args:
            sequences: salt and tokens up to the end of each column, in order.
            spilled: the groups that hold the last block of each.
            places: the token counts of snapshots.
            kept: the priority and deadline of each prefix's last block.
            snapshots: their sequences, in order.
        """
        blank = [
            [block for block in group.order if block not in self.known(g)]
            for g, group in enumerate(self.groups)
        ]
        num, stand, entered = 0, [], []
        for salt, tokens in sequences if self.groups else ():
            before = tokens[: -self.block_size]
            held = spilled.get((salt, tokens), ())
            if before and (salt, before) not in self.index:
                continue
            if (salt, tokens) not in self.index:
                if self.leader not in held or not blank[self.leader]:
                    continue
                self.index[salt, tokens] = [None] * len(self.groups)
            blocks = self.index[salt, tokens]
            for g in held:
                if blocks[g] is None and blank[g]:
                    blocks[g] = blank[g].pop(0)
                    entered.append((g, blocks[g]))
                    num += 1
            stand.append((salt, tokens))
        for g, block in entered:
            self.groups[g].lower([block])
        kept = dict(kept)
        for salt, tokens in reversed(stand):
            own, before = kept[salt, tokens], (salt, tokens[: -self.block_size])
            if before in kept:
                kept[before] = tuple(map(max, kept[before], own))
        for key in reversed(stand):
            for group, block in zip(self.groups, self.index[key], strict=True):
                if block is not None:
                    group.keep(block, *kept[key])
                if block in group.free:
                    group.free.remove(block)
                    group.free.append(block)
        return num + self._restore_snapshots(
            [key for key in snapshots if not self.groups or key in self.index], places
        )

    def _restore_snapshots(self, named, places):
        """Replace snapshots that the call does not name by restored ones."""
        new = [key for key in named if key not in self.snapshots]
        most = self.states.num_snapshots - len(named) + len(new) if named else 0
        new = new[max(len(new) - most, 0) :]
        for key in named:
            if key in self.snapshots:
                self.snapshots[key] = self.snapshots.pop(key)
            elif key in new:
                if len(self.snapshots) == self.states.num_snapshots:
                    others = (each for each in self.snapshots if each not in named)
                    del self.snapshots[next(others)]
                self.snapshots[key] = places[key]
        return len(new)

    def _live(self, g):
        """Return the blocks of a group in tables, by their first mention."""
        rows = [held(each.tables[g]) for _, each in sorted(self.open.items())]
        return list(dict.fromkeys(block for row in rows for block in row))

    def _renumber(self, g):
        """Renumber the blocks of a group: live ones in order, then the free ones."""
        group = self.groups[g]
        order = [*self._live(g), *group.order]
        number = {None: None} | {block: place for place, block in enumerate(order)}
        for each in self.open.values():
            each.tables[g] = [number[block] for block in each.tables[g]]
        for blocks in self.index.values():
            blocks[g] = number[blocks[g]]
        group.free = [number[block] for block in group.free]
        for counts in (group.classes, group.kept_until):
            named = {number[b]: n for b, n in counts.items() if b in number}
            counts.clear()
            counts.update(named)
