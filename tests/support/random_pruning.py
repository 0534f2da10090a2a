"""The games of random operations on caches whose sequences are pruned.

Selections are of several kinds by name, since faults hide in the borders between them:
whole blocks that go together with single tokens after them, shared and cached blocks
that move, and different tokens in each layer and head.
"""

from collections import Counter

import numpy as np

import jkv
from support.oracle.cache import OK
from support.random_operations import (
    BATCH_SIZE,
    CHANGING,
    LOOKING,
    Game,
    i32,
    make_verbs,
    same,
)
from support.random_reuse import FORGETTING, ReuseGame, allocate_prompts, match
from support.random_states import StateGame, make_state_verbs

KINDS = ["blocks", "tokens", "both", "end", "scattered", "newest", "all", "none"]


def prune(cache, seq_ids, kept, num_kept):
    return jkv.prune(cache, seq_ids, kept, num_kept)


def prune_heads(cache, seq_ids, kept, num_kept):
    return jkv.prune(cache, seq_ids, kept, num_kept)


def make_pruning_verbs(mode):
    """The verbs of both games."""
    changing = [*CHANGING, allocate_prompts, *FORGETTING, prune, prune_heads]
    return make_verbs(mode, changing, [*LOOKING, match])


def make_pruned_state_verbs(mode):
    """The verbs of `StateGame`, and prune."""
    pruning = make_pruning_verbs(mode)
    return make_state_verbs(mode) | {n: pruning[n] for n in ("prune", "prune_heads")}


class Pruning:
    """A game in which sequences drop tokens."""

    pruning = True
    num_kv_heads = 2

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.num_pruned = Counter()  # by kind

    @property
    def width(self):
        return self.oracle.max_context + 2

    def heads_of(self, g):
        """The heads of a group of layers: (layer, number)."""
        layers = [i for i, of in enumerate(self.layer_groups) if of == g]
        return [(layer, head) for layer in layers for head in range(self.num_kv_heads)]

    def pick_kept(self, length):
        """Slots of a sequence, and the kind of this selection."""
        rng, size = self.rng, self.oracle.block_size
        slots = np.arange(length)
        blocks = slots // size
        kinds = [
            "blocks",
            "tokens",
            "both",
            "end",
            "scattered",
            "newest",
            "all",
            "none",
        ]
        kind = kinds[rng.choice(8, p=[0.2, 0.1, 0.2, 0.1, 0.15, 0.15, 0.05, 0.05])]
        gone = np.zeros(length, bool)
        if kind in ("blocks", "both") and length:
            first = int(rng.integers(blocks[-1] + 1))
            gone |= (blocks >= first) & (blocks < first + int(rng.integers(1, 4)))
        if kind in ("tokens", "both") and length:
            first = int(rng.integers(length))
            gone |= (slots >= first) & (slots < first + int(rng.integers(1, 4)))
        if kind == "end" or (kind == "both" and rng.random() < 0.3):
            gone |= slots >= rng.integers(length + 1)
        if kind == "scattered":
            gone = rng.random(length) < rng.random()
        if kind == "newest":
            first = int(rng.integers(length + 1))
            gone = (slots >= first) & (slots < length - int(rng.integers(length + 1)))
        if kind == "none":
            gone[:] = True
        return [int(slot) for slot in slots[~gone]], kind

    def play_prune(self):
        """Some sequences keep some of their tokens."""
        seq_ids, kinds = self.pick_seq_ids(), []
        own = self.rng.random() < 0.4  # each head its own tokens
        heads = [self.heads_of(g) for g in range(len(self.pools))]
        full = [g for g, pool in enumerate(self.pools) if not pool.window]
        chosen = [head for g in full for head in heads[g]] or heads[0]
        kept, num_kept = [], []
        for seq_id in seq_ids:
            length = len(self.oracle.tokens(seq_id))
            slots, kind = self.pick_kept(length)
            count = len(slots)
            mine = {head: list(slots) for head in chosen}
            if own and full:
                for head in chosen:
                    drawn = self.rng.permutation(length)[:count]
                    mine[head] = sorted(map(int, drawn))
            if self.rng.random() < 0.1:
                count = int(self.rng.choice([-1, count + 1, self.width + 1, 2**31 - 1]))
            rest = self.rng.integers(-3, 60, self.width)
            for head, of_head in mine.items():
                mine[head] = [*of_head, *rest[len(of_head) :]]
            if self.rng.random() < 0.1 and length:
                wrong = mine[chosen[-1]] if own and full else None
                for of_head in [wrong] if wrong else mine.values():
                    place = max(len(slots) - 1, 0) // 2
                    of_head[place] = int(slots[0] if slots else 0) + length * (
                        seq_id % 2
                    )
            kept.append(mine)
            num_kept.append(count)
            kinds.append(kind)
        expected = self.oracle.prune(seq_ids, kept, num_kept, heads, self.width)
        if own and full:
            arrays = tuple(
                i32([[of[head] for head in heads[g]] for of in kept]).reshape(
                    BATCH_SIZE, -1, self.num_kv_heads, self.width
                )
                for g in full
            )
            name, given = "prune_heads", arrays
        else:
            name, given = "prune", i32([of[chosen[0]] for of in kept])
        self.cache, status = self.verbs[name](
            self.cache, i32(seq_ids), given, i32(num_kept)
        )
        self.compare_status(status, expected)
        served = [k for k, cause in zip(kinds, expected, strict=True) if cause == OK]
        self.num_pruned.update(served)

    def plays(self):
        return [*super().plays(), (self.play_prune, 9)]

    def compare_state(self):
        super().compare_state()
        found = jkv.next_positions(self.cache)
        rows = range(self.oracle.max_sequences)
        same(found, [self.oracle.next_position(row) for row in rows])


class PruneGame(Pruning, Game):
    """A game with pruned sequences."""


class PruneStateGame(Pruning, StateGame):
    """A game with pruned sequences and states, which stay."""


class PruneReuseGame(Pruning, ReuseGame):
    """A game with pruned sequences and prefix caching."""
