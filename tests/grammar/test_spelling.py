"""Unique spelling keeps all texts, and forces certain tokens."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.grammar import (
    Vocabulary,
    from_choices,
    from_regex,
    join,
    with_one_spelling,
)

pytestmark = pytest.mark.one_end

PIECES = [
    b"ab",
    b"abc",
    b"bc",
    b"cd",
    b"aa",
    b'":',
    b'{"',
    b'{"ab',
    b'"cd',
    b"12",
    b"1}",
]
BYTES = [bytes([byte]) for byte in range(256)]
WHOLE = Vocabulary([*BYTES, *PIECES, None], end_tokens=[256 + len(PIECES)])
# Without a token for each byte, some texts have only one spelling.
FEW = Vocabulary([b"a", b"b", b"c", *PIECES, None], end_tokens=[3 + len(PIECES)])


@jax.jit
def _look(grammar, state):
    logits = jnp.zeros((1, grammar.vocabulary_size))
    return grammar.process(state[None], logits)[0] == 0


_advance = jax.jit(lambda grammar, *row: grammar.advance(*(x[None] for x in row))[0])


def make_steps(grammar):
    """Return functions for the initial state, the next state and the mask."""

    @functools.cache
    def advance(state, token):
        return int(_advance(grammar, np.int32(state), np.int32(token)))

    @functools.cache
    def look(state):
        return np.flatnonzero(_look(grammar, np.int32(state))).tolist()

    return lambda variant: int(grammar.starts[variant]), advance, look


def spell_all(grammar, vocabulary, variant=0):
    """Return each text of a finite language with its spellings."""
    begin, advance, look = make_steps(grammar)
    found, waiting = {}, [(begin(variant), ())]
    while waiting:
        state, tokens = waiting.pop()
        for token in look(state):
            if token in vocabulary.end_tokens:
                text = b"".join(vocabulary.tokens[each] for each in tokens)
                found.setdefault(text, set()).add(tokens)
                continue
            waiting.append((advance(state, token), (*tokens, token)))
    return found


@pytest.mark.parametrize(
    "pattern, vocabulary, is_fewer",
    [
        ("abc|cd", WHOLE, True),
        ("abc|cd", FEW, True),
        ("abcab?cd?", WHOLE, True),
        ("abcab?cd?", FEW, True),
        ('\\{"ab":(12?|"cd")\\}', WHOLE, True),
        # Nothing is certain: a text may end, or continue in several ways.
        ("a{1,5}b?", WHOLE, False),
        ("(a|bc){2,3}", WHOLE, False),
    ],
)
def test_fewer_spellings_keep_all_texts(pattern, vocabulary, is_fewer):
    many = from_regex(pattern, vocabulary)
    one = with_one_spelling(many, vocabulary)
    before, after = spell_all(many, vocabulary), spell_all(one, vocabulary)
    assert before.keys() == after.keys()
    for text, spellings in after.items():
        assert spellings <= before[text]
    count, was = (sum(map(len, found.values())) for found in (after, before))
    assert count < was if is_fewer else count == was


def test_words_that_are_prefixes_of_others_are_kept():
    """Random words and tokens: many tokens, few, and parts of words."""
    for seed in range(20):
        rng = random.Random(seed)
        words = {"ab" + "".join(rng.choices("ab", k=rng.randrange(3))) for _ in "123"}
        pieces = {word[:length].encode() for word in words for length in (3, 4)}
        pieces = rng.sample(sorted(pieces), 1)
        tokens = [*(BYTES if seed % 2 else [b"a", b"b"]), *pieces, None]
        vocabulary = Vocabulary(tokens, [len(tokens) - 1])
        many = from_choices(sorted(words), vocabulary)
        one = with_one_spelling(many, vocabulary)
        assert spell_all(one, vocabulary).keys() == {word.encode() for word in words}


def test_certain_text_is_forced_by_its_longest_token():
    many = from_regex('\\{"ab":(12|34)\\}', WHOLE)
    one = with_one_spelling(many, WHOLE)
    (spelled,) = spell_all(one, WHOLE)[b'{"ab":34}']
    assert [WHOLE.tokens[each] for each in spelled] == [
        *(b'{"ab', b'":', b"3", b"4", b"}"),
    ]
    forced = np.asarray(one.forced_token)
    assert forced[int(one.starts[0])] == WHOLE.tokens.index(b'{"ab')
    assert (forced >= 0).sum() > (np.asarray(many.forced_token) >= 0).sum()
    # A join is restricted like its parts.
    both = with_one_spelling(join([many, from_regex("abc|cd", WHOLE)]), WHOLE)
    assert spell_all(both, WHOLE) == spell_all(one, WHOLE)
    assert spell_all(both, WHOLE, 1).keys() == {b"abc", b"cd"}


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="grammar's 15 tokens"):
        with_one_spelling(from_regex("a", FEW), WHOLE)
