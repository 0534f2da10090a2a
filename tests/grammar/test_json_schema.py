"""JSON schemas: matching texts, and refused keywords."""

import json
import random
import re

import pytest
from support.grammar.grammar_reading import HostGrammar
from support.grammar.random_schemas import make_wrong_schema
from support.grammar.schema_keywords import PAGE, ROWS, make_page

from jkv.grammar import (
    NoText,
    TooLarge,
    Unsupported,
    Vocabulary,
    from_json_object,
    from_json_schema,
)
from jkv.grammar.schema import judging
from jkv.grammar.schema.formats import FORMATS
from jkv.grammar.schema.keywords import SERVED

pytestmark = pytest.mark.one_end
BYTES = Vocabulary([*(bytes([b]) for b in range(256)), None], end_tokens=[256])


def grammar_of(schema, **options):
    return HostGrammar(from_json_schema(schema, BYTES, whitespace="", **options))


def is_text(grammar, text):
    state = grammar.follow(text.encode() if isinstance(text, str) else text)
    return 256 in grammar.allowed(state)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "x": {}},
    "required": ["age"],
}
TREE = {"$ref": "#/$defs/leaf", "$defs": {"leaf": {"enum": ["a", "b"]}}}
# (schema, matching texts, other texts).
CASES = {
    "integer": ({"type": "integer"}, "0 -0 7 -12 100", "01 1.0 1e2 + - ''"),
    "number": ({"type": "number"}, "0 -1.50 1e5 2E-07", "1. .5 1e 00.1"),
    "from": ({"type": "integer", "minimum": -12}, "0 -12 -9 5 100", "-13 -0 -100"),
    "between": (
        {"type": "integer", "minimum": 97, "exclusiveMaximum": 1002},
        "97 99 100 999 1000 1001",
        "96 9 1002 2000 10000",
    ),
    "decimals": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.25},
        "0.01 0.10 1 1.0 1.25 1.250 1.2",
        "0 0.00 1.26 1.3 2 -1 1e0 12",
    ),
    "negative": (
        {"type": "number", "minimum": -0.5, "maximum": -0.05},
        "-0.5 -0.50 -0.05 -0.1",
        "-0.51 -0.04 0 -1 0.1 -0",
    ),
    "draft 4": (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
        "4 30",
        "3 2",
    ),
    "whole": ({"type": "number", "multipleOf": 1}, "3 -4", "3.5"),
    "lengths": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        r'"ab" "é€😀" "\n\"" "\u000A\u001fa"',
        r'"a" "abcd" "\n" "\x" "\/a" "\u0061b"',
    ),
    "pattern": (
        {"type": "string", "pattern": '^a\\d+$|"', "maxLength": 4},
        r'"a1" "a123" "\"" "x\"y"',
        r'"a" "a1234" "b1" """ "a٣"',
    ),
    "classes": (
        {"pattern": "^[[&~\\w-]+$"},
        '"[&~a-" "_9"',
        '"" "é" "]"',
    ),
    "date": ({"format": "date"}, '"2024-02-29"', '"2024-02-30" "2024-13-01"'),
    "time": ({"format": "time"}, '"23:59:60Z" "00:00:00.5+01:30"', '"24:00:00Z"'),
    "uuid": (
        {"format": "uuid"},
        '"01234567-89ab-cdef-0123-456789ABCDEF"',
        '"01234567-89ab-cdef-0123-456789ABCDE"',
    ),
    "ipv6": ({"format": "ipv6"}, '"::" "1::2" "1:2:3:4:5:6:7:8"', '"1::2::3" ":1"'),
    "email": (
        {"format": "email"},
        r'"a.b@c.de" "\"a..b@c\"@d" "\"\\\\\\\"\"@[127.0.0.1]" "\"\"@a"',
        r'"a" "a@" ".a@b" "\"a@b" "\"a\"b@c" "\"a\"b\"@c" "\"\u00e9\"@a"',
    ),
    "uri": ({"format": "uri"}, '"http://a:1/b?c#d" "x:"', '"a" "//a" "http://a b"'),
    "values": (
        {"enum": ["a", 1, 1.0, None, True, {"k": [1]}]},
        '"a" 1 null true {"k":[1]}',
        'a 1.0 {"k":1} {} false',
    ),
    "constant": ({"const": "\n\x7f"}, r'"\n\u007f" "\u000a\u007F"', '"\x7f" "n"'),
    "object": (
        PERSON,
        '{"age":1} {"name":"","age":1} {"age":1,"x":null} {"age":1,"x":[{}]}',
        '{} {"name":""} {"age":1,"name":""} {"age":1,} {"age":1,"y":1}',
    ),
    "open": (
        {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
        '{} {"a":1} {"b":2} {"a":1,"b":2,"":2} {"aa":2}',
        '{"a":2} {"b":2,"a":1} {"\\u0061":2}',
    ),
    "patterns of keys": (
        {"patternProperties": {"^x": {"const": 1}, "y$": {"const": 2}}},
        '{} {"x":1,"y":2,"xx":1}',
        '{"x":2} {"z":1} {"y":1}',
    ),
    "a map": (
        {"additionalProperties": {"const": 1}, "minProperties": 1, "maxProperties": 2},
        '{"a":1} {"a":1,"b":1}',
        '{} {"a":1,"b":1,"c":1}',
    ),
    "nothing": ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
    "array": (
        {"items": {"const": 1}, "minItems": 1, "maxItems": 3},
        "[1] [1,1] [1,1,1]",
        "[] [1,1,1,1] [1,] [,1]",
    ),
    "tuple": (
        {"prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1},
        "[1] [1,2]",
        "[] [2] [1,2,1]",
    ),
    "tuple and more": (
        {"items": [{"const": 1}], "additionalItems": {"const": 2}, "maxItems": 3},
        "[] [1] [1,2] [1,2,2]",
        "[2] [1,1] [1,2,2,2]",
    ),
    "any of": ({"anyOf": [{"type": "null"}, {"const": 1}]}, "null 1", "2"),
    "one of": ({"oneOf": [{"type": "null"}, {"const": 1}]}, "null 1", "2"),
    "beside any of": (
        {"type": "string", "anyOf": [{"minLength": 3}, {"const": "a"}]},
        '"a" "abc"',
        '"b" "ab" 1',
    ),
    "all of": (
        {"allOf": [{"minimum": 3}, {"type": "integer"}], "maximum": 5},
        "3 4 5",
        "2 6 3.5",
    ),
    "reference": (TREE, '"a" "b"', '"c"'),
    "types": ({"type": ["null", "integer"]}, "null 3", '"a" 1.5'),
    "free": ({}, 'null [1,{"a":[]}] "a" {"a":{"b":[1]}}', '[[[[]]]] {"a":} nul'),
}


@pytest.mark.parametrize("name", CASES)
def test_a_schema_accepts_exactly_its_texts(name):
    schema, valid, others = CASES[name]
    grammar = grammar_of(schema)
    assert [text for text in valid.split(" ") if not is_text(grammar, text)] == []
    assert [text for text in others.split(" ") if is_text(grammar, text)] == []


@pytest.mark.parametrize("words", [words for words, _, _ in ROWS])
def test_documented_keywords_accept_and_reject_as_listed(words):
    (cases,) = [cases for row, _, cases in ROWS if row == words]
    for schema, valid, others in cases:
        grammar = grammar_of(schema)
        lost = [text for text in valid.split() if not is_text(grammar, text)]
        wrong = [text for text in others.split() if is_text(grammar, text)]
        assert (lost, wrong) == ([], []), schema


def test_the_page_lists_every_keyword():
    """The page's table is generated by `support.grammar.schema_keywords`."""
    assert PAGE.read_text() == make_page()
    named = {word for row, _, _ in ROWS for word in re.findall("`([^`]+)`", row)}
    assert named == SERVED
    (formats,) = [text for row, text, _ in ROWS if row == "`format`"]
    versions = {f"uuid{number}" for number in range(1, 9)}
    assert {*re.findall("`([^`]+)`", formats)} | versions == {*FORMATS}


# Refused schemas, and words of the error.
REFUSED = {
    "'contains' beside 'prefixItems'": {"prefixItems": [{}], "contains": {}},
    "'uniqueItems' of arrays or objects, at #/properties/a": {
        "properties": {"a": {"items": {"type": "array"}, "uniqueItems": True}}
    },
    "does not point to a schema": {"$ref": "#/$defs/a"},
    "only references within": {"$ref": "https://example.com/schema"},
    "'propertyNames' at #/not cannot be negated": {
        "not": {"propertyNames": {"maxLength": 3}}
    },
    "'minProperties' above 1": {"minProperties": 2},
    r"'\Z' in the pattern": {"pattern": r"a\Z"},
    "nested assertions": {"pattern": "(?!a(?!b))"},
    "'type' at #/properties/a~1b must be": {"properties": {"a/b": {"type": "text"}}},
    "'minLength' at # must be": {"minLength": 2.5},
    "'maximum' at # must be a finite number": {"maximum": float("inf")},
    "'anyOf' at # must be": {"anyOf": []},
    "'const' at # must be": {"const": "\ud800"},
    "'enum' at #/items must be": {"items": {"enum": [{"a": [float("nan")]}]}},
    "'required' at # must be": {"required": ["\udfff"]},
    "'pattern' at # must be": {"pattern": "\udfff"},
    "draft 3": {"$schema": "http://json-schema.org/draft-03/schema#"},
    "schema is not JSON": {"enum": [{1, 2}]},
    "is an object or a boolean": 5,
}


@pytest.mark.parametrize("error", REFUSED)
def test_unsupported_keywords_are_refused_with_their_location(error):
    with pytest.raises(Unsupported, match=re.escape(error)):
        grammar_of(REFUSED[error])


def test_strict_refuses_unknown_keywords():
    for word, value in (("frobnicate", 1), ("format", "colour")):
        schema = {"items": {word: value}}
        grammar_of(schema)
        with pytest.raises(Unsupported, match=f"{word}.* at #/items"):
            grammar_of(schema, strict=True)
    grammar_of({"const": 1, "title": "t", "x-more": 2}, strict=True)


def test_recursion_is_expanded_to_the_given_depth():
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"items": {"$ref": "#/$defs/node"}}},
    }
    for depth in range(4):
        grammar = grammar_of(tree, recursion=depth)
        assert is_text(grammar, "[" * (depth + 1) + "]" * (depth + 1))
        assert not is_text(grammar, "[" * (depth + 2) + "]" * (depth + 2))


def nested(levels, word="items"):
    schema = {"type": "null"}
    for _ in range(levels):
        schema = {word: schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(150),
        nested(3000, "not"),
        {"const": [[]]} | {"const": eval("[" * 80 + "]" * 80)},
        {"pattern": "(?:" * 3000 + ")" * 3000},
        {"pattern": "(?:(?:a{1,15}){1,15}){1,15}"},
        {"multipleOf": 123456789},
        {"minLength": 10**9},
        {"minItems": 10**9},
        {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(12)]},
    ],
)
def test_oversized_schemas_are_refused_before_compilation(schema):
    with pytest.raises(TooLarge):
        grammar_of(schema, max_bytes=2**23)


def test_invalid_schemas_raise_only_value_errors():
    """The suite `schemas` runs thousands of them."""
    served = 0
    for seed in range(150):
        try:
            grammar_of(make_wrong_schema(random.Random(seed)), max_bytes=2**22, depth=1)
            served += 1
        except ValueError as error:
            assert not isinstance(error, UnicodeError), seed
    assert 20 < served < 130


def test_a_repetition_of_empty_is_empty():
    assert is_text(grammar_of({"pattern": "^(?:){1000000000}a$"}), '"a"')


def test_compiling_stops_at_its_deadline():
    with pytest.raises(TooLarge, match="timeout"):
        grammar_of({"type": "object"}, timeout=0.0)


def test_long_strings_and_lists_are_compiled():
    url = grammar_of({"type": "string", "format": "uri", "maxLength": 2083})
    assert is_text(url, '"https://example.com/a/path?of=60&characters=12345678901234"')
    many = grammar_of({"items": {"type": "string", "maxLength": 90}, "maxItems": 10**6})
    assert is_text(many, '["a","b","c"]')
    for grammar in (url, many):
        assert grammar.grammar.num_states < 2**14


def test_many_values_are_compared_once_each(monkeypatch):
    calls = []

    def kind_of(value, original=judging.kind_of):
        calls.append(value)
        return original(value)

    monkeypatch.setattr(judging, "kind_of", kind_of)
    values = [f"v{i}" for i in range(500)]
    grammar = grammar_of({"enum": values, "not": {"enum": values[1:]}})
    assert is_text(grammar, '"v0"') and not is_text(grammar, '"v1"')
    assert len(calls) < 20 * len(values)


def test_distinct_items_of_many_values():
    values = [f"v{i}" for i in range(200)]
    schema = {"items": {"enum": [*values, "v7"]}, "uniqueItems": True, "minItems": 2}
    grammar = grammar_of(schema)
    assert is_text(grammar, '["v0","v7","v199"]')
    for text in ('["v7"]', '["v0","v7","v7"]'):
        assert not is_text(grammar, text)


def test_a_schema_above_the_memory_limit_is_refused():
    with pytest.raises(TooLarge, match="max_bytes"):
        from_json_schema({"maxLength": 10_000}, BYTES, max_bytes=2**20)


@pytest.mark.parametrize(
    "schema", [False, {"enum": []}, {"minItems": 2, "maxItems": 1}]
)
def test_schemas_without_a_value_are_refused(schema):
    with pytest.raises(NoText):
        grammar_of(schema)


def test_white_space_is_a_single_optional_space():
    schema = {"properties": {"a": {"items": {"const": 1}}}}
    grammar = HostGrammar(from_json_schema(schema, BYTES))
    for text in ('{"a":[1,1]}', '{ "a" : [ 1 , 1 ] }', '{"a": [1, 1]}', "{ }", "{}"):
        assert is_text(grammar, text), text
    for text in ('{  "a":[]}', " {}", "{} ", '{"a":[1 ,  1]}', '{"a":[  ]}', "{\n}"):
        assert not is_text(grammar, text), text


def test_free_form_objects_of_a_depth():
    grammar = HostGrammar(from_json_object(BYTES, depth=1))
    for value in ({}, {"a": 1, "b": [None, "x"], "c": {"d": True}}):
        assert is_text(grammar, json.dumps(value))
    for text in ("[]", "1", '{"a":[[]]}', '{"a":{"b":{}}}'):
        assert not is_text(grammar, text)
