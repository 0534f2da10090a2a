"""Read a grammar's arrays on the host."""

import numpy as np


class HostGrammar:
    """A grammar's masks and transitions in numpy."""

    def __init__(self, grammar):
        self.grammar = grammar
        names = "class_of_token transitions transition_pieces row_of_state masks"
        names += (
            " mask_pieces variant_of_state mask_of_state forced_token starts end_tokens"
        )
        self.arrays = {
            name: np.asarray(getattr(grammar, name)) for name in names.split()
        }
        self.ends = set(self.arrays["end_tokens"].tolist())
        self.ended = grammar.num_states + 1

    def start(self, variant=0):
        return int(self.arrays["starts"][variant])

    def allowed(self, state):
        pieces = self.arrays["masks"][self.arrays["mask_of_state"][state]]
        words = self.arrays["mask_pieces"][pieces].reshape(-1)
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def advance(self, state, token):
        arrays = self.arrays
        column = arrays["class_of_token"][arrays["variant_of_state"][state], token]
        place = int(arrays["row_of_state"][state]) + int(column) // 16
        return int(
            arrays["transition_pieces"][arrays["transitions"][place], column % 16]
        )

    def follow(self, tokens, variant=0):
        state = self.start(variant)
        for token in tokens:
            state = self.advance(state, token)
        return state
