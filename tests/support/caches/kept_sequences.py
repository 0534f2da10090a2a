"""Sequences of the folding model with a past, and the expected tokens of each.

A cache is a value: a step is taken, compared and discarded to check that each sequence
still continues correctly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from support.states.folding_loops import SHARED, pools_of
from support.states.folding_model import (
    MODELS,
    SIZES,
    WITH_STATE,
    continue_prompt,
    make_config,
)

NUM_ROWS, NUM_SEQUENCES = 32, SIZES["max_sequences"]
PENDING = 3
SEQUENCE, OTHER = [*SHARED, 4, 2], [2, 1, 0, 4, 4, 1, 3, 0, 1, 1, 2]


@dataclasses.dataclass
class KeptSequences:
    """A cache and the tokens of its sequences.

    Pools of a mesh receive the same calls and must return the same results.
    """

    kind: str
    cache: jkv.Cache
    sequences: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    donates: bool = False  # steps donate the cache, which is copied first

    @property
    def has_state(self):
        return self.kind in WITH_STATE

    def copy(self):
        return dataclasses.replace(
            self,
            sequences={
                seq_id: [*sequence] for seq_id, sequence in self.sequences.items()
            },
        )

    def call(self, verb, *arguments, **options):
        """Call a verb, store its cache and return the other results."""
        arguments = jax.tree.map(np.asarray, arguments)
        if self.cache.pools is None:
            answer = verb(self.cache, *arguments, **options)
        else:
            num_ranks = self.cache.pools.num_ranks
            divided = jax.tree.map(lambda a: np.stack([a] * num_ranks), arguments)
            answer = jkv.over_pools(verb)(self.cache, *divided, **options)
        if isinstance(answer, jkv.Cache):
            self.cache = answer
            return None
        self.cache, rest = answer
        if self.cache.pools is not None:
            for leaf in jax.tree.leaves(rest):
                np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * num_ranks))
            rest = jax.tree.map(lambda leaf: leaf[0], rest)
        return rest

    def evaluate(self, question, *arguments):
        """Call a function that only reads the cache, and return its result."""
        return self.call(
            lambda cache, *given: (cache, question(cache, *given)), *arguments
        )

    def open(self, prompt=()):
        """Open a sequence; return its id and the number of cached tokens."""
        tokens = np.full((1, NUM_ROWS), -1, np.int32)
        tokens[0, : len(prompt)] = prompt
        opened = self.call(_open, tokens)
        jkv.raise_for_status(opened.status)
        seq_id, found = int(opened.seq_ids[0]), int(opened.num_cached[0])
        self.sequences[seq_id] = list(prompt[:found])
        return seq_id, found

    def open_anew(self, row, prompt=()):
        """Open a sequence in the given free row; return the number of cached tokens."""
        opened = {}
        while row not in opened:
            seq_id, found = self.open(prompt)
            opened[seq_id] = found
        found = opened.pop(row)
        if opened:
            jkv.raise_for_status(self.call(jkv.free, [*opened]))
        for seq_id in opened:
            del self.sequences[seq_id]
        return found

    def feed(self, seq_id, tokens, num_pending=0):
        """Compute more tokens of a sequence."""
        self.step({seq_id: tokens}, num_pending)

    def step(self, fed, num_pending=0):
        """Take a step, and compare the chosen tokens."""
        seq_ids = np.full(NUM_SEQUENCES, jkv.NO_SEQUENCE, np.int32)
        counts, rows = np.zeros(NUM_SEQUENCES, np.int32), np.zeros(NUM_ROWS, np.int32)
        new = np.concatenate([*fed.values()])
        seq_ids[: len(fed)], rows[: len(new)] = list(fed), new
        counts[: len(fed)] = [len(tokens) for tokens in fed.values()]
        pending = np.int32(num_pending) if self.has_state else np.int32(0)
        chosen, status = self.call(
            _step(self.kind, self.donates), seq_ids, counts, rows, pending
        )
        jkv.raise_for_status(status)
        for i, (seq_id, tokens) in enumerate(fed.items()):
            self.sequences[seq_id] += tokens
            assert [int(chosen[i])] == continue_prompt(
                self.sequences[seq_id], 1, self.kind
            )

    def check(self):
        """Assert that the cache is valid and holds exactly the expected sequences."""
        for cache in pools_of(self.cache):
            jkv.check(cache)
            lengths = [len(self.sequences.get(i, [])) for i in range(NUM_SEQUENCES)]
            assert cache.metadata.context_lengths.tolist() == lengths
            is_open = [i in self.sequences for i in range(NUM_SEQUENCES)]
            assert cache.metadata.is_open.tolist() == is_open
        if self.sequences:
            self.copy().step({seq_id: [1] for seq_id in self.sequences})


@jax.jit
def _open(cache, tokens):
    return jkv.allocate(cache, 0, tokens=tokens)


@functools.cache
def _step(kind, donates):
    @functools.partial(jax.jit, donate_argnums=(0,) if donates else ())
    def step(cache, seq_ids, counts, rows, num_pending):
        cache, batch = jkv.append(
            cache,
            seq_ids,
            counts,
            capacity=NUM_ROWS,
            tokens=rows,
            num_pending=jnp.full(seq_ids.shape, num_pending),
        )
        logits, cache = MODELS[kind](None, rows, cache, batch)
        chosen = jnp.argmax(logits, axis=-1)
        return jkv.commit(cache, batch), (chosen, batch.status)

    return step


# Pasts of sequence 0; another sequence always has the first one.


def compute(kind, _folder=None, *, num_pending=0, **where):
    """Compute the sequence in two steps, with a snapshot after the first."""
    kept = KeptSequences(kind, jkv.init(make_config(kind, pending=PENDING), **where))
    for sequence in (SEQUENCE, OTHER):
        seq_id, _ = kept.open()
        kept.feed(seq_id, sequence[:16])
        if sequence[16:]:
            kept.feed(seq_id, sequence[16:], num_pending)
    return kept


def find(kind, folder=None, **where):
    """Find most of the sequence in the prefix cache."""
    kept = compute(kind, folder, **where)
    jkv.raise_for_status(kept.call(jkv.free, [0]))
    found = kept.open_anew(0, SEQUENCE)
    assert found == (16 if kept.has_state else 20)
    kept.feed(0, SEQUENCE[found:])
    return kept


def guess(kind, folder=None, **where):
    """Compute the sequence with pending newest tokens."""
    return compute(kind, folder, num_pending=PENDING, **where)


def move_out_and_in(kind, folder=None, **where):
    """Swap the sequence out and in, while another sequence had its row and blocks."""
    kept = compute(kind, folder, **where)
    kept.cache, swapped = jkv.swap_out(kept.cache, [0, 1])
    others, kept.sequences = kept.sequences, {}
    for _ in range(NUM_SEQUENCES):
        kept.open()
    kept.step({0: [4] * 16, 1: [3] * 16})
    # Only the two rows are free when the sequences return.
    jkv.raise_for_status(kept.call(jkv.free, [0, 1]))
    kept.cache, back = jkv.swap_in(kept.cache, swapped)
    assert sorted(back.seq_ids.tolist()) == [0, 1]
    jkv.raise_for_status(kept.call(jkv.free, [*range(2, NUM_SEQUENCES)]))
    kept.sequences = others
    return kept


def load(kind, folder, **where):
    """Save the sequence to a file and load it."""
    kept = compute(kind, folder, **where)
    jkv.save(folder / "cache", kept.cache)
    kept.cache = jkv.load(folder / "cache", **where)
    return kept


PASTS = {"computed": compute, "hit": find, "guesses": guess}
MOVES = {"swap": move_out_and_in, "file": load}
