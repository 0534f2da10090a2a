"""A pool of blocks for a group of layers, and the needs of its window."""

from collections import Counter


class Group:
    """The blocks of a group, and the columns of a table that its layers see."""

    def __init__(self, num_blocks, block_size, window=None, num_sink_tokens=0):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.window = window  # tokens that a row sees, itself counted; None: all
        self.num_sink_tokens = num_sink_tokens
        self.num_sinks = -(-num_sink_tokens // block_size)  # blocks always kept
        self.free = list(range(num_blocks))  # the longest unused first
        # Of blocks that were kept: the class, 0 of all others, and up to when.
        self.classes, self.kept_until = Counter(), Counter()

    @property
    def order(self):
        """The free blocks in the order in which they leave: lower classes first."""
        return sorted(self.free, key=lambda block: self.classes[block])

    def keep(self, block, keep, until):
        """Raise a block to this class and time, if they are higher than its own."""
        self.classes[block] = max(self.classes[block], keep)
        self.kept_until[block] = max(self.kept_until[block], until)

    def lower(self, blocks):
        """Forgotten blocks get class 0, and leave last in it."""
        for block in blocks:
            if self.classes[block] and block in self.free:
                self.free.remove(block)
                self.free.append(block)
            self.reset([block])

    def reset(self, blocks):
        """Set blocks to class 0."""
        for block in blocks:
            del self.classes[block], self.kept_until[block]

    def gone(self, length):
        """The columns that no row from this length on sees, except sinks."""
        if self.window is None:
            return range(0)
        return range(
            self.num_sinks, max(length - self.window + 1, 0) // self.block_size
        )

    def seen(self, length):
        """The full columns that a sequence needs to go on from a length."""
        gone = self.gone(length)
        return [i for i in range(length // self.block_size) if i not in gone]

    def can_go_on(self, table, length):
        """True if all that the row at this position sees is kept; at 0 it sees none."""
        return length == 0 or table.count(None) <= len(self.gone(length))

    def kept_from(self, table):
        """The first position that is kept, but for the sinks; 0 if nothing is gone."""
        num_gone = table.count(None)
        return (self.num_sinks + num_gone) * self.block_size if num_gone else 0

    def reserved(self, blocks):
        """How many of the blocks of a text are reserved: what a sequence that grows
        token by token has at one time, wherever in a block its window begins."""
        if self.window is None:
            return blocks
        return min(blocks, self.num_sinks + (self.window - 1) // self.block_size + 2)


def held(table):
    """The blocks of a table that were not given back."""
    return [block for block in table if block is not None]
