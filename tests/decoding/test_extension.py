"""Tests of extend: random conversations, compared with plain Python."""

import functools

import jax
import numpy as np
import pytest
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    attention_model,
    attention_params,
    dense_rows,
)
from support.small_caches import copied, small_cache

import jkv
from jkv import FinishReason

pytestmark = pytest.mark.one_end
COUNT, WIDTH, MOST, STOP, CONTEXT = 4, 6, 5, 7, 30

extend = jax.jit(
    functools.partial(
        jkv.extend, max_new_tokens=MOST, stop_tokens=[STOP], chunk_size=8
    ),
    static_argnums=0,
    donate_argnames="cache",
)


def fresh_cache():
    fields = dict(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        num_blocks=9,
        block_size=4,
        max_sequences=COUNT,
        max_context_length=CONTEXT,
        prefix_caching=True,
    )
    return copied(small_cache(**fields))


def padded(rows):
    """Return rows of tokens as i32[COUNT, WIDTH]."""
    return np.array([row + [-1] * (WIDTH - len(row)) for row in rows], np.int32)


def continued(sequence, limit):
    """Return the dense model's completion of a sequence, and its finish reason."""
    params, added = jax.device_get(attention_params()), []
    while True:
        logits = dense_rows(params, np.array(sequence + added))[-1]
        added.append(int(np.argmax(logits)))
        if added[-1] == STOP:
            return added, FinishReason.STOP
        if len(added) == limit:
            return added, FinishReason.LENGTH
        if len(sequence) + len(added) > CONTEXT:
            return added, FinishReason.CONTEXT_FULL


def test_random_conversations():
    """Messages, undone turns and branches in a pool that is often full.

    After each operation the cache holds every sequence's tokens, and each completion
    equals that of a dense model of the whole sequence.
    """
    rng = np.random.default_rng(5)
    cache = fresh_cache()
    cache, opened = jkv.allocate(cache, [0, 0])
    sequences = {int(seq_id): [] for seq_id in opened.seq_ids}
    found = set()
    for _ in range(40):
        cache = _play_between(rng, cache, sequences)
        ids = rng.permutation(COUNT).astype(np.int32)
        ids[3] = rng.choice([ids[0], -1])  # a duplicate, or padding
        rows = [
            rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(0, 7, COUNT)
        ]
        limits = rng.integers(0, MOST + 1, COUNT).astype(np.int32)
        cache, answer = extend(
            attention_model, attention_params(), cache, ids, padded(rows), limits=limits
        )
        answer = jax.device_get(answer)
        for i, seq_id in enumerate(ids.tolist()):
            tokens = answer.tokens[i, : answer.lengths[i]].tolist()
            reason = FinishReason(answer.reasons[i])
            found.add(reason)
            if i == 3 or seq_id not in sequences:
                assert (tokens, reason) == ([], FinishReason.CANCELLED)
                continue
            _judge(sequences, seq_id, rows[i], int(limits[i]), tokens, reason)
        jkv.check(cache)
        for seq_id, sequence in sequences.items():
            held = np.asarray(jkv.tokens(cache, seq_id))
            assert held[: len(sequence)].tolist() == sequence
            assert jkv.context_lengths(cache)[seq_id] == len(sequence)
    assert found == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CONTEXT_FULL,
        FinishReason.OUT_OF_BLOCKS,
        FinishReason.EMPTY_PROMPT,
        FinishReason.CANCELLED,
    }


def _judge(sequences, seq_id, given, limit, tokens, reason):
    """Compare a completion with the dense model's, and update the expected contents."""
    sequence = sequences[seq_id]
    if not tokens:
        expected = {FinishReason.OUT_OF_BLOCKS}
        if not given:
            expected = {FinishReason.EMPTY_PROMPT}
        elif not limit:
            expected = {FinishReason.LENGTH}
        elif len(sequence) + len(given) > CONTEXT:
            expected = {FinishReason.CONTEXT_FULL}
        assert reason in expected
        return
    answer, ending = continued(sequence + given, limit)
    if reason == FinishReason.OUT_OF_BLOCKS:
        assert tokens == answer[: len(tokens)]
    else:
        assert (tokens, reason) == (answer, ending)
    sequences[seq_id] = sequence + given + tokens[:-1]


def _play_between(rng, cache, sequences):
    """Truncate a sequence, fork it, or free it."""
    seq_id = int(rng.choice(sorted(sequences)))
    kind = rng.integers(3)
    if kind == 0:
        length = int(rng.integers(len(sequences[seq_id]) + 1))
        cache, status = jkv.truncate(cache, [seq_id], [length])
        if status[0] == jkv.Status.OK:  # a shared tail needs a block
            sequences[seq_id] = sequences[seq_id][:length]
    elif kind == 1:
        cache, branch = jkv.fork(cache, [seq_id])
        if branch.status[0] == jkv.Status.OK:
            sequences[int(branch.seq_ids[0])] = list(sequences[seq_id])
    elif len(sequences) > 1:
        cache, _ = jkv.free(cache, [seq_id])
        del sequences[seq_id]
    return cache


def test_a_completion_in_pieces_equals_the_whole():
    """Given only the last token, a sequence continues; only new tokens are computed."""
    cache, opened = jkv.allocate(fresh_cache(), [0, 0, -1, -1])
    given = padded([[3, 1, 4, 1, 5], [9], [], []])
    params, sequences = attention_params(), [[], []]
    computed = []
    for _ in range(2):
        cache, answer = extend(
            attention_model,
            params,
            cache,
            opened.seq_ids,
            given,
            limits=np.full(COUNT, MOST, np.int32),
        )
        computed.append(int(answer.statistics.prompt_tokens))
        for i, sequence in enumerate(sequences):
            sequence += answer.tokens[i, : answer.lengths[i]].tolist()
        given = padded([[sequence[-1]] for sequence in sequences] + [[], []])
    assert computed == [6, 2]
    for given, sequence in zip(([3, 1, 4, 1, 5], [9]), sequences, strict=True):
        assert sequence == continued(given, 2 * MOST)[0]


def test_one_row_of_tokens_for_each_sequence():
    with pytest.raises(ValueError, match="B = 2, a row for each sequence, got"):
        jkv.extend(
            attention_model, None, fresh_cache(), [0, 1], [[3]], max_new_tokens=2
        )


def count_in_circles(_params, tokens, cache, batch, *, all_rows=False):
    """A model that repeats a cycle of seven tokens."""
    logits = jax.nn.one_hot((tokens - 9) % 7 + 10, VOCABULARY) * 9.0
    return (logits if all_rows else logits[batch.last_rows]), cache


@pytest.mark.further
def test_speculation_preserves_tokens_of_open_sequences():
    """Until blocks run out; sequences stay open without their last token."""
    found = []
    for speculate in (None, jkv.PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)):
        cache, opened = jkv.allocate(fresh_cache(), [0, 0, -1, -1])
        given, turns = padded([[10, 11, 12, 13, 14, 15], [16, 10], [], []]), []
        for _ in range(2):
            cache, answer = jkv.jitted.extend(
                count_in_circles,
                None,
                cache,
                opened.seq_ids,
                given,
                max_new_tokens=14,
                row_counts=(16,),
                speculate=speculate,
            )
            jkv.check(cache)
            turns.append((answer, jkv.context_lengths(cache)))
            last = np.maximum(answer.lengths - 1, 0)[:2, None]
            newest = np.take_along_axis(np.asarray(answer.tokens[:2]), last, axis=1)
            given = padded([*newest.tolist(), [], []])
        found.append(turns)
    steps = 0
    for (plain, lengths), (guessed, others) in zip(*found, strict=True):
        for name in ("tokens", "lengths", "reasons"):
            wanted = getattr(plain, name)
            np.testing.assert_array_equal(getattr(guessed, name), wanted)
        np.testing.assert_array_equal(others, lengths)
        steps += int(plain.statistics.num_steps - guessed.statistics.num_steps)
    assert steps >= 5
    first, second = (answer for answer, _ in found[0])
    assert first.tokens[0].tolist() == [16, 10, 11, 12, 13, 14, 15] * 2
    assert second.tokens[0, 0] == 16
    assert int(second.statistics.prompt_tokens) == 2
    assert FinishReason.OUT_OF_BLOCKS in second.reasons.tolist()


def noisy_params():
    """Return weights that predict about half of the target's tokens."""
    rng = np.random.default_rng(0)
    noise = np.float32(0.15)
    return jax.tree.map(
        lambda x: x + noise * rng.standard_normal(x.shape, np.float32),
        attention_params(),
    )


SIZES = dict(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    num_blocks=24,
    block_size=4,
    max_sequences=2,
    max_context_length=CONTEXT,
)
DRAFTERS = {
    "lookup": jkv.PromptLookup(num_tokens=3, min_ngram=1, cost=1.0),
    "draft model": jkv.DraftModel(
        model=attention_model,
        params=noisy_params(),
        config=jkv.CacheConfig(**SIZES, dtype="float32", pruning=True),
        num_tokens=3,
        cost=1.0,
    ),
}


@pytest.mark.further
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_preserves_pruned_sequences(name):
    """Positions differ from slots; the context fills up behind the dropped tokens."""
    speculate, params = DRAFTERS[name], attention_params()
    config = jkv.CacheConfig(**SIZES, dtype="float32", pruning=True)
    found = []
    for drafter in (None, speculate):
        cache = jkv.init(jkv.with_drafter(config, drafter) if drafter else config)
        cache, opened = jkv.allocate(cache, [0, 0])
        texts = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]] * 2)
        answers, options = [], dict(max_new_tokens=14, row_counts=(12,))
        for turn in range(2):
            given = attention_model, params, cache, opened.seq_ids, texts
            cache, answer = jkv.jitted.extend(*given, speculate=drafter, **options)
            jkv.check(cache)
            answers.append((answer, jkv.context_lengths(cache)))
            if turn == 0:
                kept = [[*range(4), *range(12, 20)], [*range(16)]]
                kept[0] += [20] * 4  # ignored
                cache, status = jkv.prune(cache, opened.seq_ids, kept, [12, 16])
                assert status.tolist() == [0, 0]
                texts = np.where([[True] * 6 + [False] * 6] * 2, texts, -1)
        found.append([*answers, jkv.next_positions(cache)])
    pairs = zip(found[0][:2], found[1][:2], strict=True)
    for (plain, lengths), (drafted, others) in pairs:
        assert drafted.tokens.tolist() == plain.tokens.tolist()
        assert drafted.reasons.tolist() == plain.reasons.tolist()
        assert others.tolist() == lengths.tolist()
    assert found[1][2].tolist() == found[0][2].tolist()
    answer = found[1][1][0]
    assert found[0][2][0] > CONTEXT
    assert FinishReason.CONTEXT_FULL in answer.reasons.tolist()
    assert int(answer.statistics.accepted_tokens) > 0
