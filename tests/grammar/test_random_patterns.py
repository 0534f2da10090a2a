"""Masks of random patterns are those of all spelled texts, tried one by one."""

import itertools
import random
import re

import pytest
from support.grammar_reading import HostGrammar
from support.jax_versions import further

from jkv.grammar import NoText, Vocabulary, from_regex

pytestmark = pytest.mark.one_end
LETTERS = ["a", "b", "é"]
# Bytes of broken UTF-8 among them: the second half of é, and its first half.
PIECES = [b"a", b"b", b"ab", b"ba", b"aa", b"\xc3", b"\xa9", "é".encode(), b"b\xc3"]
LENGTH = 7  # of the texts tried
CHECKED = 3  # tokens after which masks are compared


def random_pattern(rng, leaves):
    if leaves == 1:
        return rng.choice([*LETTERS, "", "[ab]", "[^a]" if rng.random() < 0.3 else "b"])
    left = rng.randrange(1, leaves)
    one, other = random_pattern(rng, left), random_pattern(rng, leaves - left)
    joined = f"(?:{one}|{other})" if rng.random() < 0.4 else f"(?:{one}{other})"
    return joined + rng.choice(["", "", "*", "+", "?", "{1,2}"])


def spelled_texts(pattern, tokens):
    """All texts of up to LENGTH tokens that the pattern matches, as tuples of ids."""
    matcher = re.compile(pattern)
    found = set()
    for length in range(LENGTH + 1):
        for ids in itertools.product(range(len(tokens)), repeat=length):
            try:
                text = b"".join(tokens[i] for i in ids).decode()
            except UnicodeDecodeError:
                continue
            if matcher.fullmatch(text):
                found.add(ids)
    return found


@pytest.mark.parametrize("seed", [*range(12), *further(range(12, 150))])
def test_masks_are_those_of_brute_force(seed):
    rng = random.Random(seed)
    tokens = rng.sample(PIECES, 4)
    pattern = random_pattern(rng, rng.randint(1, 3))
    texts = spelled_texts(pattern, tokens)
    begun = {ids[:n] for ids in texts for n in range(len(ids) + 1)}
    vocabulary = Vocabulary([*tokens, None, b""], end_tokens=[4])
    if not texts:
        with pytest.raises(NoText):
            from_regex(pattern, vocabulary)
        return
    grammar = HostGrammar(from_regex(pattern, vocabulary))
    for ids in sorted(ids for ids in begun if len(ids) <= CHECKED):
        state = grammar.follow(ids)
        expected = {t for t in range(4) if (*ids, t) in begun}
        expected |= {4} if ids in texts else set()
        assert grammar.allowed(state) == expected, (pattern, tokens, ids)
        forced = expected.pop() if len(expected) == 1 else -1
        assert grammar.arrays["forced_token"][state] == forced


def test_texts_that_go_on_through_what_is_no_match_are_kept():
    """outlines-core's own `Index` allows only the end after "ab"."""
    vocabulary = Vocabulary([b"a", b"b", None], end_tokens=[2])
    grammar = HostGrammar(from_regex("(ab)+", vocabulary))
    assert grammar.allowed(grammar.follow([0, 1])) == {0, 2}
    assert grammar.allowed(grammar.follow([0, 1, 0])) == {1}
