"""A grammar inside jit: masks, states, ends, variants."""

import contextlib
import dataclasses
import itertools
import re
import tracemalloc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.grammar.grammar_reading import HostGrammar

from jkv.grammar import (
    NoText,
    TooLarge,
    Unsupported,
    Vocabulary,
    from_choices,
    from_json_schema,
    from_regex,
    join,
    token_table,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.regexes import compile_regex

# 40 tokens, so that a mask has more than one word.
WORDS = [b"a", b"b", b"ab", b"1", b"23", b"{", b"}", b" "]
TOKENS = [*WORDS, None, b"", *[bytes([65 + i]) for i in range(28)], None, None]
VOCABULARY = Vocabulary(TOKENS, end_tokens=[38, 39])
NO_PROMPTS = jnp.full((3, 1), -1, jnp.int32)


def process_after(grammar, rows, variants):
    """Return processed zero logits after each row of tokens; -1 ends a row."""
    tokens = np.full((len(rows), 4), -1, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids

    @jax.jit
    @chex.assert_max_traces(n=1)
    def play(grammar, tokens, variants):
        state = grammar.begin(variants, jnp.full((len(rows), 1), -1, jnp.int32))
        for step in range(4):
            state = grammar.advance(state, tokens[:, step])
        logits = grammar.process(state, jnp.ones((len(rows), 41)))
        return state, logits, grammar.ended(state), grammar.forced(state)

    return play(grammar, tokens, jnp.asarray(variants, jnp.int32))


def test_jitted_steps_equal_the_tables():
    one = from_choices(["ab1", "abab", "b"], VOCABULARY)
    other = from_regex("(ab)+", VOCABULARY)
    grammar = join([one, join([other])])
    assert (grammar.num_variants, grammar.num_end_tokens) == (2, 2)
    rows = [[], [2], [2, 3], [2, 3, 38], [0, 0], [], [2, 2], [2, 39], [40]]
    variants = [0, 0, 0, 0, 0, 1, 1, 1, 1]
    state, logits, ended, forced = process_after(grammar, rows, variants)
    expected = [{0, 1, 2}, {0, 2, 3}, {38, 39}, {38, 39}, set()]
    expected += [{0, 2}, {0, 2, 38, 39}, {38, 39}, set()]
    assert [set(np.flatnonzero(row == 1.0)) for row in logits] == expected
    assert set(np.unique(logits)) == {-np.inf, 1.0}
    assert ended.tolist() == [ids[-1:] in ([38], [39]) for ids in rows]
    assert forced.tolist() == [-1] * 9
    read = HostGrammar(grammar)
    for row, ids, variant in zip(state, rows[:-1], variants, strict=False):
        assert row == read.follow(ids, variant)


@pytest.mark.one_end
def test_logits_of_allowed_tokens_are_unchanged():
    grammar = from_choices(["a"], VOCABULARY)
    logits = jax.random.normal(jax.random.key(0), (3, 40)) * 1e3
    state = grammar.begin(jnp.zeros(3, jnp.int32), NO_PROMPTS)
    processor = grammar.process(state, logits)
    assert processor.dtype == logits.dtype
    assert (processor[:, 0] == logits[:, 0]).all() and (
        processor[:, 1:] == -jnp.inf
    ).all()
    assert grammar.forced(state).tolist() == [0, 0, 0]


@pytest.mark.one_end
def test_sequences_without_a_variant_are_unconstrained():
    grammar = join([from_choices(["a"], VOCABULARY), from_choices(["b"], VOCABULARY)])
    state = grammar.begin(jnp.array([-1, 1, 0]), NO_PROMPTS)
    assert state[0] == state[2] and state[1] != state[2]


@pytest.mark.one_end
def test_an_empty_text_may_end_immediately():
    grammar = HostGrammar(from_regex("a*", VOCABULARY))
    assert grammar.allowed(grammar.start()) == {0, 38, 39}
    assert grammar.advance(grammar.start(), 38) == grammar.ended


@pytest.mark.one_end
@pytest.mark.parametrize("pattern", ["c", "1c", "[^\\s\\S]|z", "a{3}é", "a^b", "(a$)b"])
def test_a_language_without_spelling_is_refused(pattern):
    with pytest.raises(NoText, match="cannot spell any string"):
        from_regex(pattern, VOCABULARY)


@pytest.mark.one_end
def test_no_choices_are_refused():
    with pytest.raises(NoText, match="texts is empty"):
        from_choices([], VOCABULARY)


@pytest.mark.one_end
def test_dead_ends_are_masked():
    """`1` also starts "1c", which no token completes."""
    grammar = HostGrammar(from_choices(["1c", "ab"], VOCABULARY))
    assert grammar.allowed(grammar.start()) == {0, 2}


@pytest.mark.one_end
@pytest.mark.parametrize("pattern", ["^a$", "^a|a$", r"\Aa\Z", "(^a)$", "(^|b^)a"])
def test_anchors_at_the_ends_have_no_effect(pattern):
    grammar = HostGrammar(from_regex(pattern, VOCABULARY))
    assert grammar.allowed(grammar.start()) == {0}


@pytest.mark.one_end
@pytest.mark.parametrize(
    "pattern", ["(?=a(?!b))a", r"(a)\1", "(", r"(?=\b)a", "(?m)^a$", "(?>a)"]
)
def test_unsupported_patterns_are_refused(pattern):
    with pytest.raises(Unsupported):
        from_regex(pattern, VOCABULARY)


@pytest.mark.one_end
@pytest.mark.parametrize(
    "pattern",
    [
        *("^^a", "^(^a$|^b$)$", r"a\b", r"\ba\b1?", r"a\B|^\b", "(?!a)", "(?!ab).*"),
        *("(?=.*a)(?=.*b).{2,3}", "(?<!a)b|b(?<=ab)", "(?:(?!ab).)*", "(?!a$)[ab]+"),
        *(
            "(?i)aB",
            "(?i)[^k]",
            "(?i:\\w)",
            "(?i)[a-j]",
            "(?ai:[k-z])",
            "(?a)\\s",
            "\\d",
        ),
    ],
)
def test_patterns_match_like_python_re(pattern):
    automaton = compile_regex(pattern, Bounds(2**28))
    texts = map("".join, itertools.product("ab1 ", repeat=3))
    texts = [text[:length] for text in texts for length in range(4)]
    for text in [*texts, *map(chr, range(0xD800)), "İ", "\u212a", "𝔸"]:
        is_match = re.fullmatch(pattern, text) is not None
        assert automaton.matches(text.encode()) == is_match, text


@pytest.mark.one_end
def test_oversized_patterns_are_refused():
    with pytest.raises(TooLarge, match="max_bytes"):
        from_regex("[ab]*a[ab]{24}", VOCABULARY, max_bytes=2**22)
    for wrong in (float("nan"), -1):
        with pytest.raises(ValueError, match="max_bytes must be >= 0"):
            from_choices(["ab1"], VOCABULARY, max_bytes=wrong)
    with pytest.raises(TooLarge, match="max_bytes"):
        from_choices(["ab1"], VOCABULARY, max_bytes=100)
    with pytest.raises(TooLarge, match="max_bytes"):
        from_regex("(?:(?:a{1,15}){1,15}){1,15}", VOCABULARY, max_bytes=2**22)
    with pytest.raises(TooLarge, match="timeout"):
        from_regex("[ab]{99}", VOCABULARY, timeout=0.0)


@pytest.mark.one_end
def test_compilation_reports_progress(monkeypatch):
    monkeypatch.setattr(token_table, "_PAIRS_AT_ONCE", 1)
    calls = []
    vocabulary = dataclasses.replace(
        VOCABULARY, progress=lambda done, of_all: calls.append((done, of_all))
    )
    grammar = from_regex("(ab|1){3}", vocabulary)
    num_states = len(calls)
    assert calls == [(done + 1, num_states) for done in range(num_states)]
    assert num_states >= 7
    silent = from_regex("(ab|1){3}", VOCABULARY)
    chex.assert_trees_all_equal(grammar, silent)


def test_grammars_of_different_vocabularies_are_not_joined():
    other = Vocabulary(TOKENS[:39], end_tokens=[38])
    with pytest.raises(ValueError, match="of one vocabulary"):
        join([from_choices(["a"], VOCABULARY), from_choices(["a"], other)])
    with pytest.raises(ValueError, match="grammars is empty"):
        join([])


def test_too_few_logits_are_refused_at_trace_time():
    grammar = from_choices(["a"], VOCABULARY)
    with pytest.raises(ValueError, match="40 tokens, got 39"):
        jax.eval_shape(grammar.process, jnp.zeros(1, jnp.int32), jnp.zeros((1, 39)))


@pytest.mark.one_end
@pytest.mark.parametrize("ends", [[], [40], [-1]])
def test_end_tokens_must_be_ids(ends):
    with pytest.raises(ValueError, match="end_tokens"):
        Vocabulary(TOKENS, end_tokens=ends)


@pytest.mark.parametrize(
    "schema, most",
    [
        ({"type": "string", "maxLength": 600}, 12 * 2**20),
        ({"type": "string", "maxLength": 300}, 2**22),
        ({"const": [*range(1500)]}, 2**22),
        ({"properties": {f"a{i}": {"type": "string"} for i in range(40)}}, 2**22),
        ({"type": "number", "minimum": 1e40}, 2**21),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 60}, 2**22),
    ],
    ids=range(6),
)
def test_max_bytes_bounds_compilation_memory(schema, most):
    """Memory is bounded for created and for refused grammars."""
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), None], [256])
    tracemalloc.start()
    try:
        with contextlib.suppress(TooLarge):
            from_json_schema(schema, vocabulary, max_bytes=most)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * most
