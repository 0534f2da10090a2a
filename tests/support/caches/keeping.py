"""Random operations on cached blocks with retention priorities."""

import jkv
from support.caches.random_operations import BATCH_SIZE, CHANGING, LOOKING, make_verbs
from support.caches.random_reuse import FORGETTING, ReuseGame, allocate_prompts, match
from support.caches.spilling import SpillGame
from support.oracle.cache import PADDING

NUM_CLASSES = 3


def free_kept(cache, seq_ids, keep):
    return jkv.free(cache, seq_ids, keep=keep)


def free_until(cache, seq_ids, keep, until):
    return jkv.free(cache, seq_ids, keep=keep, keep_until=until)


def demote(cache, time):
    return jkv.demote(cache, time)


def make_keeping_verbs(mode):
    keeping = [free_kept, free_until, demote]
    changing = [*CHANGING, allocate_prompts, *FORGETTING, *keeping]
    return make_verbs(mode, changing, [*LOOKING, match])


class Keeping:
    """Mixin: sequences are freed with priorities, and blocks age."""

    keep_classes = NUM_CLASSES

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.oracle.num_classes = NUM_CLASSES
        self.num_kept = 0  # blocks with a priority seen after a call

    def play_free(self):
        seq_ids = self.pick_seq_ids()
        if self.rng.random() < 0.7:
            seq_ids[2:] = [PADDING] * (BATCH_SIZE - 2)
        keep = self.rng.integers(NUM_CLASSES, size=BATCH_SIZE).tolist()
        if self.rng.random() < 0.1:
            keep[0] = int(self.rng.choice([-1, NUM_CLASSES, 2**31 - 1]))
        if self.rng.random() < 0.5:
            expected = self.oracle.free(seq_ids, keep)
            self.cache, status = self.call("free_kept", seq_ids, keep)
        else:
            until = self.oracle.clock + self.rng.integers(-3, 9, size=BATCH_SIZE)
            until = until.clip(0).tolist()
            expected = self.oracle.free(seq_ids, keep, until)
            self.cache, status = self.call("free_until", seq_ids, keep, until)
        self.compare_status(status, expected)

    def play_demote(self):
        time = max(self.oracle.clock - int(self.rng.integers(-1, 12)), 0)
        self.oracle.demote(time)
        self.cache = self.call("demote", time)

    def plays(self):
        return [*super().plays(), (self.play_demote, 2)]

    def compare_group(self, found, g):
        super().compare_group(found, g)
        group, kept = self.oracle.groups[g], found.free_blocks.kept
        blocks = range(group.num_blocks)
        assert kept.classes.tolist() == [group.classes[block] for block in blocks]
        assert kept.kept_until.tolist() == [group.kept_until[b] for b in blocks]
        self.num_kept += sum(group.classes[block] > 0 for block in group.free)


class KeepingGame(Keeping, ReuseGame):
    """Random operations with prompts and priorities."""


class KeepingSpillGame(Keeping, SpillGame):
    """Random operations with prompts, priorities and spilled blocks."""
