"""Strings: their characters, patterns and lengths, in quotes."""

import re
from collections.abc import Mapping
from typing import Any

from jkv.grammar.anchors import PIECE, split_branches
from jkv.grammar.automaton import Automaton
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
from jkv.grammar.expressions import Expression, Leaf, Literal, Repeat, concat
from jkv.grammar.products import intersect
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.formats import FORMATS
from jkv.grammar.schema.quoting import quote

ANYTHING = "(?s:.*)"
# What ECMA-262 means by these letters, which the compiler takes for any script's.
_ASCII = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\/": "/",
}


def string_expression(schema: Mapping[str, Any], max_bytes: int) -> Expression:
    """Return the strings that a schema describes, with their quotes."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    patterns = []
    if "pattern" in schema:
        patterns.append(search_pattern(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise Unsupported(f"format {schema['format']!r}")
        patterns.append(FORMATS[schema["format"]])
    if not patterns:
        return in_quotes(Repeat(Leaf(_any_character(max_bytes)), least, most))
    texts = compile_regex(patterns[0], max_bytes)
    for pattern in patterns[1:]:
        other = compile_regex(pattern, max_bytes)
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


def search_pattern(pattern: str) -> str:
    """Return the pattern of whole texts in which a schema's pattern is found.

    Raises:
      Unsupported: an anchor inside.
    """
    parts = []
    for branch in split_branches(_read_as_ecma(pattern)):
        before = "" if branch.begins else ANYTHING
        after = "" if branch.ends else ANYTHING
        parts.append(f"(?:{before}(?:{branch.text}){after})")
    return "|".join(parts)


def _any_character(max_bytes: int) -> Automaton:
    return quote(compile_regex("(?s:.)", max_bytes))


def _read_as_ecma(pattern: str) -> str:
    """Write a pattern of ECMA-262, which schemas use, for the compiler."""
    return "".join(
        _read_class(piece) if piece.startswith("[") else _ASCII.get(piece, piece)
        for piece in PIECE.findall(pattern)
    )


def _read_class(piece: str) -> str:
    """Write a class of characters; in the compiler's `[`, `&`, `~` may be operators."""
    head = "[^" if piece.startswith("[^") else "["
    inner = re.findall(r"\\(?:[pPxu]\{[^}]*\}|.)|.", piece[len(head) : -1], re.DOTALL)
    escaped = {"[": r"\[", "&": r"\&", "~": r"\~"}
    return head + "".join(escaped.get(p, _ASCII.get(p, p)) for p in inner) + "]"
