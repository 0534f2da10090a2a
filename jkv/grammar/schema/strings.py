"""JSON's strings and punctuation: characters, patterns and lengths, in quotes.

An escape sequence stands for one byte, so an automaton of strings becomes one of JSON
by substituting bytes. A quote and a backslash have one escape; control characters (and
U+007F, which many encoders escape) have `\\u00XX`, and five of them a short form. Other
characters are written verbatim. `Punctuation` has the brackets, separators and white
space around values.
"""

import dataclasses
import functools
from collections.abc import Sequence

from jkv.grammar.automaton import (
    BYTES_OF_PAIR,
    Automaton,
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    Separated,
    concat,
    intersect,
    optional,
    subtract,
)
from jkv.grammar.bounds import UNBOUNDED, Bounds
from jkv.grammar.determinization import determinize, substitute
from jkv.grammar.errors import TooLarge
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.expansion import Way, counts_of, given, named
from jkv.grammar.schema.judging import Judge
from jkv.grammar.schema.negation import NOT_PATTERN, NOT_VALUES

ANYTHING = "(?s:.*)"
# States per character, and the budget for patterns with a length; a longer
# `maxLength` is lowered.
_STATES_OF_CHARACTER, _MAX_COUNTED = 15, 2**12
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}


def _escape(byte: int) -> Expression:
    """Return the escapes of a byte."""
    found = {_SHORT[byte]} if byte in _SHORT else set()
    if byte not in b'"\\':
        found |= {f"u00{byte:02x}", f"u00{byte:02X}"}
    return Choice([Literal(f"\\{each}".encode()) for each in sorted(found)])


_ESCAPES = {byte: _escape(byte) for byte in sorted({*_SHORT, *range(0x20), 0x7F})}


def string_expression(
    way: Way, judge: Judge, bounds: Bounds, max_counted: int
) -> Expression:
    """Return the strings that the atoms describe, in quotes."""
    found = string_automaton(way, judge, bounds)
    if isinstance(found, Automaton):
        return quoted(found)
    least, most = found
    if most is not None:
        most = max(least, min(most, max_counted // _STATES_OF_CHARACTER))
    character = quote(compile_regex("(?s:.)", bounds))
    return _in_quotes(Repeat(Leaf(character), least, most))


def string_automaton(
    way: Way, judge: Judge, bounds: Bounds
) -> Automaton | tuple[int, int | None]:
    """Return the strings without quotes; only the bounds if nothing else applies."""
    least, most = counts_of(way, "Length")
    described = judge.described(way, is_short=most is not None)
    others = [judge.strings("pattern", one) for one in given(way, NOT_PATTERN)]
    taken = [value for value in named(way, NOT_VALUES) if isinstance(value, str)]
    if taken:
        literals = Choice([Literal(text.encode()) for text in taken])
        others.append(determinize(literals, bounds))
    if most is not None and least > most:
        return determinize(Choice([]), bounds)
    if not described and not others:
        return least, most
    texts = described.pop() if described else compile_regex(ANYTHING, bounds)
    for other in described:
        texts = intersect(texts, other, bounds)
    for other in others:
        texts = subtract(texts, other, bounds)
    return _counted(texts, least, most, bounds)


def _counted(
    texts: Automaton, least: int, most: int | None, bounds: Bounds
) -> Automaton:
    """Return the strings of `least` to `most` characters."""
    longest = _longest(texts)
    if longest is not None and most is not None and longest <= most:
        most = None  # the bound is implied
    if not least and most is None:
        return texts
    if most is not None:
        most = max(least, min(most, _MAX_COUNTED // _STATES_OF_CHARACTER))
    while True:
        counted = counted_characters(least, most, bounds)
        if most is None or most <= least:
            return intersect(texts, counted, bounds)
        try:
            return intersect(texts, counted, Bounds(_MAX_COUNTED * BYTES_OF_PAIR))
        except TooLarge:
            most = max(least, most // 2)


def counted_characters(least: int, most: int | None, bounds: Bounds) -> Automaton:
    """Return all strings of `least` to `most` characters."""
    character = Leaf(compile_regex("(?s:.)", bounds))
    return determinize(Repeat(character, least, most), bounds)


def _longest(texts: Automaton) -> int | None:
    """Return the length of the longest string in bytes; None if unbounded."""
    level, newest, seen = 0, {0}, 0
    while newest:
        newest = {to for state in newest for _, _, to in texts.runs[state]}
        level, seen = level + 1, seen + len(newest)
        if level > len(texts.transitions) or seen > 2**16:
            return None
    return level - 1


def any_string(bounds: Bounds) -> Expression:
    return _in_quotes(Repeat(Leaf(quote(compile_regex("(?s:.)", bounds)))))


def literal_string(text: str) -> Expression:
    """Return a given string, with all escapes of its characters."""
    signs = (bytes([byte]) for byte in text.encode())
    return _in_quotes(concat(*(_ESCAPES.get(sign[0], sign) for sign in signs)))


def quoted(texts: Automaton) -> Expression:
    """Return a language as JSON strings, in quotes."""
    return _in_quotes(Leaf(quote(texts)))


def _in_quotes(inner: Expression) -> Expression:
    return concat(b'"', inner, b'"')


@functools.lru_cache(maxsize=64)
def quote(texts: Automaton) -> Automaton:
    """Return a language with JSON's escapes, without quotes."""
    return substitute(texts, _ESCAPES, UNBOUNDED)


@dataclasses.dataclass(frozen=True, eq=False)
class Punctuation:
    """JSON's structural characters, with configurable white space."""

    # Allowed around each structural character, but not outside the value.
    space: Expression

    @functools.cached_property
    def comma(self) -> Expression:
        """A comma with space around it."""
        return concat(self.space, b",", self.space)

    def separated(
        self,
        entries: Sequence[tuple[Expression, bool]],
        rest: Expression | None = None,
        least: int = 0,
        most: int | None = None,
    ) -> Expression:
        """Return separated entries, each with True if required, and trailing space."""
        return Separated(entries, self.comma, rest, self.space, least, most)

    def property(self, key: str | Expression, value: Expression) -> Expression:
        key = literal_string(key) if isinstance(key, str) else key
        return concat(key, self.space, b":", self.space, value)

    def array(self, inner: Expression) -> Expression:
        """Put brackets around contents, which end with space unless they are empty."""
        return concat(b"[", self.space, inner, b"]")

    def object(self, inner: Expression) -> Expression:
        """Put braces around contents, which end with space unless they are empty."""
        return concat(b"{", self.space, inner, b"}")

    def alike(self, item: Expression, least: int, most: int | None) -> Expression:
        """Return `least` to `most` repetitions of an item, and trailing space."""
        if most is not None and least > most:
            return Choice([])
        if most is None and least < 2:
            return self.separated([(item, True)] * least, item)
        if most == 0:
            return Literal(b"")
        others = None if most is None else most - 1
        more = Repeat(concat(self.comma, item), max(0, least - 1), others)
        some = concat(item, more, self.space)
        return some if least else optional(some)
