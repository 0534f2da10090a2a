"""Prefix caching.

A prefix is identified by its tokens, without hashes. An indexed free block is cached;
it is removed from the index when it is allocated.
"""

from support.oracle.cache import OK, OUT_OF_BLOCKS, PADDING, Cache
from support.oracle.groups import held


class PrefixCache(Cache):
    """The cache, and the verbs that read and change the prefix index."""

    def allocate(self, num_tokens, prompts=None, salts=None):
        """Open one sequence per request; return (seq_ids, status, num_cached)."""
        self._begin()
        prompts = prompts or [[]] * len(num_tokens)
        salts = salts or [0] * len(num_tokens)
        found = [self.find(*each) for each in zip(prompts, salts, strict=True)]
        claimed = [set() for _ in self.groups]
        seq_ids, status, num_cached, opened = [], [], [], []
        for i, count in enumerate(num_tokens):
            cause, seq_id, length = self._why_not_open(count), PADDING, 0
            if cause == OK and count != PADDING:
                tables, length = found[i]
                fresh = self._fresh(count, tables, length)
                # Cached free blocks are claimed by the first request that finds them.
                pairs = zip(self.groups, tables, strict=True)
                revived = [set(group.free) & set(table) for group, table in pairs]
                costs = [len(r - c) for r, c in zip(revived, claimed, strict=True)]
                needs = [n + cost for n, cost in zip(fresh, costs, strict=True)]
                if self._fits(needs, wants=any(revived)):
                    claimed = [c | r for c, r in zip(claimed, revived, strict=True)]
                    seq_id = self._open()
                    mine = self.open[seq_id]
                    mine.tables, mine.tokens = tables, list(prompts[i][:length])
                    mine.salt, mine.visible = salts[i], length
                    mine.written = list(prompts[i][:length])
                    mine.past = list(prompts[i][:length])
                    if self.states and length:
                        mine.base = self.snapshots[salts[i], tuple(mine.written)]
                        self._use_snapshot(salts[i], tuple(mine.written))
                    opened.append((mine, fresh))
                else:
                    cause, length = OUT_OF_BLOCKS, 0
            seq_ids.append(seq_id)
            status.append(cause)
            num_cached.append(length)
        # Cached blocks are pinned before any block is allocated.
        for group, blocks in zip(self.groups, claimed, strict=True):
            group.free = [block for block in group.free if block not in blocks]
        for mine, fresh in opened:
            self._extend(mine, fresh)
        return seq_ids, self._settle(status, opened=seq_ids), num_cached

    def can_allocate(self, num_tokens):
        """Return the requests that `allocate` would serve; nothing changes."""
        return [cause == OK for cause in self.copy().allocate(num_tokens)[1]]

    def find(self, prompt, salt):
        """Return a prompt's cached blocks by group, and the number of cached tokens.

        None marks a block that no later row needs, cached or not.
        """
        T, nothing = self.block_size, [None] * len(self.groups)
        usable = min(max(len(prompt) - 1, 0), self.max_context)  # computes one token
        chain = [
            self.index.get((salt, tuple(prompt[:end])), nothing)
            for end in range(T, usable + 1, T)
        ]
        while any(
            chain[column][g] is None
            for g, group in enumerate(self.groups)
            for column in group.seen(len(chain) * T)
        ) or (
            self.states
            and chain
            and (salt, tuple(prompt[: len(chain) * T])) not in self.snapshots
        ):
            chain.pop()
        start = len(chain) * T
        partial = [
            common(tokens[start:], prompt[start:usable])
            for (own_salt, tokens), blocks in self.index.items()
            if (own_salt, tokens[:start]) == (salt, tuple(prompt[:start]))
            and len(tokens) == start + T
            and None not in blocks
            and not self.states  # a state cannot continue from within a block
        ]
        length = start + min(max(partial, default=0), T - 1)
        tables = []
        for g, group in enumerate(self.groups):
            seen = group.seen(length)
            tables.append([b[g] if i in seen else None for i, b in enumerate(chain)])
        return tables, length

    def commit(self, batch):
        """Make full blocks visible; replace a block by an equal visible one."""
        T, lead = self.block_size, self.leader
        counts = {
            block: self.reference_count(block, lead)
            for group in self.groups[lead : lead + 1]
            for block in range(group.num_blocks)
        }
        exchanges, visited = [[] for _ in self.groups], []
        for i, seq_id in enumerate(batch.seq_ids):
            mine, end = self.open.get(seq_id), batch.context_lengths[i]
            start = end - batch.query_lengths[i]
            if (
                batch.query_lengths[i] == 0
                or mine is None
                or mine.epoch != batch.epochs[i]
                or mine.visible != start
                or len(mine.tokens) < end
                # A later step released the blocks before this one.
                or (
                    self.groups
                    and start >= T
                    and mine.tables[lead][start // T - 1] is None
                )
            ):
                continue
            mine.visible = end
            visited.append((mine, end))
            for column in range(start // T, end // T) if self.groups else ():
                own = [table[column] for table in mine.tables]
                tokens = tuple(mine.tokens[: (column + 1) * T])
                is_told = all(token >= 0 for token in tokens[column * T :])
                is_gone = own[lead] is None
                is_alone = not is_gone and counts[own[lead]] == 1
                is_known = (mine.salt, tokens) in self.index
                if is_gone or not is_told or not (is_alone or is_known):
                    mine.visible = column * T
                    break
                known = self.index.setdefault((mine.salt, tokens), list(own))
                for g, block in enumerate(own):
                    if known[g] is None:
                        known[g] = block
                    elif block is not None and block != known[g]:
                        exchanges[g].append((mine, column, known[g]))
        for g, group in enumerate(self.groups):
            gone = []
            for mine, column, block in exchanges[g]:
                gone.append(mine.tables[g][column])
                mine.tables[g][column] = block
                group.free = [each for each in group.free if each != block]
            # A block is freed with its last reference.
            for i, block in enumerate(gone):
                self._drop(g, block, kept=gone[i + 1 :])

        for mine, end in visited if self.states else ():
            if mine.visible == end == len(mine.tokens) and -1 not in mine.written:
                self._take_snapshot(mine)

    def _take_snapshot(self, mine):
        """Store a sequence's state if its length is a multiple."""
        if len(mine.tokens) % self.states.snapshot_every:
            return
        key = mine.salt, tuple(mine.written)
        if key in self.snapshots:
            self._use_snapshot(*key)
            return
        if len(self.snapshots) == self.states.num_snapshots:
            del self.snapshots[next(iter(self.snapshots))]
        self.snapshots[key] = mine.base

    def forget(self, salt=None):
        """Remove one salt, or all; open sequences' blocks never become visible."""
        for own_salt, sequence in list(self.snapshots):
            if salt in (None, own_salt):
                del self.snapshots[own_salt, sequence]
        for own_salt, tokens in list(self.index):
            if salt in (None, own_salt):
                del self.index[own_salt, tokens]
        for each in self.open.values():
            if each.tokens and salt in (None, each.salt):
                each.visible = None
        self.demote(-1)

    def demote(self, time):
        """Reset unindexed and expired free blocks to priority 0.

        Their order is as if they had always had it.
        """
        for g, group in enumerate(self.groups):
            known = self.known(g)
            old = {b for b in group.free if group.kept_until[b] <= time}
            group.reset({*range(group.num_blocks)} - {*known} | old)

    def evict_cached(self, num_blocks):
        """Remove the longest free cached blocks of each group from the index."""
        if not self.groups:
            for key in list(self.snapshots)[: max(num_blocks, 0)]:
                del self.snapshots[key]
        known = [self.known(g) for g in range(len(self.groups))]
        for g, group in enumerate(self.groups):
            cached = [block for block in group.order if block in known[g]]
            self._forget(g, cached[: max(num_blocks, 0)])
            group.lower(cached[: max(num_blocks, 0)])

    def _fresh(self, count, tables, length):
        """Return the new blocks of each group that a sequence needs."""
        total = self._blocks_for(max(count, length))
        part = int(length % self.block_size > 0)
        return [
            max(min(total - len(t), group.reserved(total) - len(held(t))), part)
            for group, t in zip(self.groups, tables, strict=True)
        ]


def common(first, second):
    """Return the length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
