"""What prefix caching adds to the plain-Python cache.

A prefix is known by its tokens, all of them, and nothing of hashes: the index is a dict
from a domain and the tokens up to a block's end to that block. A block in it that is
free is cached; it is forgotten when it is taken.
"""

from typing import Any

from oracle.cache import OK, OUT_OF_BLOCKS, PADDING
from oracle.moving import Oracle


class PrefixOracle(Oracle):
    """A cache that finds prompts again."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        # (salt, all tokens up to a block's end): the block.
        self.index: dict[tuple[int, tuple[Any, ...]], int] = {}

    def allocate(self, num_tokens, prompts=None, salts=None):
        """Open one sequence per request; returns (seq_ids, status, num_cached)."""
        self._begin()
        prompts = prompts or [[]] * len(num_tokens)
        salts = salts or [0] * len(num_tokens)
        found = [self.find(*each) for each in zip(prompts, salts, strict=True)]
        free_before, claimed = set(self.free_blocks), set()
        seq_ids, status, fresh = [], [], []
        for count, salt, (blocks, length) in zip(num_tokens, salts, found, strict=True):
            # Blocks that are free are claimed by the first that finds them.
            revived = free_before & (set(blocks) - {None})
            more = max(self._blocks_for(count), self._blocks_for(length)) - len(blocks)
            cause = self._why_not_open(count)
            if cause == OK and count != PADDING:
                if not self._fits_with(more, revived, claimed):
                    cause = OUT_OF_BLOCKS
            seq_id = PADDING
            if cause == OK and count != PADDING:
                claimed |= revived
                seq_id = self._open(list(blocks))
                self.open[seq_id].salt = salt
                self.open[seq_id].num_gone = blocks.count(None)
            seq_ids.append(seq_id)
            status.append(cause)
            fresh.append(more)
        # What was found is pinned before any block is taken.
        self.free_blocks = [b for b in self.free_blocks if b not in claimed]
        num_cached = [0] * len(seq_ids)
        for i, seq_id in enumerate(seq_ids):
            if seq_id != PADDING:
                num_cached[i] = found[i][1]
                mine = self.open[seq_id]
                mine.table += self._take(fresh[i])
                mine.tokens = list(prompts[i][: num_cached[i]])
                mine.visible = num_cached[i]
        self._tick(opened=seq_ids)
        return seq_ids, self._count(status), num_cached

    def find(self, prompt, salt):
        """The visible blocks of a prompt's beginning, and how many tokens are found,
        those of a block that only begins like the rest included.

        With a window None stands for a block that no row behind them sees, whether the
        index has it or not.
        """
        T = self.block_size
        usable = min(max(len(prompt) - 1, 0), self.max_context)  # one is computed
        blocks = [
            self.index.get((salt, tuple(prompt[:end])))
            for end in range(T, usable + 1, T)
        ]
        while any(blocks[i] is None for i in self._seen_columns(len(blocks) * T)):
            blocks.pop()
        start = len(blocks) * T
        partial = [
            common(tokens[start:], prompt[start:usable])
            for domain, tokens in self.index
            if (domain, tokens[:start]) == (salt, tuple(prompt[:start]))
            and len(tokens) == start + T
        ]
        length = start + min(max(partial, default=0), T - 1)
        seen = self._seen_columns(length)
        return [b if i in seen else None for i, b in enumerate(blocks)], length

    def commit(self, batch):
        """Make full blocks visible; a block equal to a visible one gives way to it."""
        T = self.block_size
        before = dict(self.index)
        counts = [self.reference_count(block) for block in range(self.num_blocks)]
        given_back = []
        for i, seq_id in enumerate(batch.seq_ids):
            mine, end = self.open.get(seq_id), batch.context_lengths[i]
            start = end - batch.query_lengths[i]
            if (
                batch.query_lengths[i] == 0
                or mine is None
                or mine.epoch != batch.epochs[i]
                or mine.visible != start
                or len(mine.tokens) < end
                # A later step gave back what this one went on from.
                or (start >= T and mine.table[start // T - 1] is None)
            ):
                continue
            mine.visible = end
            for column in range(start // T, end // T):
                key = self._key(mine, column)
                is_told = all(token >= 0 for token in key[1][column * T :])
                is_gone = mine.table[column] is None
                is_alone = not is_gone and counts[mine.table[column]] == 1
                if is_gone or not is_told or not (is_alone or key in before):
                    mine.visible = column * T
                    break
                if self.index.setdefault(key, mine.table[column]) != mine.table[column]:
                    given_back.append((mine, column))
        gone = []
        for mine, column in given_back:
            gone.append(mine.table[column])
            mine.table[column] = theirs = self.index[self._key(mine, column)]
            if theirs in self.free_blocks:
                self.free_blocks.remove(theirs)
        # A block is back with the last that gave it up.
        for i, block in enumerate(gone):
            if self.reference_count(block) == 0 and block not in gone[i + 1 :]:
                self.free_blocks.append(block)

    def forget(self, salt=None):
        """Forget one domain, or all; what its sequences hold never becomes visible."""
        gone = {key for key in self.index if salt in (None, key[0])}
        self.index = {k: block for k, block in self.index.items() if k not in gone}
        for each in self.open.values():
            if each.tokens and salt in (None, each.salt):
                each.visible = None

    def evict_cached(self, num_blocks):
        """Forget the cached blocks that have been free longest."""
        visible = set(self.index.values())
        cached = [block for block in self.free_blocks if block in visible]
        self._forget(cached[: max(num_blocks, 0)])

    # What the index changes elsewhere: visible blocks stay longest, those taken or cut
    # are forgotten, and all have new numbers when blocks have.

    def visible_blocks(self):
        return set(self.index.values())

    def _not_to_be_lost(self):
        return super()._not_to_be_lost() | self.visible_blocks()

    def _first_to_leave(self):
        visible = set(self.index.values())
        return sorted(self.free_blocks, key=lambda block: block in visible)

    def _forget(self, blocks):
        self.index = {k: b for k, b in self.index.items() if b not in blocks}

    def _forget_from(self, block):
        if self.window is not None:  # what followed is known without it
            return self._forget([block])
        for salt, tokens in [k for k, b in self.index.items() if b == block]:
            self.index = {
                (domain, text): b
                for (domain, text), b in self.index.items()
                if (domain, text[: len(tokens)]) != (salt, tokens)
            }

    def _rename(self, number):
        super()._rename(number)
        self.index = {key: number[block] for key, block in self.index.items()}

    def _seen_columns(self, length):
        """The full columns before a length that sinks and the next row need."""
        columns = range(length // self.block_size)
        if self.window is None:
            return columns
        first = max(length - self.window + 1, 0) // self.block_size
        return [i for i in columns if i < self.num_sinks or i >= first]

    def _key(self, sequence, column):
        return sequence.salt, tuple(sequence.tokens[: (column + 1) * self.block_size])

    def _fits_with(self, more, revived, claimed):
        """Whether a request gets its blocks, cached ones it revives included."""
        need = more + len(revived - claimed)
        if need <= 0 and revived:  # it names a free block all the same
            return not self.is_shut
        return self._fits(need)


def common(first, second):
    """How many tokens two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
