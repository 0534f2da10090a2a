"""Strings: their characters, patterns and lengths, in quotes."""

import re
from collections.abc import Mapping
from typing import Any

from jkv.grammar.automaton import Automaton
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
from jkv.grammar.expressions import Expression, Leaf, Literal, Repeat, concat
from jkv.grammar.products import intersect
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.formats import FORMATS
from jkv.grammar.schema.quoting import quote

ANYTHING = "(?s:.*)"
# How ECMA-262 names a group, which Python writes with a P.
_NAMED = re.compile(r"(?<!\\)\(\?<(?=\w+>)")


def string_expression(schema: Mapping[str, Any], max_bytes: int) -> Expression:
    """Return the strings that a schema describes, with their quotes."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    described = []
    if "pattern" in schema:
        described.append(find_pattern(schema["pattern"], max_bytes))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise Unsupported(f"format {schema['format']!r}")
        described.append(compile_regex(FORMATS[schema["format"]], max_bytes))
    if not described:
        return in_quotes(Repeat(Leaf(_any_character(max_bytes)), least, most))
    texts = described[0]
    for other in described[1:]:
        texts = intersect(texts, other, max_bytes=max_bytes)
    if least or most is not None:
        character = Leaf(compile_regex("(?s:.)", max_bytes))
        counted = determinize(Repeat(character, least, most), max_bytes=max_bytes)
        texts = intersect(texts, counted, max_bytes=max_bytes)
    return in_quotes(Leaf(quote(texts)))


def literal_string(text: str) -> Expression:
    """Return a given string, in every way that its characters may be escaped."""
    automaton = determinize(Literal(text.encode()), max_bytes=2**62)
    return in_quotes(Leaf(quote(automaton)))


def in_quotes(inner: Expression) -> Expression:
    """Put quotes around what stands between them."""
    return concat(b'"', inner, b'"')


def find_pattern(pattern: str, max_bytes: int) -> Automaton:
    """Return the texts in which a pattern of a schema is found.

    Patterns are those of ECMA-262, as far as Python reads them alike.
    """
    pattern = _NAMED.sub("(?P<", pattern)
    return compile_regex(pattern, max_bytes, is_search=True, flags=re.ASCII)


def _any_character(max_bytes: int) -> Automaton:
    return quote(compile_regex("(?s:.)", max_bytes))
