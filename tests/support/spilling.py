"""The game of random operations in which cached blocks go to the host and come back."""

import pickle

import jkv
from support.random_reuse import ReuseGame
from support.random_states import StateGame


def texts_of(spilled):
    """The salt and all tokens of each spilled column, in order."""
    return [
        (int(spilled.salts[node]), tuple(spilled.text_of(node).tolist()))
        for node in range(len(spilled.parents))
    ]


class Spilling:
    """A game's addition: a host that keeps blocks before the pool loses them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = []  # spilled blocks, and the oracle's copy of them
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
        texts, found = texts_of(spilled), {}
        assert len(set(texts)) == len(texts)
        for node, held in spilled.held.items():
            if held.groups:
                found[texts[node]] = held.groups
        assert found == blocks
        nodes = [node for node, held in spilled.held.items() if held.has_snapshot]
        assert {texts[node] for node in nodes} == {*places}
        keep = {texts[node]: held.keep for node, held in spilled.held.items()}
        assert {t: k for t, k in keep.items() if k}.items() <= kept.items()

    def play_restore(self):
        if not self.kept:
            return
        spilled, *expected = self.kept[int(self.rng.integers(len(self.kept)))]
        texts = texts_of(spilled)
        nodes = [node for node, held in spilled.held.items() if held.has_snapshot]
        expected = self.oracle.restore(
            texts, *expected, [texts[node] for node in nodes]
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
    """A game of prompts."""


class StateSpillGame(Spilling, StateGame):
    """A game of prompts and states."""
