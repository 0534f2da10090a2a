"""Sequences of the folding model with a past, and each one's known text.

A cache is a value: to see whether each sequence still goes on as its text does, a step
is taken, looked at, and forgotten.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from support.folding_loops import SHARED, pools_of
from support.folding_model import MODELS, SIZES, WITH_STATE, continue_text, make_config

NUM_ROWS, NUM_SEQUENCES = 32, SIZES["max_sequences"]
PENDING = 3
TEXT, OTHER = [*SHARED, 4, 2], [2, 1, 0, 4, 4, 1, 3, 0, 1, 1, 2]


@dataclasses.dataclass
class KeptTexts:
    """A cache, and the tokens of each of its sequences.

    Pools of a mesh get the same calls, and must return the same.
    """

    kind: str
    cache: jkv.Cache
    texts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    donates: bool = False  # whether steps take the cache, which is a copy then

    @property
    def has_state(self):
        return self.kind in WITH_STATE

    def copy(self):
        return dataclasses.replace(
            self, texts={seq_id: [*text] for seq_id, text in self.texts.items()}
        )

    def call(self, verb, *arguments, **options):
        """Call a verb that returns a cache; return its other results."""
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

    def ask(self, question, *arguments):
        """Ask something of the cache that leaves it as it is."""
        return self.call(
            lambda cache, *given: (cache, question(cache, *given)), *arguments
        )

    def open(self, prompt=()):
        """Open a sequence, and return its number and the tokens that were found."""
        tokens = np.full((1, NUM_ROWS), -1, np.int32)
        tokens[0, : len(prompt)] = prompt
        opened = self.call(_open, tokens)
        jkv.raise_for_status(opened.status)
        seq_id, found = int(opened.seq_ids[0]), int(opened.num_cached[0])
        self.texts[seq_id] = list(prompt[:found])
        return seq_id, found

    def open_anew(self, row, prompt=()):
        """Open a sequence in a row that is free, as `open`."""
        opened = {}
        while row not in opened:
            seq_id, found = self.open(prompt)
            opened[seq_id] = found
        found = opened.pop(row)
        if opened:
            jkv.raise_for_status(self.call(jkv.free, [*opened]))
        for seq_id in opened:
            del self.texts[seq_id]
        return found

    def feed(self, seq_id, tokens, num_pending=0):
        """Compute some more tokens of a sequence."""
        self.step({seq_id: tokens}, num_pending)

    def step(self, fed, num_pending=0):
        """Take a step, and compare the tokens that it chooses."""
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
            self.texts[seq_id] += tokens
            assert [int(chosen[i])] == continue_text(self.texts[seq_id], 1, self.kind)

    def check(self):
        """See that the cache is sound and has the texts, and no others."""
        for cache in pools_of(self.cache):
            jkv.check(cache)
            lengths = [len(self.texts.get(i, [])) for i in range(NUM_SEQUENCES)]
            assert cache.metadata.context_lengths.tolist() == lengths
            is_open = [i in self.texts for i in range(NUM_SEQUENCES)]
            assert cache.metadata.is_open.tolist() == is_open
        if self.texts:
            self.copy().step({seq_id: [1] for seq_id in self.texts})


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


# The pasts that a sequence 0 has, beside one that always has the first of them.


def compute(kind, _folder=None, *, num_pending=0, **where):
    """It was computed in two steps, with a snapshot where the first one ended."""
    kept = KeptTexts(kind, jkv.init(make_config(kind, pending=PENDING), **where))
    for text in (TEXT, OTHER):
        seq_id, _ = kept.open()
        kept.feed(seq_id, text[:16])
        if text[16:]:
            kept.feed(seq_id, text[16:], num_pending)
    return kept


def find(kind, folder=None, **where):
    """Most of it was found, as another that has ended began alike."""
    kept = compute(kind, folder, **where)
    jkv.raise_for_status(kept.call(jkv.free, [0]))
    found = kept.open_anew(0, TEXT)
    assert found == (16 if kept.has_state else 20)
    kept.feed(0, TEXT[found:])
    return kept


def guess(kind, folder=None, **where):
    """Its newest tokens may be taken back."""
    return compute(kind, folder, num_pending=PENDING, **where)


def move_out_and_in(kind, folder=None, **where):
    """It was on the host while another had its row and its blocks."""
    kept = compute(kind, folder, **where)
    kept.cache, swapped = jkv.swap_out(kept.cache, [0, 1])
    others, kept.texts = kept.texts, {}
    for _ in range(NUM_SEQUENCES):
        kept.open()
    kept.step({0: [4] * 16, 1: [3] * 16})
    # Only their rows are free when they come back.
    jkv.raise_for_status(kept.call(jkv.free, [0, 1]))
    kept.cache, back = jkv.swap_in(kept.cache, swapped)
    assert sorted(back.seq_ids.tolist()) == [0, 1]
    jkv.raise_for_status(kept.call(jkv.free, [*range(2, NUM_SEQUENCES)]))
    kept.texts = others
    return kept


def load(kind, folder, **where):
    """It was in a file."""
    kept = compute(kind, folder, **where)
    jkv.save(folder / "cache", kept.cache)
    kept.cache = jkv.load(folder / "cache", **where)
    return kept


PASTS = {"computed": compute, "hit": find, "guesses": guess}
MOVES = {"swap": move_out_and_in, "file": load}
