"""The block pool of a group of layers, and its window."""

from collections import Counter


class Group:
    """The blocks of a group, and the table columns that its layers need."""

    def __init__(self, num_blocks, block_size, window=None, num_sink_tokens=0):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.window = window  # tokens that a row attends to, itself included; None: all
        self.num_sink_tokens = num_sink_tokens
        self.num_sinks = -(-num_sink_tokens // block_size)  # blocks always kept
        self.free = list(range(num_blocks))  # longest free first
        # Retention priority (default 0) and deadline of kept blocks.
        self.classes, self.kept_until = Counter(), Counter()

    @property
    def order(self):
        """Return the free blocks in eviction order: lower priorities first."""
        return sorted(self.free, key=lambda block: self.classes[block])

    def keep(self, block, keep, until):
        """Raise a block's priority and deadline to at least these."""
        self.classes[block] = max(self.classes[block], keep)
        self.kept_until[block] = max(self.kept_until[block], until)

    def lower(self, blocks):
        """Reset removed blocks to priority 0, at the end of its order."""
        for block in blocks:
            if self.classes[block] and block in self.free:
                self.free.remove(block)
                self.free.append(block)
            self.reset([block])

    def reset(self, blocks):
        """Set blocks to priority 0."""
        for block in blocks:
            del self.classes[block], self.kept_until[block]

    def gone(self, length):
        """Return the columns that no row from this length on needs, without sinks."""
        if self.window is None:
            return range(0)
        return range(
            self.num_sinks, max(length - self.window + 1, 0) // self.block_size
        )

    def seen(self, length):
        """Return the full columns that a sequence needs to continue from a length."""
        gone = self.gone(length)
        return [i for i in range(length // self.block_size) if i not in gone]

    def can_go_on(self, table, length):
        """Return True if all blocks needed at this position are kept."""
        return length == 0 or table.count(None) <= len(self.gone(length))

    def kept_from(self, table):
        """Return the first kept position after the sinks; 0 if all are kept."""
        num_gone = table.count(None)
        return (self.num_sinks + num_gone) * self.block_size if num_gone else 0

    def reserved(self, blocks):
        """Return the most of a sequence's blocks that it holds at once."""
        if self.window is None:
            return blocks
        return min(blocks, self.num_sinks + (self.window - 1) // self.block_size + 2)


def held(table):
    """Return the blocks of a table that were not released."""
    return [block for block in table if block is not None]
