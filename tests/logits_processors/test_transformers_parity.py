"""Processors mask exactly the tokens that transformers' processors mask."""

import numpy as np
import pytest

from jkv.logits_processors import BannedSequences, MinimumLength, NoRepeatedNgrams

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.filterwarnings("default"),  # warnings of torch and transformers
]
SEQUENCES, LENGTH, VOCABULARY = 40, 12, 5
BANNED = [[1, 2], [3], [2, 2, 4], [4, 0]]


def random_tokens():
    return np.random.default_rng(0).integers(
        0, VOCABULARY, (SEQUENCES, LENGTH), np.int32
    )


def find_forbidden(logits_processor, num_prompt_tokens):
    """Return the masked tokens after random sequences."""
    tokens = random_tokens()
    state = logits_processor.begin(
        np.zeros(SEQUENCES, np.int32), tokens[:, :num_prompt_tokens]
    )
    for column in range(num_prompt_tokens, LENGTH):
        state = logits_processor.advance(state, tokens[:, column])
    return np.isinf(
        logits_processor.process(state, np.zeros((SEQUENCES, VOCABULARY), np.float32))
    )


def find_expected(make_processor):
    """Return the masked tokens by transformers."""
    torch = pytest.importorskip("torch")
    processor = make_processor(pytest.importorskip("transformers"))
    tokens = torch.tensor(random_tokens()).long()
    scores = processor(tokens, torch.zeros((SEQUENCES, VOCABULARY)))
    return np.isinf(scores.numpy())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeated_ngrams_equals_transformers(size):
    expected = find_expected(lambda t: t.NoRepeatNGramLogitsProcessor(size))
    found = find_forbidden(NoRepeatedNgrams(size, LENGTH), num_prompt_tokens=5)
    np.testing.assert_array_equal(found, expected)
    assert 0 < expected.sum() < expected.size


def test_banned_sequences_equals_transformers():
    expected = find_expected(lambda t: t.NoBadWordsLogitsProcessor(BANNED))
    sequences = np.int32([[*banned, *[-1] * (3 - len(banned))] for banned in BANNED])
    found = find_forbidden(BannedSequences(sequences), num_prompt_tokens=LENGTH - 1)
    np.testing.assert_array_equal(found, expected)
    assert expected.sum(axis=0)[[0, 2, 4]].all()


@pytest.mark.parametrize("least", [6, 7, 8])
def test_minimum_length_equals_transformers(least):
    num_prompt_tokens, ends = 5, [2, 4]
    expected = find_expected(
        lambda t: t.MinNewTokensLengthLogitsProcessor(num_prompt_tokens, least, ends)
    )
    found = find_forbidden(MinimumLength(np.int32(ends), least), num_prompt_tokens)
    np.testing.assert_array_equal(found, expected)
    assert found.any() == (least > LENGTH - num_prompt_tokens)
