"""GBNF grammars accept exactly the strings that plain Python derives."""

import functools
import itertools
import json
import re

import pytest
from support.grammar.grammar_reading import HostGrammar

from jkv.grammar import NoText, TooLarge, Unsupported, Vocabulary, from_gbnf

pytestmark = pytest.mark.one_end

LETTERS = 'ab()[]{},:" 01.-\n'
VOCABULARY = Vocabulary(
    [*(sign.encode() for sign in LETTERS), b"ab", b"((", b"1.", b'":', b"\xc3", None],
    end_tokens=[len(LETTERS) + 5],
)
END = len(LETTERS) + 5

# Rules, and the same in plain Python: a rule is a list of alternatives, an alternative
# a list of strings and of rule names in brackets.
CASES = {
    "choice": ('root ::= "a" | "b" "ab"?', {"root": [["a"], ["b"], ["b", "ab"]]}),
    "right recursion": (
        'root ::= item root | item\nitem ::= "a" | "(" "b" ")"',
        {"root": [["<item>", "<root>"], ["<item>"]], "item": [["a"], ["(b)"]]},
    ),
    "left recursion": (
        'root ::= root "," "a" | "b"',
        {"root": [["<root>", ",a"], ["b"]]},
    ),
    "nested": (
        'root ::= "(" root ")" | "[" root "]" | "a"  # as deep as said',
        {"root": [["(", "<root>", ")"], ["[", "<root>", "]"], ["a"]]},
    ),
    "through another": (
        'root ::= "a" | pair\npair ::= "(" root "," root ")"',
        {"root": [["a"], ["<pair>"]], "pair": [["(", "<root>", ",", "<root>", ")"]]},
    ),
    "lines": (
        'root ::= (\n  "a"  # one\n  | "b" |\n  ( "0"\n "1" )\n)\n\n# no more\n',
        {"root": [["a"], ["b"], ["01"]]},
    ),
}


def derive(rules, name, depth, most):
    """Return all strings of a rule up to a length, to a nesting depth per rule."""
    if depth[name] < 0:
        return set()
    deeper = {**depth, name: depth[name] - 1}
    found = set()
    for way in rules[name]:
        texts = {""}
        for part in way:
            more = {part}
            if part.startswith("<"):
                more = derive(rules, part[1:-1], deeper, most)
            texts = {a + b for a, b in itertools.product(texts, more)}
            texts = {text for text in texts if len(text) <= most}
        found |= texts
    return found


def accepts(host, text):
    """Return True if the grammar accepts a string of single characters."""
    tokens = [LETTERS.index(sign) for sign in text]
    state = host.start()
    for token in tokens:
        if token not in host.allowed(state):
            return False
        state = host.advance(state, token)
    return END in host.allowed(state)


def list_texts(host, most):
    """Return all strings of a grammar up to a length."""
    found, states = set(), {"": host.start()}
    for _ in range(most + 1):
        longer = {}
        for text, state in states.items():
            allowed = host.allowed(state)
            if END in allowed:
                found.add(text)
            for token in allowed & {*range(len(LETTERS))}:
                longer[text + LETTERS[token]] = host.advance(state, token)
        states = longer
    return found


@pytest.mark.parametrize("name", CASES)
def test_gbnf_strings_equal_the_derivations(name):
    text, rules = CASES[name]
    is_repetition = "recursion" in name
    # Recursion through another rule costs one level.
    depth = 8 if is_repetition else 2
    expected = derive(rules, "root", dict.fromkeys(rules, depth), 7)
    host = HostGrammar(from_gbnf(text, VOCABULARY))
    assert list_texts(host, 7) == {text for text in expected if len(text) <= 7}


SETS = {
    "[ab]": "ab",
    "[^a-b0-9]": '()[]{},:" .-\n',
    "[a\\]\\-]": "a]-",
    "[-a]": "-a",
    "[\\x61\\u0062\\n]": "ab\n",
    ".": LETTERS,
}


@pytest.mark.parametrize("written", SETS)
def test_character_classes(written):
    host = HostGrammar(from_gbnf(f"root ::= {written}", VOCABULARY))
    assert list_texts(host, 1) == {*SETS[written]}


@pytest.mark.parametrize(
    "bounds, counts",
    {"*": (0, 6), "+": (1, 6), "?": (0, 1), "{2}": (2, 2), "{2,}": (2, 6)}.items(),
)
def test_repetitions(bounds, counts):
    host = HostGrammar(from_gbnf(f'root ::= "a"{bounds}', VOCABULARY))
    least, most = counts
    assert list_texts(host, 6) == {"a" * n for n in range(least, most + 1)}
    between = HostGrammar(from_gbnf('root ::= ("a" | "b"){1,2}', VOCABULARY))
    assert len(list_texts(between, 3)) == 6


# llama.cpp's JSON example, with its white space and number rules.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@functools.cache
def json_grammar():
    return HostGrammar(from_gbnf(JSON, VOCABULARY))


def test_the_json_example_accepts_json():
    host = json_grammar()
    for text in ["{}", '{"a": [1, 0.1,{"b":"ab"}]}', '{"":-10.0, "a":[[]]}\n']:
        assert accepts(host, text) and isinstance(json.loads(text), dict)
    for text in ["", "[]", '{"a":01}', "{a:1}", '{"a":1,}']:
        assert not accepts(host, text)
    assert not accepts(host, '{"a":[[[[[[1]]]]]]}')  # deeper than `depth`


WRONG = {
    "": "no rule 'root'",
    'start ::= "a"': "no rule 'root'",
    "root ::= other": "rule 'root' refers to an undefined rule 'other'",
    'root ::= "a': "line 1 of the grammar: a string has no closing",
    'root ::= "a"\nroot ::= "b"': "line 2 of the grammar: rule 'root' is defined twice",
    "root ::= [a": "a character set has no closing ]",
    "root ::= [b-a]": "ends before it begins",
    'root ::= "a"{3,1}': "the lower bound exceeds the upper one",
    'root ::= "a"{,3}': "expected bounds such as {2}, {2,} or {2,5}",
    "root ::= (": "expected )",
    'root = "a"': "expected ::=",
    "root ::= <think>": "token literals are not supported",
    'root ::= "\\q"': r"\q is not an escape",
    'root ::= "\\xZZ"': r"\xZZ is not a character",
    'root ::= "\\ud800"': "not valid Unicode",
    'root ::= "a" )': "expected the end of the line",
    "root ::= " + "(" * 99: "nested too deeply",
}


@pytest.mark.parametrize("text", WRONG)
def test_gbnf_syntax_errors_are_named(text):
    with pytest.raises(Unsupported, match=re.escape(WRONG[text])):
        from_gbnf(text, VOCABULARY)


def test_empty_or_oversized_gbnf_languages_are_refused():
    with pytest.raises(NoText):
        from_gbnf('root ::= "(" root ")"', VOCABULARY)
    with pytest.raises(NoText):
        from_gbnf("root ::= root", VOCABULARY)
    with pytest.raises(TooLarge):
        from_gbnf('root ::= ("a"{1,999}){1,999}', VOCABULARY, max_bytes=2**20)
    with pytest.raises(TooLarge, match="cancelled the compilation"):
        from_gbnf('root ::= ("a"? "b"?){1,2000}', VOCABULARY, timeout=lambda: True)
