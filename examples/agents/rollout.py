"""Rollout of turns and branches, recorded as a trajectory tree.

The cache holds the trunk. Each turn appends the tool's answer, forks the trunk, and
samples a line per branch; the best branch becomes the trunk, the others are freed.
"""

from typing import NamedTuple

import numpy as np

import jkv
from agents.calculator import calculate
from jkv import trees

extend = jkv.jitted.extend


class Rollout(NamedTuple):
    """Recorded trajectory tree with rewards."""

    record: trees.TreeRecord
    rewards: dict[int, float]  # by generated segment
    siblings: list[list[int]]  # the segments of each turn
    trunk: int  # last segment of the trunk


class Agent(NamedTuple):
    """Model that generates lines for the calculator."""

    model: object
    params: object
    tokenizer: object
    num_branches: int
    max_new_tokens: int = 12
    width: int = 96  # maximum number of new trunk tokens per turn

    @property
    def stop_tokens(self):
        """Tokens that contain a line break, i32[S]."""
        vocabulary = range(self.tokenizer.get_vocab_size())
        return np.array([t for t in vocabulary if "\n" in self.read([t])], np.int32)

    def read(self, tokens):
        """Decode tokens."""
        return self.tokenizer.decode([int(token) for token in tokens if token >= 0])

    def write(self, text):
        """Encode a string."""
        return self.tokenizer.encode(text).ids

    def play(self, cache, prompt, num_turns, seed=0):
        """Run `num_turns` turns from an empty cache; the trunk stays open."""
        cache, opened = jkv.allocate(cache, [0])
        record, trunk = trees.TreeRecord.empty(cache.max_sequences), opened.seq_ids
        record = trees.note_allocate(record, opened)
        # Tokens of the trunk that are not in the cache yet.
        waiting, given, rewards, siblings = [], self.write(prompt), {}, []
        for turn in range(num_turns):
            record, _ = trees.note_given(record, trunk, [given])
            waiting = [*waiting, *given]
            cache, record, branches = self.branch(cache, record, trunk, waiting)
            first = np.full((self.num_branches, 1), waiting[-1], np.int32)
            cache, generated = self.sample(cache, branches, first, seed + 100 * turn)
            record, segments = trees.note_extend(record, branches, first, generated)
            lines = [line[line >= 0] for line in np.asarray(generated.tokens)]
            values = [calculate(self.read(line)) for line in lines]
            found = [float(value is not None) for value in values]
            siblings.append(segments.tolist())
            rewards |= dict(zip(siblings[-1], found, strict=True))
            best = int(np.argmax(found))
            cache, trunk = self.choose(cache, trunk, branches, best)
            waiting, given = [int(lines[best][-1])], self.answer(lines[best])
        return cache, Rollout(record, rewards, siblings, int(record.tips[trunk[0]]))

    def branch(self, cache, record, trunk, waiting):
        """Append the pending tokens to the trunk, except the last, and fork it."""
        if len(waiting) > 1:
            padded = np.full((1, self.width), -1, np.int32)
            padded[0, : len(waiting) - 1] = waiting[:-1]
            # The generated token is dropped.
            cache, _ = self.extend(cache, trunk, padded, max_new_tokens=1)
        record = trees.note_fed(record, trunk, len(waiting) - 1)
        parents = np.repeat(np.asarray(trunk), self.num_branches)
        cache, forked = jkv.fork(cache, parents)
        jkv.raise_for_status(forked.status)
        return cache, trees.note_fork(record, parents, forked), forked.seq_ids

    def sample(self, cache, branches, first, seed):
        """Sample a line for each branch."""
        seeds = np.uint32(seed) + np.arange(self.num_branches, dtype=np.uint32)
        return self.extend(
            cache,
            branches,
            first,
            max_new_tokens=self.max_new_tokens,
            stop_tokens=self.stop_tokens,
            sampling=jkv.Sampling(temperature=1.0, seeds=seeds),
        )

    def extend(self, cache, *arguments, **options):
        """Call the jitted `jkv.extend`."""
        return extend(self.model, self.params, cache, *arguments, **options)

    def answer(self, line):
        """Return the tokens of the tool's answer to a line."""
        written = self.read(line)
        gap = "" if "\n" in written else "\n"
        return self.write(f"{gap}{calculate(written) or 0}\n>>>")

    def choose(self, cache, trunk, branches, best):
        """Make a branch the trunk; free the other branches and the old trunk."""
        others = np.append(np.delete(np.asarray(branches), best), trunk)
        cache, status = jkv.free(cache, others)
        jkv.raise_for_status(status)
        return cache, branches[best : best + 1]
