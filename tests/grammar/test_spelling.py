"""One spelling loses no text, and forces what is certain."""

import numpy as np
import pytest

from jkv.grammar import Vocabulary, from_regex, join, with_one_spelling

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
# Without a token for each byte, some texts have one spelling alone.
FEW = Vocabulary([b"a", b"b", b"c", *PIECES, None], end_tokens=[3 + len(PIECES)])


def spell_all(grammar, vocabulary, variant=0):
    """Each text of a finite language, with the spellings that it has."""
    arrays = {
        name: np.asarray(getattr(grammar, name))
        for name in ("masks", "mask_of_state", "class_of_token", "transitions")
    }
    rows, of_state = np.asarray(grammar.row_of_state), grammar.variant_of_state
    found, waiting = {}, [(int(grammar.starts[variant]), ())]
    while waiting:
        state, tokens = waiting.pop()
        words = arrays["masks"][arrays["mask_of_state"][state]]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        for token in np.flatnonzero(bits).tolist():
            if token in vocabulary.end_tokens:
                text = b"".join(vocabulary.tokens[each] for each in tokens)
                found.setdefault(text, set()).add(tokens)
                continue
            column = arrays["class_of_token"][int(of_state[state]), token]
            reached = int(arrays["transitions"][int(rows[state]) + int(column)])
            waiting.append((reached, (*tokens, token)))
    return found


@pytest.mark.parametrize(
    "pattern, vocabulary, is_fewer",
    [
        ("abc|cd", WHOLE, True),
        ("abc|cd", FEW, True),
        ("abcab?cd?", WHOLE, True),
        ("abcab?cd?", FEW, True),
        ('\\{"ab":(12?|"cd")\\}', WHOLE, True),
        # Nothing is certain: a text may end, or go on in several ways.
        ("a{1,5}b?", WHOLE, False),
        ("(a|bc){2,3}", WHOLE, False),
    ],
)
def test_texts_are_the_same_with_fewer_spellings(pattern, vocabulary, is_fewer):
    many = from_regex(pattern, vocabulary)
    one = with_one_spelling(many, vocabulary)
    before, after = spell_all(many, vocabulary), spell_all(one, vocabulary)
    assert before.keys() == after.keys()
    for text, spellings in after.items():
        assert spellings <= before[text]
    count, was = (sum(map(len, found.values())) for found in (after, before))
    assert count < was if is_fewer else count == was


def test_what_is_certain_is_forced_by_its_longest_token():
    many = from_regex('\\{"ab":(12|34)\\}', WHOLE)
    one = with_one_spelling(many, WHOLE)
    (spelled,) = spell_all(one, WHOLE)[b'{"ab":34}']
    assert [WHOLE.tokens[each] for each in spelled] == [
        *(b'{"ab', b'":', b"3", b"4", b"}"),
    ]
    forced = np.asarray(one.forced_token)
    assert forced[int(one.starts[0])] == WHOLE.tokens.index(b'{"ab')
    assert (forced >= 0).sum() > (np.asarray(many.forced_token) >= 0).sum()
    # A join is changed as its parts are.
    both = with_one_spelling(join([many, from_regex("abc|cd", WHOLE)]), WHOLE)
    assert spell_all(both, WHOLE) == spell_all(one, WHOLE)
    assert spell_all(both, WHOLE, 1).keys() == {b"abc", b"cd"}


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="was made for 15 tokens"):
        with_one_spelling(from_regex("a", FEW), WHOLE)
