"""Automata as logits processors: in JAX as jkv takes them, and in plain Python.

Each state of a random automaton allows some tokens, and leads on by each. In some a
text has ended, some allow one token, one allows none. Where a text begins depends on
its prompt, so that a lost or wrong prompt shows.
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
    """Automata; each text has one, or none."""

    follows: jax.Array  # i32[A, S, V], the next state, -1 where a token is not allowed
    ends: jax.Array  # bool[A, S], where texts have ended
    only: jax.Array  # i32[A, S], the one token that is allowed, -1 for several

    @property
    def num_variants(self):
        return self.follows.shape[0]

    @property
    def num_end_tokens(self):
        return 4

    def begin(self, variants, prompts):
        total = jnp.sum(jnp.maximum(prompts, 0), axis=1)
        # More arrays than it needs, of several types and shapes.
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
    """Random automata, with arrays on the host."""
    rng = np.random.default_rng(seed)
    shape = num_variants, NUM_STATES, vocabulary
    follows = rng.integers(0, NUM_STATES, shape).astype(np.int32)
    # Few lead to the dead state or to an end.
    rare = rng.random(shape) < 0.85
    follows = np.where(rare & (follows >= DEAD), follows % DEAD, follows)
    # A token of each state ends a text, if it is allowed.
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
    """One automaton's masks for one text."""

    def __init__(self, automata, variant, prompt):
        self.follows, self.ends = automata.follows[variant], automata.ends[variant]
        self.start, self.applies = sum(prompt) % DEAD, variant >= 0

    def find_state(self, new):
        """The state after new tokens, -1 past one that was not allowed."""
        state = self.start
        for token in new:
            state = self.follows[state, token]
        return state

    def allowed(self, new):
        """Which tokens may come next, bool[V]."""
        allowed = self.follows[self.find_state(new)] >= 0
        return allowed if self.applies else np.ones_like(allowed)

    def has_ended(self, new):
        return self.applies and bool(self.ends[self.find_state(new)])
