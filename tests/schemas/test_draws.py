"""Strings drawn from random schemas are valid by the package `jsonschema`.

A separate suite, `schemas`. Numbers are validated as written, not as floats.
"""

import decimal
import json
import random
import re

import pytest
from support.grammar.random_schemas import draw_text, make_schema, make_wrong_schema

from jkv.grammar import TooLarge, Unsupported, Vocabulary, from_json_schema
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.schema.compilation import Reading
from jkv.grammar.schema.compilation import compile_schema as texts_of

jsonschema = pytest.importorskip("jsonschema")
LETTERS = Vocabulary([*(bytes([byte]) for byte in range(256)), None], [256])
# The validator cannot handle exponents of three digits.
LARGE = re.compile(rb"[eE][+-]?[0-9]{3}")


def exact(text):
    return json.loads(text, parse_float=decimal.Decimal)


def compile_schema(schema):
    bounds = Bounds(2**26)
    texts = texts_of(schema, Reading("[ ]?", 1, 1, False), bounds)
    return determinize(texts, bounds)


@pytest.mark.parametrize("first", range(0, 1500, 100))
def test_draws_of_random_schemas_are_valid(first):
    num_served = num_draws = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        schema = make_schema(rng)
        try:
            automaton = compile_schema(schema)
        except (Unsupported, TooLarge):
            continue
        if not automaton.accepting.any():
            continue  # the schema has no string
        num_served += 1
        judge = jsonschema.Draft202012Validator(
            exact(json.dumps(schema)), format_checker=jsonschema.FormatChecker()
        )
        for _ in range(10):
            text = draw_text(automaton, rng)
            if not LARGE.search(text):
                try:
                    is_valid = judge.is_valid(exact(text))
                except (RecursionError, decimal.InvalidOperation):
                    continue  # the validator's error
                assert is_valid, (seed, text, schema)
                num_draws += 1
    assert num_served > 50 and num_draws > 300


@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_invalid_schemas_raise_only_value_errors(first):
    served = 0
    for seed in range(first, first + 1000):
        schema = make_wrong_schema(random.Random(seed))
        try:
            from_json_schema(
                schema, LETTERS, depth=1, recursion=1, max_bytes=2**23, timeout=20
            )
            served += 1
        except ValueError as error:
            assert "timeout" not in str(error), seed
            assert not isinstance(error, UnicodeError), seed
    assert served > 100
