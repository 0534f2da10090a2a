"""Pruned sequences.

A sequence stores the tokens of each layer and head for the slots that remain after its
last prune; all later slots hold the same token everywhere.
"""

import copy
import itertools

from support.oracle.cache import (
    CONTEXT_FULL,
    INVALID_ARGUMENT,
    INVALID_SEQUENCE,
    OK,
    OUT_OF_BLOCKS,
    PADDING,
)
from support.oracle.groups import held
from support.oracle.prefixes import PrefixCache

LAST_POSITION = 2**31 - 1


class PruningCache(PrefixCache):
    """The cache, and the verb that drops tokens from the middle of sequences."""

    def contents(self, seq_id, head):
        """Return each slot's stored token in a head, (layer, number), or None."""
        if seq_id not in self.open:
            return []
        mine = self.open[seq_id]
        first = mine.kept.get(head, mine.tokens[: mine.left])
        found = [*first, *mine.tokens[mine.left :]]
        layer, _ = head
        return [mine.patches.get((layer, i), each) for i, each in enumerate(found)]

    def next_position(self, seq_id):
        """Return the position of a sequence's next token, 0 if it is closed."""
        mine = self.open.get(seq_id)
        return len(mine.past) if mine else 0

    def prune(self, seq_ids, kept, num_kept, heads, width):
        """Keep the given slots of sequences, in order.

        Args:
            seq_ids: the sequences.
            kept: by request, by head, a list of `width` slots.
            num_kept: by request.
            heads: by group, its heads, (layer, number) each.
            width: entries of each list.
        """
        self._begin()
        before = copy.deepcopy(self)
        status, plans = [], {}
        for i, seq_id in enumerate(seq_ids):
            cause = self._why_not_first(seq_ids, i)
            if cause == OK and seq_id != PADDING:
                mine, count = self.open[seq_id], num_kept[i]
                dropped = mine.dropped + len(mine.tokens) - count
                if not self._can_keep(mine, kept[i], count, width):
                    cause = INVALID_ARGUMENT
                elif dropped > LAST_POSITION - self.max_context:
                    cause = CONTEXT_FULL
                else:
                    plans[i] = [
                        Columns(self, before, seq_id, g, sources)
                        for g, sources in enumerate(
                            self._sources(mine, kept[i], count, heads)
                        )
                    ]
            status.append(cause)
        # Cached blocks are spared if the call has room to copy all of them.
        for g, group in enumerate(self.groups):
            wishes = sum(
                len(p[g].homeless) + len(p[g].overwritten) for p in plans.values()
            )
            for plan in plans.values():
                plan[g].settle(wishes <= len(group.free))
        for i, plan in list(plans.items()):
            if not self._fits([len(columns.fresh) for columns in plan]):
                status[i] = OUT_OF_BLOCKS
                del plans[i]
        for g in range(len(self.groups)):
            self._move(g, {seq_ids[i]: plan[g] for i, plan in plans.items()})
        for i in plans:
            self._keep(self.open[seq_ids[i]], kept[i], num_kept[i], heads)
        return self._settle(status, used=self._served(seq_ids, status))

    def overwrite(self, layer, g, seq_ids, slots, contents):
        """Overwrite the contents of slots in a layer of a group."""
        self._begin()
        before, status = copy.deepcopy(self), []
        # By sequence, in the order of first mention.
        patches = {seq_id: {} for seq_id in seq_ids if seq_id in self.open}
        pairs = [*zip(seq_ids, slots, strict=True)]
        for i, (seq_id, slot) in enumerate(pairs):
            cause = OK if seq_id == PADDING or seq_id in self.open else INVALID_SEQUENCE
            if seq_id in self.open:
                length = len(self.open[seq_id].tokens)
                if (
                    not 0 <= slot < length
                    or self.slot(seq_id, slot, g) is None
                    or pairs[i] in pairs[:i]
                ):
                    cause = INVALID_ARGUMENT
                else:
                    patches[seq_id][layer, slot] = contents[i]
            status.append(cause)
        changed = {}
        for seq_id, of_slots in patches.items():
            touched = {slot // self.block_size for _, slot in of_slots}
            columns = Rewritten(self, before, seq_id, g, touched)
            counts = [0] * len(self.groups)
            counts[g] = len(columns.fresh)
            if not touched:
                continue
            if self._fits(counts):
                changed[seq_id] = columns
            else:
                rows = enumerate(zip(seq_ids, status, strict=True))
                for i in [i for i, pair in rows if pair == (seq_id, OK)]:
                    status[i] = OUT_OF_BLOCKS
        self._move(g, changed)
        for seq_id in changed:
            mine = self.open[seq_id]
            mine.patches |= patches[seq_id]
            mine.visible, mine.written = None, [-1] * len(mine.tokens)
            mine.epoch = self.clock + 1
        return self._settle(status, used=self._served(seq_ids, status))

    def _can_keep(self, mine, kept, count, width):
        """Return True if a sequence can keep these slots."""
        length = len(mine.tokens)
        if not 0 <= count <= width or (self.states and count < length - mine.base):
            return False
        for group in self.groups:
            if group.window:
                visible = group.num_sink_tokens + group.window - 1
                if count < min(length, visible):
                    return False
        for slots in kept.values():
            own = slots[:count]
            if not all(a < b for a, b in itertools.pairwise(own)):
                return False
            if not all(0 <= slot < length for slot in own):
                return False
        return True

    def _sources(self, mine, kept, count, heads):
        """Return each new slot's old slot by group and head; None if unneeded."""
        sources = []
        for g, group in enumerate(self.groups):
            if group.window is None:
                sources.append({head: kept[head][:count] for head in heads[g]})
                continue
            shift = len(mine.tokens) - count
            own = [
                slot
                if slot < group.num_sink_tokens
                else slot + shift
                if slot > count - group.window
                else None
                for slot in range(count)
            ]
            sources.append(dict.fromkeys(heads[g], own))
        return sources

    def _move(self, g, columns):
        """Change a group's tables: remove from the index, allocate, release."""
        for each in columns.values():
            for block in each.forgotten:
                self._forget_from(g, block)
        tables = {}
        for seq_id, each in columns.items():
            fresh = iter(self._take(g, len(each.fresh)))
            tables[seq_id] = [
                next(fresh) if column in each.fresh else block
                for column, block in enumerate(each.table)
            ]
        given_up = []
        for seq_id, table in tables.items():
            old = self.open[seq_id].tables[g]
            given_up += [b for b in reversed(held(old)) if b not in table]
            self.open[seq_id].tables[g] = table
        # A block is freed with its last reference.
        for i, block in enumerate(given_up):
            self._drop(g, block, kept=given_up[i + 1 :])

    def _keep(self, mine, kept, count, heads):
        """Change the tokens of a sequence."""
        sources = self._sources(mine, kept, count, heads)
        stored = {}
        seq_id = next(i for i, each in self.open.items() if each is mine)
        for of_group in sources:
            for head, own in of_group.items():
                found = self.contents(seq_id, head)
                stored[head] = [None if s is None else found[s] for s in own]
        tokens = []
        lead = [*sources[self.leader].values()] if sources else []
        for slot in range(count):
            slots = {own[slot] for own in lead}
            (only,) = slots if len(slots) == 1 else (None,)
            tokens.append(-1 if only is None else mine.tokens[only])
        mine.base = count - (len(mine.tokens) - mine.base)
        mine.left, mine.kept, mine.tokens = count, stored, tokens
        mine.patches = {}
        mine.written, mine.visible = [-1] * count, None
        mine.epoch = self.clock + 1


class Columns:
    """The columns of a sequence's new table in a group."""

    def __init__(self, cache, before, seq_id, g, sources):
        size, group = cache.block_size, cache.groups[g]
        old, known = before.open[seq_id].tables[g], before.known(g)
        rows = [*zip(*sources.values(), strict=True)]
        has_parents = g == cache.leader and group.window is None

        def is_own(block):
            return before.reference_count(block, g) == 1

        self.table, self.forgotten, self.fresh = [], [], []
        moved, copied, is_intact = [], [], True
        for column in range(-(-len(rows) // size)):
            part = rows[column * size : (column + 1) * size]
            offsets = [
                (slot - offset) / size
                for offset, of_heads in enumerate(part)
                for slot in of_heads
                if slot is not None
            ]
            is_full = len(part) == size
            source = offsets[0] if len({*offsets}) == 1 else 0.5
            is_whole = source == int(source)
            is_intact &= is_whole and source == column and is_full
            block = old[int(source)] if is_whole and offsets else None
            is_bound = block in known and has_parents and not is_intact
            if not offsets:  # released
                self.table.append(None)
            elif is_whole and (is_own(block) or (is_full and not is_bound)):
                self.table.append(block)
                moved.append(block)
                if block in known and (is_bound or not is_full):
                    self.forgotten.append(block)
            else:
                copied.append(column)
                self.table.append(None)
        left = [block for block in held(old) if block not in moved]
        left += [None] * len(copied)
        pairs = [*zip(copied, left, strict=False)]
        self.homeless = [c for c, b in pairs if b is None or not is_own(b)]
        self.overwritten = [
            (c, b) for c, b in pairs if c not in self.homeless and b in known
        ]
        self.pairs = pairs

    def settle(self, spares):
        """Choose the blocks of copied columns; with `spares`, keep cached ones."""
        spared = [column for column, _ in self.overwritten] if spares else []
        self.fresh = sorted([*self.homeless, *spared])
        for column, block in self.pairs:
            if column not in self.fresh:
                self.table[column] = block
        self.forgotten = [
            *(b for c, b in self.overwritten if c not in spared),
            *self.forgotten,
        ]


class Rewritten:
    """A sequence's table in a group, with own blocks where it is overwritten."""

    def __init__(self, cache, before, seq_id, g, touched):
        known, is_bound = before.known(g), False
        has_parents = g == cache.leader and cache.groups[g].window is None
        self.table, self.forgotten, self.fresh = [], [], []
        for column, block in enumerate(before.open[seq_id].tables[g]):
            # A cached block needs its parent before it.
            is_bound |= has_parents and column in touched
            is_rewritten = column in touched or (is_bound and block in known)
            is_own = before.reference_count(block, g) == 1
            if block is not None and is_rewritten and not is_own:
                self.fresh.append(column)
                block = None
            elif block in known and is_rewritten:
                self.forgotten.append(block)
            self.table.append(block)
