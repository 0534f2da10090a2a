"""Random operations on caches with pruned sequences.

The kinds of selections cover the borders between cases: whole blocks dropped together
with single tokens after them, shared and cached blocks that move, and different tokens
in each layer and head.
"""

from collections import Counter

import jax
import numpy as np

import jkv
from support.caches.random_operations import (
    BATCH_SIZE,
    CHANGING,
    LOOKING,
    Game,
    i32,
    layers_with_blocks,
    make_verbs,
    same,
)
from support.caches.random_reuse import FORGETTING, ReuseGame, allocate_prompts, match
from support.oracle.cache import OK
from support.states.random_states import StateGame, make_state_verbs

KINDS = ["blocks", "tokens", "both", "end", "scattered", "newest", "all", "none"]


def prune(cache, seq_ids, kept, num_kept):
    return jkv.prune(cache, seq_ids, kept, num_kept)


def prune_heads(cache, seq_ids, kept, num_kept):
    return jkv.prune(cache, seq_ids, kept, num_kept)


def overwrite(cache, seq_ids, slots, keys, values):
    layer = layers_with_blocks(cache)[-1]
    return jkv.overwrite(cache, layer, seq_ids, slots, keys, values)


def scrub(cache):
    return jkv.scrub(cache)


def make_pruning_verbs(mode):
    """Return the verbs of `PruneGame` and `PruneReuseGame`."""
    dropping = [prune, prune_heads, overwrite, scrub]
    changing = [*CHANGING, allocate_prompts, *FORGETTING, *dropping]
    return make_verbs(mode, changing, [*LOOKING, match])


def make_pruned_state_verbs(mode):
    """Return the verbs of `StateGame`, and `prune`."""
    pruning = make_pruning_verbs(mode)
    own = "prune", "prune_heads", "overwrite", "scrub"
    return make_state_verbs(mode) | {n: pruning[n] for n in own}


class Pruning:
    """Mixin: sequences drop tokens."""

    pruning = True
    num_kv_heads = 2

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.num_pruned = Counter()  # by kind

    @property
    def width(self):
        return self.oracle.max_context + 2

    def heads_of(self, g):
        """Return the heads of a group of layers, (layer, number) each."""
        layers = [i for i, of in enumerate(self.layer_groups) if of == g]
        return [(layer, head) for layer in layers for head in range(self.num_kv_heads)]

    def pick_kept(self, length):
        """Return slots of a sequence, and the kind of the selection."""
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
        """Prune some sequences."""
        seq_ids, kinds = self.pick_seq_ids(), []
        own = self.rng.random() < 0.4  # separate tokens per head
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

    def play_overwrite(self):
        """Overwrite rows of the last layer."""
        layer = len(self.layer_groups) - 1
        seq_ids, contents = self.pick_seq_ids(), self.pick_contents()[:BATCH_SIZE]
        if self.rng.random() < 0.3:
            seq_ids[1:] = [seq_ids[0]] * (BATCH_SIZE - 1)
        slots = [max(length, -1) - 1 for length in self.pick_lengths(seq_ids)]
        expected = self.oracle.overwrite(
            layer, self.layer_groups[layer], seq_ids, slots, contents
        )
        rows = self.keys[layer][contents], self.values[layer][contents]
        self.cache, status = self.verbs["overwrite"](
            self.cache, i32(seq_ids), i32(slots), *rows
        )
        self.compare_status(status, expected)

    def play_scrub(self):
        """Scrub; slots outside tables and prefix index are zero afterwards."""
        self.cache = self.verbs["scrub"](self.cache)
        size, oracle = self.oracle.block_size, self.oracle
        for g, group in enumerate(oracle.groups):
            is_named = np.zeros((group.num_blocks, size), bool)
            for block in oracle.known(g):
                is_named[block] = True
            for mine in oracle.open.values():
                for slot in range(len(mine.tokens)):
                    block = mine.tables[g][slot // size]
                    if block is not None:
                        is_named[block, slot % size] = True
            storage = self.cache.storage[self.number_of(g)]
            for array in jax.device_get(storage.arrays).values():
                assert not np.moveaxis(array, 3, 2)[:, ~is_named].any()
        closed = [row for row in range(oracle.max_sequences) if row not in oracle.open]
        for storage in self.cache.storage:
            if storage.kind == "states":
                for array in jax.device_get([*storage.rows.values()]):
                    assert not array[:, closed].any()

    def plays(self):
        patches = [(self.play_overwrite, 4), (self.play_scrub, 1)]
        return [*super().plays(), (self.play_prune, 9), *patches]

    def compare_state(self):
        super().compare_state()
        found = jkv.next_positions(self.cache)
        rows = range(self.oracle.max_sequences)
        same(found, [self.oracle.next_position(row) for row in rows])


class PruneGame(Pruning, Game):
    """Random operations with pruned sequences."""


class PruneStateGame(Pruning, StateGame):
    """Random operations with pruned sequences and recurrent states, which stay."""


class PruneReuseGame(Pruning, ReuseGame):
    """Random operations with pruned sequences and prefix caching."""
