"""Tests of TreeRecord: recorded rollouts equal the sequences and samples."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding.trajectory_trees import CONFIG
from support.models.small_attention_model import attention_model, attention_params

import jkv
from jkv import trees

pytestmark = pytest.mark.one_end

SIZES = dataclasses.replace(
    CONFIG, num_blocks=24, max_sequences=6, max_context_length=22, dtype=jnp.float32
)
NUM_NEW = 3
extend = jax.jit(
    functools.partial(jkv.extend, attention_model), static_argnames="max_new_tokens"
)
score = functools.partial(jkv.score, attention_model, config=CONFIG)


def open_cache(count):
    cache, opened = jkv.allocate(jkv.init(SIZES), [0] * count)
    record = trees.TreeRecord.empty(cache.max_sequences)
    return cache, trees.note_allocate(record, opened)


class Rollout:
    """Sequences that are extended and forked, and their recorded tree."""

    def __init__(self, count):
        self.cache, self.record = open_cache(count)
        self.sequences = {
            seq_id: [] for seq_id in range(count)
        }  # including pending tokens
        self.waiting = {seq_id: [] for seq_id in range(count)}

    def extend(self, seq_ids, tokens):
        """Extend sequences by their pending tokens and `tokens`."""
        given = np.full((len(seq_ids), 12), -1, np.int32)
        for row, seq_id, more in zip(given, seq_ids, tokens, strict=True):
            whole = self.waiting[seq_id] + more
            row[: len(whole)] = whole
        ids = np.array(seq_ids, np.int32)
        self.cache, generated = extend(
            attention_params(), self.cache, ids, given, max_new_tokens=NUM_NEW
        )
        self.record, segments = trees.note_extend(self.record, ids, given, generated)
        for i, (seq_id, more) in enumerate(zip(seq_ids, tokens, strict=True)):
            new = generated.tokens[i, : generated.lengths[i]].tolist()
            if new:
                self.sequences[seq_id] = self.sequences[seq_id] + more + new
                self.waiting[seq_id] = new[-1:]
        return segments

    def give(self, seq_id, tokens):
        self.record, _ = trees.note_given(self.record, [seq_id], [tokens])
        self.sequences[seq_id] = self.sequences[seq_id] + tokens
        self.waiting[seq_id] = self.waiting[seq_id] + tokens

    def fork(self, parents):
        self.cache, forked = jkv.fork(self.cache, parents)
        self.record = trees.note_fork(self.record, parents, forked)
        for parent, child in zip(parents, forked.seq_ids.tolist(), strict=True):
            if child >= 0:
                self.sequences[child] = self.sequences[parent]
                self.waiting[child] = self.waiting[parent]
        return forked.seq_ids.tolist()

    def check(self):
        """Assert the sequences of the tips; the cache lacks only pending tokens."""
        lengths, tips = jkv.context_lengths(self.cache), self.record.tips
        for seq_id, sequence in self.sequences.items():
            assert trees.read_sequence(self.record.tree, int(tips[seq_id])) == sequence
            waits = len(self.waiting[seq_id])
            assert int(self.record.num_unfed[seq_id]) == waits
            assert int(lengths[seq_id]) == len(sequence) - waits


@pytest.mark.further
def test_sequences_are_recorded():
    """Turns, forks, a tool result shared by branches, and a refusal."""
    played = Rollout(2)
    played.extend([0, 1], [[3, 1, 4, 1, 5], [9, 2]])
    played.check()
    played.give(0, [7, 7])
    assert played.fork([0, 0, 1]) == [2, 3, 4]
    played.check()
    played.extend([2, 3], [[], [6]])
    played.extend([4, 0], [[8], []])
    played.check()
    tree = played.record.tree
    # 5 + 3, 2 + 3, the tool's 2; 3, 1 + 3; 1 + 3, 3.
    assert tree.num_rows == tree.tokens.shape[0] == 8 + 5 + 2 + 3 + 4 + 4 + 3
    before = dict(played.sequences)
    played.extend([2, 4], [[1] * 11, [2]])
    assert played.sequences[2] == before[2] and played.sequences[4] != before[4]
    played.check()

    scores = np.asarray(jax.jit(score)(attention_params(), played.record.tree))
    generated = np.asarray(played.record.is_generated)[
        np.asarray(played.record.tree.segments)
    ]
    logprobs = np.asarray(played.record.logprobs)
    np.testing.assert_allclose(scores[generated], logprobs[generated], atol=2e-5)
    assert (logprobs[generated] < 0).all() and not logprobs[~generated].any()


def test_fed_tokens_are_recorded_once():
    """The trunk holds all tokens that branches share, except the last."""
    played = Rollout(1)
    played.give(0, [3, 1, 4, 1, 5])
    given = np.full((1, 12), -1, np.int32)
    given[0, :4] = [3, 1, 4, 1]
    played.cache, _ = extend(
        attention_params(), played.cache, np.zeros(1, np.int32), given, max_new_tokens=1
    )
    played.record = trees.note_fed(played.record, [0], 4)
    played.waiting[0] = [5]
    played.check()
    played.fork([0, 0])
    played.extend([1, 2], [[], []])
    played.check()
    assert played.record.tree.num_rows == 5 + 2 * NUM_NEW


def test_missing_tokens_must_come_first():
    played = Rollout(1)
    played.extend([0], [[3, 1, 4]])
    played.waiting[0] = [(played.waiting[0][0] + 1) % 19]
    with pytest.raises(
        ValueError, match="tokens must begin with .* which the cache lacks"
    ):
        played.extend([0], [[5]])


@pytest.mark.further
def test_samples_are_recorded_inside_jit():
    """Records are equal outside jit, with rows for the maximum of new tokens."""
    prompts = np.array([[3, 1, 4, -1], [9, 2, 6, 5]], np.int32)

    def run(params, cache, prompts):
        record = trees.TreeRecord.empty(0)
        options = dict(max_new_tokens=NUM_NEW, num_samples=2)
        sampling = jkv.Sampling(temperature=1.0, seeds=7)
        _, generated = jkv.generate(
            attention_model, params, cache, prompts, sampling=sampling, **options
        )
        record, first = trees.note_generate(record, prompts, generated)
        record, second = trees.note_generate(
            record, prompts[:, :1], generated, parents=first[1:3]
        )
        return record, generated, (first, second)

    inside, generated, (first, second) = jax.jit(run)(
        attention_params(), jkv.init(SIZES), prompts
    )
    assert inside.tree.num_rows == 8 + 4 * NUM_NEW + 2 + 4 * NUM_NEW
    record = trees.TreeRecord.empty(0)
    record, same = trees.note_generate(record, prompts, generated)
    assert record.tree.num_rows == 7 + 4 * NUM_NEW
    record, _ = trees.note_generate(
        record, prompts[:, :1], generated, parents=first[1:3]
    )
    assert first.tolist() == same.tolist() and second.tolist() == [8, 9, 10, 11]
    for segment in range(record.tree.num_segments):
        sequence = trees.read_sequence(record.tree, segment)
        assert trees.read_sequence(inside.tree, segment) == sequence
    sampled = np.asarray(generated.tokens).tolist()
    expected = [3, 1, 4, *sampled[1], 3, *sampled[0]]
    assert trees.read_sequence(record.tree, 8) == expected
    np.testing.assert_array_equal(
        np.asarray(inside.logprobs)[np.asarray(inside.tree.segments) >= 0],
        record.logprobs,
    )


class TestMistakes:
    def test_a_result_of_other_prompts(self):
        generated = jkv.Generation.empty(jnp.zeros(3, jnp.int32), 2)
        with pytest.raises(ValueError, match="multiple of 2 prompts as .* got 3"):
            trees.note_generate(trees.TreeRecord.empty(0), [[1], [2]], generated)

    def test_rows_for_other_sequences(self):
        record = trees.TreeRecord.empty(2)
        with pytest.raises(ValueError, match="B = 2, a row for each sequence, got"):
            trees.note_given(record, [0, 1], [[1]])

    def test_a_result_of_another_verb(self):
        record = trees.TreeRecord.empty(2)
        with pytest.raises(ValueError, match=r"must be a jkv\.Allocation, got list"):
            trees.note_allocate(record, [0])
        with pytest.raises(ValueError, match=r"must be the jkv\.Fork of 1 parents"):
            trees.note_fork(record, [0], [1])
