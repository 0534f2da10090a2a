"""Random automata as logits processors, in JAX and in plain Python.

Each state allows some tokens and has a successor for each. Some states are final, some
allow one token, one allows none. The initial state depends on the prompt, so that a
lost or wrong prompt is detected.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jkv

NUM_STATES, DEAD, END = 9, 7, 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Automata(jkv.LogitsProcessor):
    """Automata; a sequence has one or none."""

    follows: jax.Array  # i32[A, S, V], the next state, -1 for a masked token
    ends: jax.Array  # bool[A, S], final states
    only: jax.Array  # i32[A, S], the only allowed token, -1 for several

    @property
    def num_variants(self):
        return self.follows.shape[0]

    @property
    def num_end_tokens(self):
        return 4

    def begin(self, variants, prompts):
        total = jnp.sum(jnp.maximum(prompts, 0), axis=1)
        # More arrays than needed, of several dtypes and shapes.
        return {
            "at": (total % DEAD).astype(jnp.int32),
            "variant": variants,
            "seen": jnp.zeros((len(variants), 2, 3), jnp.float32),
        }

    def process(self, state, logits):
        allowed = self.follows[state["variant"], state["at"]] >= 0
        return jnp.where(allowed, logits, -jnp.inf)

    def advance(self, state, tokens):
        follows = self.follows[state["variant"], state["at"], tokens]
        at = jnp.where(tokens < 0, state["at"], jnp.where(follows < 0, DEAD, follows))
        return state | {"at": at, "seen": state["seen"] + 1}

    def ended(self, state):
        return self.ends[state["variant"], state["at"]]

    def forced(self, state):
        return self.only[state["variant"], state["at"]]


def make_automata(seed, num_variants, vocabulary):
    """Create random automata, with arrays on the host."""
    rng = np.random.default_rng(seed)
    shape = num_variants, NUM_STATES, vocabulary
    follows = rng.integers(0, NUM_STATES, shape).astype(np.int32)
    # Few transitions lead to the dead state or to a final one.
    rare = rng.random(shape) < 0.85
    follows = np.where(rare & (follows >= DEAD), follows % DEAD, follows)
    # One token of each state ends the sequence, if it is allowed.
    last = np.random.default_rng([seed, END]).integers(3, vocabulary, shape[:2])
    np.put_along_axis(follows, last[:, :, None], END, axis=2)
    follows = np.where(rng.random(shape) < 0.6, -1, follows)
    follows[:, DEAD] = -1
    for variant in range(num_variants):
        for state in (1, 4, 5):
            token = rng.integers(vocabulary)
            follows[variant, state] = -1
            follows[variant, state, token] = rng.integers(DEAD)
    ends = np.zeros(shape[:2], bool)
    ends[:, END] = True
    is_one = (follows >= 0).sum(axis=2) == 1
    only = np.where(is_one, np.argmax(follows >= 0, axis=2), -1).astype(np.int32)
    return Automata(follows=follows, ends=ends, only=only)


class PlainAutomaton:
    """The masks of one automaton for one sequence."""

    def __init__(self, automata, variant, prompt):
        self.follows, self.ends = automata.follows[variant], automata.ends[variant]
        self.start, self.applies = sum(prompt) % DEAD, variant >= 0

    def find_state(self, new):
        """Return the state after new tokens, -1 after a masked one."""
        state = self.start
        for token in new:
            state = self.follows[state, token]
        return state

    def allowed(self, new):
        """Return the mask of allowed next tokens, bool[V]."""
        allowed = self.follows[self.find_state(new)] >= 0
        return allowed if self.applies else np.ones_like(allowed)

    def has_ended(self, new):
        return self.applies and bool(self.ends[self.find_state(new)])
