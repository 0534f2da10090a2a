"""Open sequences go on: random conversations against texts in plain Python."""

import functools

import jax
import numpy as np
import pytest
from support.small_attention_model import (
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
    """Rows of tokens as i32[COUNT, WIDTH]."""
    return np.array([row + [-1] * (WIDTH - len(row)) for row in rows], np.int32)


def continued(text, limit):
    """The tokens that a dense model gives a text, and why it ends."""
    params, added = jax.device_get(attention_params()), []
    while True:
        logits = dense_rows(params, np.array(text + added))[-1]
        added.append(int(np.argmax(logits)))
        if added[-1] == STOP:
            return added, FinishReason.STOP
        if len(added) == limit:
            return added, FinishReason.LENGTH
        if len(text) + len(added) > CONTEXT:
            return added, FinishReason.CONTEXT_FULL


def test_random_conversations():
    """Messages, undone turns and branches in a pool that is often full.

    After any operations the cache holds the tokens of each text, and each answer is
    that of a dense model which reads the whole text.
    """
    rng = np.random.default_rng(5)
    cache = fresh_cache()
    cache, opened = jkv.allocate(cache, [0, 0])
    texts = {int(seq_id): [] for seq_id in opened.seq_ids}
    found = set()
    for _ in range(40):
        cache = _play_between(rng, cache, texts)
        ids = rng.permutation(COUNT).astype(np.int32)
        ids[3] = rng.choice([ids[0], -1])  # a second mention, or padding
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
            if i == 3 or seq_id not in texts:
                assert (tokens, reason) == ([], FinishReason.CANCELLED)
                continue
            _judge(texts, seq_id, rows[i], int(limits[i]), tokens, reason)
        jkv.check(cache)
        for seq_id, text in texts.items():
            held = np.asarray(jkv.tokens(cache, seq_id))
            assert held[: len(text)].tolist() == text
            assert jkv.context_lengths(cache)[seq_id] == len(text)
    assert found == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CONTEXT_FULL,
        FinishReason.OUT_OF_BLOCKS,
        FinishReason.EMPTY_PROMPT,
        FinishReason.CANCELLED,
    }


def _judge(texts, seq_id, given, limit, tokens, reason):
    """Compare an answer with a dense model's, and note the cache's new contents."""
    text = texts[seq_id]
    if not tokens:
        expected = {FinishReason.OUT_OF_BLOCKS}
        if not given:
            expected = {FinishReason.EMPTY_PROMPT}
        elif not limit:
            expected = {FinishReason.LENGTH}
        elif len(text) + len(given) > CONTEXT:
            expected = {FinishReason.CONTEXT_FULL}
        assert reason in expected
        return
    answer, ending = continued(text + given, limit)
    if reason == FinishReason.OUT_OF_BLOCKS:
        assert tokens == answer[: len(tokens)]
    else:
        assert (tokens, reason) == (answer, ending)
    texts[seq_id] = text + given + tokens[:-1]


def _play_between(rng, cache, texts):
    """Undo a part of a text, open a branch, or close one."""
    seq_id = int(rng.choice(sorted(texts)))
    kind = rng.integers(3)
    if kind == 0:
        length = int(rng.integers(len(texts[seq_id]) + 1))
        cache, status = jkv.truncate(cache, [seq_id], [length])
        if status[0] == jkv.Status.OK:  # a tail that is shared takes a block
            texts[seq_id] = texts[seq_id][:length]
    elif kind == 1:
        cache, branch = jkv.fork(cache, [seq_id])
        if branch.status[0] == jkv.Status.OK:
            texts[int(branch.seq_ids[0])] = list(texts[seq_id])
    elif len(texts) > 1:
        cache, _ = jkv.free(cache, [seq_id])
        del texts[seq_id]
    return cache


def test_an_answer_in_pieces_is_the_answer():
    """The last token alone, and the text goes on; only new tokens are computed."""
    cache, opened = jkv.allocate(fresh_cache(), [0, 0, -1, -1])
    given = padded([[3, 1, 4, 1, 5], [9], [], []])
    params, texts = attention_params(), [[], []]
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
        for i, text in enumerate(texts):
            text += answer.tokens[i, : answer.lengths[i]].tolist()
        given = padded([[text[-1]] for text in texts] + [[], []])
    assert computed == [6, 2]
    for given, text in zip(([3, 1, 4, 1, 5], [9]), texts, strict=True):
        assert text == continued(given, 2 * MOST)[0]


def test_one_text_for_each_sequence():
    with pytest.raises(ValueError, match="a row for each of 2 sequences, got 1"):
        jkv.extend(
            attention_model, None, fresh_cache(), [0, 1], [[3]], max_new_tokens=2
        )


def count_in_circles(_params, tokens, cache, batch, *, all_rows=False):
    """A model of texts that repeat themselves: after a token its next of seven."""
    logits = jax.nn.one_hot((tokens - 9) % 7 + 10, VOCABULARY) * 9.0
    return (logits if all_rows else logits[batch.last_rows]), cache


def test_speculation_preserves_tokens_of_open_sequences():
    """Turn by turn, until blocks run out; texts stay open with all tokens but one."""
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


def test_a_draft_model_is_refused():
    draft = jkv.DraftModel(model=attention_model, params=None, cache=fresh_cache())
    with pytest.raises(jkv.UsageError, match="speculate must be a PromptLookup"):
        jkv.extend(
            attention_model,
            None,
            fresh_cache(),
            [0],
            [[3]],
            max_new_tokens=2,
            speculate=draft,
        )
