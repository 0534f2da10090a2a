"""Random schemas: valid ones with many keywords, and invalid ones."""

import numpy as np

from jkv.grammar.schema.keywords import (
    LIST_WORDS,
    MAP_WORDS,
    SCHEMA_WORDS,
    SERVED,
)

PATTERNS = ["^a", "b$", "^[ab]+$", "a|b", "^.{2}$", "^(?!a)", "[0-9]", "^a?b?$"]
VALUES = [1, 0, True, False, None, "a", "b", "ab", "", 2, 1.5, -1, 7]
VALUES += [[], [1], ["a"], {}, {"a": 1}, {"a": "a", "b": 1}, [1, 2]]
TYPES = ["string", "integer", "number", "array", "object", "object", "null", "boolean"]
KEYS = ["a", "b", "c"]
IN_SCHEMAS = SCHEMA_WORDS - {"contentSchema", "additionalItems", "if", "then", "else"}
IN_LISTS = ["allOf", "anyOf", "oneOf", "oneOf", "prefixItems"]
IN_MAPS = ["properties", "properties", "properties", "dependentSchemas"]
PLAIN = {
    "type": lambda rng: rng.choice(TYPES),
    "enum": lambda rng: rng.sample(VALUES, rng.randrange(1, 6)),
    "const": lambda rng: rng.choice(VALUES),
    "multipleOf": lambda rng: rng.choice([1, 2, 3, 0.5, 0.1, 1.5]),
    "pattern": lambda rng: rng.choice(PATTERNS),
    "format": lambda rng: rng.choice(["date", "ipv4", "uuid"]),
    "uniqueItems": lambda _: True,
    "required": lambda rng: rng.sample(KEYS, rng.randrange(1, 3)),
    "dependentRequired": lambda rng: {rng.choice(KEYS): [rng.choice(KEYS)]},
    "$ref": lambda rng: rng.choice(["#/$defs/x", "#/$defs/y"]),
}
COUNTS = sorted(w for w in SERVED if w.startswith(("min", "max", "exclusive")))


def make_schema(rng):
    """Return a schema with a valid value for each keyword."""
    definitions = {"x": _schema(rng, 1), "y": _schema(rng, 2)}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return _schema(rng, 3) | {"$defs": definitions, "$schema": dialect}


def _schema(rng, depth):
    schema = {}
    inner = [*sorted(IN_SCHEMAS), *IN_LISTS, *IN_MAPS, "patternProperties", "if"]
    words = [*PLAIN, "type", *COUNTS, *(inner if depth else [])]

    def part():
        if rng.random() < 0.1:
            return rng.choice([True, False])
        return _schema(rng, depth - 1)

    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        word = rng.choice(words)
        if word in PLAIN:
            schema[word] = PLAIN[word](rng)
        elif word in COUNTS:
            schema[word] = rng.randrange(5)
        elif word == "if":
            schema |= {"if": part(), "then": part(), "else": part()}
        elif word in IN_SCHEMAS:
            schema[word] = part()
        elif word in IN_LISTS:
            schema[word] = [part() for _ in range(rng.randrange(1, 4))]
        else:
            keys = PATTERNS if word == "patternProperties" else KEYS
            schema[word] = {k: part() for k in rng.sample(keys, rng.randrange(1, 3))}
    return schema


WRONG = [None, True, 0, -1, 2.0, 2.5, 1e308, float("inf"), float("nan"), 10**30, -0.0]
WRONG += ["", "string", "#", "#/$defs/a", "#a", "(", "a{2,1}", "[^]", "(?=a)b", "uri"]
WRONG += ["\ud800", "http://json-schema.org/draft-04/schema#", "http://[", ["a", "a"]]
WORDS = sorted(SERVED | {"$id", "$anchor", "$defs", "definitions", "$dynamicAnchor"})


def make_wrong_schema(rng, depth=3):
    """Return a schema with arbitrary keyword values, some of them valid."""
    schema = {}
    for _ in range(rng.randrange(1, 4)):
        word = rng.choice(WORDS)
        is_right = rng.random() < 0.75
        parts = [make_wrong_schema(rng, depth - 1) for _ in range(2 * bool(depth))]
        if is_right and depth and word in SCHEMA_WORDS:
            schema[word] = parts[0]
        elif is_right and depth and word in LIST_WORDS:
            schema[word] = parts
        elif is_right and depth and word in MAP_WORDS:
            schema[word] = dict(zip("ab", parts, strict=True))
        elif is_right and word in PLAIN:
            schema[word] = PLAIN[word](rng)
        else:
            schema[word] = _wrong_value(rng, depth)
    return schema


def _wrong_value(rng, depth):
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return [_wrong_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 2:
        key = rng.choice([*WORDS, "a", "\ud800", "a/b~"])
        return {key: _wrong_value(rng, depth - 1)}
    return rng.choice(WRONG)


def draw_text(automaton, rng, most=60):
    """Draw a string of an automaton; past `most` bytes it ends as soon as possible."""
    table, state, text = automaton.transitions, 0, bytearray()
    left = _distances(automaton)
    while not (automaton.accepting[state] and (rng.random() < 0.3 or len(text) > most)):
        bytes_ = np.flatnonzero(table[state] >= 0).tolist()
        if not bytes_:
            break  # final state without successors
        if len(text) > most:
            byte = min(bytes_, key=lambda byte: left[table[state, byte]])
        else:
            printed = [byte for byte in bytes_ if 32 <= byte < 127]
            byte = rng.choice(printed if printed and rng.random() < 0.3 else bytes_)
        text.append(byte)
        state = int(table[state, byte])
    return bytes(text)


def _distances(automaton):
    """Return the distance in bytes of each state from a final one."""
    far = len(automaton.transitions) + 1
    left = np.where(automaton.accepting, 0, far)
    while True:
        behind = np.append(left, far)[automaton.transitions].min(axis=1) + 1
        nearer = np.minimum(left, behind)
        if (nearer == left).all():
            return left
        left = nearer
