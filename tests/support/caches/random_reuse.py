"""Random operations on a cache with prefix caching.

The vocabulary is small, so that prompts often share a prefix. Steps are committed late
or never, aborted and rolled back; old batches are committed again. After each call the
visible blocks, the eviction order and all contents must equal the oracle's, which
compares tokens, not hashes.
"""

import jax
import numpy as np

import jkv
from support.caches.random_operations import (
    BATCH_SIZE,
    CAPACITY,
    CHANGING,
    LOOKING,
    Game,
    i32,
    make_verbs,
    same,
)
from support.oracle.cache import OK, PADDING
from support.small_caches import without_refusals

NUM_TOKENS = 2  # vocabulary size
NUM_SALTS = 2


def allocate_prompts(cache, num_tokens, tokens, salts):
    return jkv.allocate(cache, num_tokens, tokens=tokens, salts=salts)


def evict_cached(cache, num_blocks):
    return jkv.evict_cached(cache, num_blocks)


def invalidate(cache, salt):
    return jkv.invalidate(cache, salt)


def clear_prefixes(cache):
    return jkv.clear_prefixes(cache)


def match(cache, tokens, salts):
    return jkv.match(cache, tokens, salts)


FORGETTING = [evict_cached, invalidate, clear_prefixes]


def make_reuse_verbs(mode):
    changing = [*CHANGING, allocate_prompts, *FORGETTING]
    return make_verbs(mode, changing, [*LOOKING, match])


class ReuseGame(Game):
    """Random operations with prompts, late commits and aborted steps."""

    prefix_caching = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.pending = []  # uncommitted steps, and steps to commit again
        self.num_hits = 0
        self.num_beyond = 0  # hits of prompts with first blocks that no row needs

    def pick_contents(self):
        contents = self.rng.integers(NUM_TOKENS, size=CAPACITY).tolist()
        if self.rng.random() < 0.05:  # an unknown token
            contents[int(self.rng.integers(CAPACITY))] = -1
        return contents

    def pick_prompt(self):
        """Return a visible or open prefix with a few more tokens, and a salt."""
        salt = int(self.rng.integers(NUM_SALTS))
        known = [(each.salt, each.tokens) for each in self.oracle.open.values()]
        if self.oracle.index and self.rng.random() < 0.7:
            known = list(self.oracle.index)
        prompt = []
        if known and self.rng.random() < 0.8:
            salt, prompt = known[int(self.rng.integers(len(known)))]
            prompt = list(prompt[: len(prompt) - int(self.rng.integers(-1, 4))])
        more = int(self.rng.integers(self.oracle.block_size + 3))
        prompt = [token for token in prompt if token >= 0]
        prompt += self.rng.integers(NUM_TOKENS, size=more).tolist()
        return prompt[: self.width], salt

    @property
    def width(self):
        return self.oracle.max_context + 2

    def pick_prompts(self):
        picked = [self.pick_prompt() for _ in range(BATCH_SIZE)]
        if self.rng.random() < 0.3:  # one prompt for all requests
            picked = [picked[0]] * BATCH_SIZE
        prompts, salts = zip(*picked, strict=True)
        rows = np.full((BATCH_SIZE, self.width), -1)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        return prompts, rows, salts

    def play_allocate_prompts(self):
        counts = self.pick_counts()
        counts[int(self.rng.integers(BATCH_SIZE + 1)) :] = []
        counts += [PADDING] * (BATCH_SIZE - len(counts))
        prompts, rows, salts = self.pick_prompts()
        found = [
            self.oracle.find(*each)[0] for each in zip(prompts, salts, strict=True)
        ]
        is_cut = [any(None in table for table in tables) for tables in found]
        expected = self.oracle.allocate(counts, prompts, salts)
        self.cache, result = self.call("allocate_prompts", counts, rows, salts)
        seq_ids, status, num_cached = expected
        same(result.seq_ids, seq_ids)
        same(result.num_cached, num_cached)
        self.num_hits += sum(num_cached)
        pairs = zip(num_cached, is_cut, strict=True)
        self.num_beyond += sum(num > 0 and beyond for num, beyond in pairs)
        self.compare_status(result.status, status)
        if self.rng.random() < 0.6:
            self.play_rest_of_prompts(seq_ids, prompts, num_cached)

    def play_rest_of_prompts(self, seq_ids, prompts, num_cached):
        """Append the uncached tokens of prompts, as far as the step has rows."""
        self.compare_state()
        self.before = without_refusals(self.cache)
        pairs = zip(prompts, num_cached, strict=True)
        rests = [prompt[start:] for prompt, start in pairs]
        rests = [r if s != PADDING else [] for r, s in zip(rests, seq_ids, strict=True)]
        contents = [token for rest in rests for token in rest][:CAPACITY]
        ends = np.minimum(np.cumsum([len(rest) for rest in rests]), CAPACITY)
        counts = np.diff(ends, prepend=0).tolist()
        contents += self.pick_contents()[len(contents) :]
        self.play_step("append_packed", None, seq_ids, counts, contents)

    def play_match(self):
        prompts, rows, salts = self.pick_prompts()
        found = map(self.oracle.find, prompts, salts)
        same(self.call("match", rows, salts), [length for _, length in found])

    def play_commit(self, batch, expected):
        if self.rng.random() < 0.9:
            self.commit(batch, expected)
        if self.rng.random() < 0.3:
            self.pending = [*self.pending[-3:], (batch, expected)]

    def play_commit_late(self):
        if self.pending:
            step = self.pending[int(self.rng.integers(len(self.pending)))]
            self.commit(*step)

    def commit(self, batch, expected):
        self.oracle.commit(expected)
        self.cache = self.verbs["commit"](self.cache, batch)

    def play_aborted_step(self):
        """Plan a step, write nothing, and roll it back."""
        seq_ids, counts = self.pick_seq_ids(), self.pick_counts()
        contents = self.pick_contents()
        expected = self.oracle.append(seq_ids, counts, contents)
        self.cache, batch = self.verbs["append_packed"](
            self.cache, i32(seq_ids), i32(counts), i32(contents)
        )
        self.compare_batch(batch, expected, seq_ids)
        self.compare_status(batch.status, expected.status)
        served = [length > 0 for length in expected.query_lengths]
        back = [s if ok else PADDING for s, ok in zip(seq_ids, served, strict=True)]
        lengths = np.subtract(expected.context_lengths, expected.query_lengths).tolist()
        status = self.oracle.truncate(back, lengths)
        assert set(status) == {OK}
        self.cache, found = self.call("truncate", back, lengths)
        same(found, status)
        self.pending = [*self.pending[-3:], (batch, expected)]

    def play_forget(self):
        kind = int(self.rng.integers(6))
        if kind < 4:
            num_blocks = int(self.rng.integers(-1, 5))
            self.oracle.evict_cached(num_blocks)
            self.cache = self.call("evict_cached", num_blocks)
        elif kind == 4:
            salt = int(self.rng.integers(NUM_SALTS))
            self.oracle.forget(salt)
            self.cache = self.call("invalidate", salt)
        else:
            self.oracle.forget()
            self.cache = self.call("clear_prefixes")

    def plays(self):
        return [
            *super().plays(),
            (self.play_allocate_prompts, 16),
            (self.play_commit_late, 2),
            (self.play_aborted_step, 1),
            (self.play_match, 1),
            (self.play_free, 4),
            (self.play_forget, 1),
        ]

    def compare_state(self):
        super().compare_state()
        metadata, oracle = jax.device_get(self.cache.metadata), self.oracle
        index = metadata.index
        if not oracle.groups:
            return
        visible = np.flatnonzero(index.hashes)
        same(np.sort(visible), sorted(oracle.known(oracle.leader)))
        for number, each in zip(metadata.followers, index.followers, strict=True):
            size = metadata.groups[number].num_blocks
            place = metadata.block_numbers.index(number)
            pairs = [(block, each.partners[block]) for block in visible.tolist()]
            found = {(f, w) for f, w in pairs if w < size and each.beside[w] == f}
            known = [(b[oracle.leader], b[place]) for b in oracle.index.values()]
            assert found == {pair for pair in known if pair[1] is not None}
        for seq_id, expected in oracle.open.items():
            committed = -1 if expected.visible is None else expected.visible
            assert int(index.committed[seq_id]) == committed
            assert int(index.sequence_salts[seq_id]) == expected.salt
