"""Masks of llguidance, for schemas with jkv's defaults."""

import json

import llguidance
import numpy as np

from jkv.grammar.schema.keywords import IGNORED, OF_TYPE


class TokenBytes:
    """A vocabulary with llguidance's tokenizer interface."""

    bos_token_id = None

    def __init__(self, vocabulary):
        self.eos_token_id = vocabulary.end_tokens[0]
        self.tokens = [t or b"\xff<%d>" % i for i, t in enumerate(vocabulary.tokens)]
        self.special_token_ids = [i for i, t in enumerate(vocabulary.tokens) if not t]

    def __call__(self, text):
        by_bytes = {token: number for number, token in enumerate(self.tokens)}
        text = text if isinstance(text, bytes) else text.encode()
        return [by_bytes[bytes([byte])] for byte in text]


class Matcher:
    """Masks of a schema or a regular expression, step by step."""

    def __init__(self, tokenizer, text, num_tokens):
        # Without forcing, all tokens that spell the required bytes are allowed.
        text = '%llguidance {"no_forcing": true}\n' + text
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
        self.matcher = llguidance.LLMatcher(tokenizer, grammar)
        self.num_tokens = num_tokens
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())

    def allowed(self):
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little")[: self.num_tokens]
        return set(np.flatnonzero(bits).tolist())

    def advance(self, token):
        assert self.matcher.consume_token(token)


def make_tokenizer(vocabulary):
    wrapped = llguidance.TokenizerWrapper(TokenBytes(vocabulary))
    return llguidance.LLTokenizer(wrapped)


def of_schema(schema):
    """Return a schema's grammar with single spaces and jkv's defaults."""
    options = {"whitespace_flexible": False, "whitespace_pattern": "[ ]"}
    options |= {"coerce_one_of": True}
    return "start: %json " + json.dumps(close(schema) | {"x-guidance": options})


def close(schema):
    """Add jkv's defaults to a schema: types, and no additional properties."""
    if isinstance(schema, list):
        return [close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions"):
            closed[name] = {key: close(part) for key, part in value.items()}
        elif name in ("enum", "const"):
            closed[name] = value
        elif name not in IGNORED and not name.startswith("x-"):
            closed[name] = close(value)
    types = [name for name, words in OF_TYPE.items() if words & closed.keys()]
    if types:
        closed.setdefault("type", types)
    if closed.keys() & {"properties", "patternProperties"}:
        closed.setdefault("additionalProperties", False)
    if "prefixItems" in closed:
        closed.setdefault("items", False)
    if isinstance(closed.get("items"), list):
        closed.setdefault("additionalItems", False)
    return closed


def has_open_keys(schema):
    """Return True if an object has both named and additional properties."""
    if isinstance(schema, list):
        return any(map(has_open_keys, schema))
    if not isinstance(schema, dict):
        return False
    is_named = schema.keys() & {"properties", "patternProperties"}
    is_open = schema.get("additionalProperties", False) is not False
    return bool(is_named and is_open) or any(map(has_open_keys, schema.values()))
