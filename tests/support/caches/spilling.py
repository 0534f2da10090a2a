"""Random operations with cached blocks that spill to the host and are restored."""

import pickle

import jkv
from support.caches.random_reuse import ReuseGame
from support.states.random_states import StateGame


def sequences_of(spilled):
    """Return the salt and the tokens of each spilled block's prefix, in order."""
    return [
        (int(spilled.salts[node]), tuple(spilled.tokens_of(node).tolist()))
        for node in range(len(spilled.parents))
    ]


class Spilling:
    """Mixin: a host tier keeps blocks before the pool evicts them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = []  # spilled blocks, with the oracle's copy
        self.num_restored = 0

    def play_spill(self):
        num_blocks = int(self.rng.integers(-1, 9))
        expected = self.oracle.spill(num_blocks)
        self.cache, spilled = jkv.spill(self.cache, num_blocks)
        self.compare_spilled(spilled, *expected)
        if self.rng.random() < 0.3:
            spilled = pickle.loads(pickle.dumps(spilled))
        self.kept = [*self.kept[-5:], (spilled, *expected)]

    def compare_spilled(self, spilled, blocks, places, kept):
        sequences, found = sequences_of(spilled), {}
        assert len(set(sequences)) == len(sequences)
        for node, held in spilled.held.items():
            if held.groups:
                found[sequences[node]] = held.groups
        assert found == blocks
        nodes = [node for node, held in spilled.held.items() if held.has_snapshot]
        assert {sequences[node] for node in nodes} == {*places}
        keep = {sequences[node]: held.keep for node, held in spilled.held.items()}
        assert {t: k for t, k in keep.items() if k}.items() <= kept.items()

    def play_restore(self):
        if not self.kept:
            return
        spilled, *expected = self.kept[int(self.rng.integers(len(self.kept)))]
        sequences = sequences_of(spilled)
        nodes = [node for node, held in spilled.held.items() if held.has_snapshot]
        expected = self.oracle.restore(
            sequences, *expected, [sequences[node] for node in nodes]
        )
        donate = bool(self.rng.integers(2)) and self.donate
        self.cache, num_restored = jkv.restore(self.cache, spilled, donate=donate)
        assert num_restored == expected
        self.num_restored += num_restored

    def plays(self):
        return [
            *super().plays(),
            (self.play_spill, 10),
            (self.play_restore, 20),
            (self.play_free, 8),
        ]


class SpillGame(Spilling, ReuseGame):
    """Random operations with prompts."""


class StateSpillGame(Spilling, StateGame):
    """Random operations with prompts and recurrent states."""
