"""Concatenated grammars, free text up to a mark, and grammars with a trigger."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.grammar.grammar_reading import HostGrammar

import jkv
from jkv import grammar
from jkv.grammar import (
    Choices,
    Either,
    Pattern,
    Rules,
    Schema,
    Until,
    Vocabulary,
    concatenate,
    wait_for,
)

pytestmark = pytest.mark.one_end

PIECES = [*(bytes([byte]) for byte in b'<>/ab,1{}":'), b"</", b"a>", b"</a>", b"aa"]
PIECES += ["é".encode(), b"\xc3", None, None]
CALL, END = len(PIECES) - 2, len(PIECES) - 1
VOCABULARY = Vocabulary(PIECES, end_tokens=[END])


def spell(tokens):
    return b"".join(PIECES[token] or b"" for token in tokens)


def judge_whole(text, pattern):
    try:
        return re.fullmatch(pattern, text.decode(), re.S) is not None
    except UnicodeDecodeError:
        return False


# Parts, and patterns of their texts: free text is the shortest up to its mark.
CASES = {
    "a choice behind a mark": (
        [Until("</a>"), Choices(["1", "ab"])],
        r"((?!</a>).)*</a>(1|ab)",
    ),
    "a mark that overlaps itself": ([Until("aa"), "b"], r"((?!aa).)*aab"),
    "a mark that may not come": (
        [Until("a>", is_optional=True), Pattern("[1b]{2}")],
        r"((?!a>).)*(a>[1b]{2})?",
    ),
    "texts and a schema": (
        ["<", Schema({"enum": [1, "a"]}, around=",?"), ">"],
        r'<,?(1|"a"),?>',
    ),
    "either": (
        [Either([Choices(["a"]), ["b", Rules('root ::= "1"+')]]), "/"],
        r"(a|b1+)/",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_concatenations_accept_exactly_their_parts(name):
    """Random walks, and all sequences of a few tokens, are compared."""
    parts, pattern = CASES[name]
    host = HostGrammar(concatenate(parts, VOCABULARY))
    rng, num_ended = np.random.default_rng(len(name)), 0
    for _ in range(300):
        state, tokens = host.start(), []
        for _ in range(9):
            allowed = host.allowed(state)
            is_text = judge_whole(spell(tokens), pattern)
            assert (END in allowed) == is_text, spell(tokens)
            num_ended += is_text
            others = sorted(allowed - {END})
            if not others:
                break
            tokens.append(int(rng.choice(others)))
            state = host.advance(state, tokens[-1])
    assert num_ended > 20
    for tokens in np.ndindex(*(14,) * 3):
        state = host.start()
        for token in tokens:
            state = host.advance(state, token) if token in host.allowed(state) else -1
            if state < 0:
                break
        is_text = state >= 0 and END in host.allowed(state)
        assert is_text == judge_whole(spell(tokens), pattern), spell(tokens)


def test_wait_for_allows_all_tokens_before_the_trigger():
    inner = grammar.from_choices(["ab", "b"], VOCABULARY)
    host = HostGrammar(wait_for([CALL], inner, VOCABULARY))
    everything = {*range(len(PIECES))}
    state = host.start()
    for token in (3, 16, 0, 13, 4):  # also partial characters and special tokens
        assert host.allowed(state) == everything
        state = host.advance(state, token)
    state = host.advance(state, CALL)
    assert host.allowed(state) == {3, 4}
    assert host.allowed(host.advance(state, 4)) == {END}
    required = HostGrammar(wait_for([CALL, 13], inner, VOCABULARY, is_required=True))
    assert required.allowed(required.start()) == everything - {END}
    # If the grammar contains the trigger, it keeps its meaning there.
    again = grammar.from_choices(["aaaa"], VOCABULARY)
    host = HostGrammar(wait_for([13], again, VOCABULARY))
    state = host.advance(host.start(), 13)
    assert host.allowed(state) == {3, 14}
    assert host.allowed(host.follow([14, 13, 14, 14])) == {END}


def test_wait_for_constrains_generate_after_the_trigger():
    """Without the trigger the sequence is unconstrained, after it constrained."""
    inner = grammar.from_choices(["b1"], VOCABULARY)
    logits_processor = wait_for([CALL], inner, VOCABULARY)

    def count_on(params, tokens, cache, batch):
        wanted = jnp.where(tokens == CALL, 0, (tokens + params) % len(PIECES))
        logits = jnp.zeros((len(tokens), len(PIECES)))
        logits = logits.at[jnp.arange(len(tokens)), wanted].set(1.0)
        return logits[batch.last_rows], cache

    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=8,
        block_size=8,
        max_sequences=2,
        max_context_length=16,
    )
    _, found = jkv.generate(
        count_on,
        jnp.int32(1),
        jkv.init(config),
        [[CALL - 3], [0]],
        max_new_tokens=6,
        logits_processor=logits_processor,
    )
    found = found.tokens.tolist()
    assert found[0][:5] == [CALL - 2, CALL - 1, CALL, 4, 6]
    assert found[1] == [1, 2, 3, 4, 5, 6]


def test_invalid_waits_and_parts_are_refused():
    one = grammar.from_choices(["a"], VOCABULARY)
    with pytest.raises(ValueError, match="grammar must be of one language"):
        wait_for([CALL], grammar.join([one, one]), VOCABULARY)
    for tokens in ([], [END], [99], [-1]):
        with pytest.raises(ValueError, match="tokens must be ids from 0 to"):
            wait_for(tokens, one, VOCABULARY)
    with pytest.raises(grammar.NoText, match="mark is empty"):
        concatenate([Until("")], VOCABULARY)
    with pytest.raises(grammar.NoText, match="texts is empty"):
        concatenate([Choices([])], VOCABULARY)


def test_parts_are_cached_by_content(tmp_path):
    """The folder has one file per grammar."""
    expressions = [parts for parts, _ in CASES.values()]
    for _ in range(2):
        for parts in expressions:
            concatenate(parts, VOCABULARY, folder=tmp_path)
    assert len([*tmp_path.iterdir()]) == len(expressions)


def test_a_string_is_not_a_list_of_strings():
    """Otherwise its characters would be the choices."""
    for given in ("yes", b"yes", 3, None):
        for make in (
            Choices,
            Either,
            lambda text: grammar.from_choices(text, VOCABULARY),
        ):
            with pytest.raises(ValueError, match=r"(texts|parts) must be a list, got"):
                make(given)
    with pytest.raises(ValueError, match=r"got 'ab'; pass \['ab'"):
        grammar.from_choices("ab", VOCABULARY)
    for given in ([1], ["a", None], [b"a"]):
        with pytest.raises(ValueError, match="must be a list of strings, got"):
            Choices(given)
    assert Choices(text for text in ("1", "ab")).texts == ("1", "ab")
