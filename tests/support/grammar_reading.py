"""A grammar's arrays read on the host, in plain words."""

import numpy as np


class HostGrammar:
    """Which tokens a state allows, and where they lead, without JAX."""

    def __init__(self, grammar):
        self.grammar = grammar
        names = "class_of_token transitions row_of_state variant_of_state masks"
        names += " mask_of_state forced_token starts end_tokens"
        self.arrays = {
            name: np.asarray(getattr(grammar, name)) for name in names.split()
        }
        self.ends = set(self.arrays["end_tokens"].tolist())
        self.ended = grammar.num_states + 1

    def start(self, variant=0):
        return int(self.arrays["starts"][variant])

    def allowed(self, state):
        words = self.arrays["masks"][self.arrays["mask_of_state"][state]]
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def advance(self, state, token):
        arrays = self.arrays
        column = arrays["class_of_token"][arrays["variant_of_state"][state], token]
        place = int(arrays["row_of_state"][state]) + int(column)
        return int(arrays["transitions"][place])

    def follow(self, tokens, variant=0):
        state = self.start(variant)
        for token in tokens:
            state = self.advance(state, token)
        return state
