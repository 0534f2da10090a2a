"""Compile regular expressions of Python's `re` to automata, with Python's own parser.

Bytes that UTF-8 never uses encode zero-width items while a pattern is compiled. `^` and
`$` match one such byte each, and any number of them surrounds a string. Each assertion
and word boundary inserts another such byte, a mark; strings with a mark where its
assertion fails are subtracted, then all marks are removed.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from jkv.grammar.automaton import (
    Automaton,
    ByteRange,
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    begin_at,
    concat,
    minimize,
    subtract,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.characters import (
    Ranges,
    category,
    complement,
    ignoring_case,
    one_of,
    unite,
)
from jkv.grammar.determinization import determinize, substitute, subtract_expression
from jkv.grammar.errors import Malformed, TooLarge, Unsupported

# The standard library's parser has no public name since `sre_parse` was deprecated.
_parser = importlib.import_module("re._parser")

_BEGIN, _END = 0xFE, 0xFF
_MARKS = (0xC0, 0xC1, *range(0xF5, 0xFE))  # one per assertion
_ANCHORS = {
    "AT_BEGINNING": _BEGIN,
    "AT_BEGINNING_STRING": _BEGIN,
    "AT_END": _END,
    "AT_END_STRING": _END,
}
_BOUNDARIES = {"AT_BOUNDARY": True, "AT_NON_BOUNDARY": False}
_ANY_BYTES = Repeat(ByteRange(0, 255))
_LINE_END = ((0x0A, 0x0A),)
_ASCII_SPACE = ((0x09, 0x0D), (0x20, 0x20))
_REFUSED_FLAGS = re.MULTILINE | re.LOCALE


@functools.lru_cache(maxsize=256)
def compile_regex(
    pattern: str, bounds: Bounds, *, is_search: bool = False, shown: str | None = None
) -> Automaton:
    """Return the strings that match a pattern, or contain a match if `is_search`.

    Errors quote `shown`, the pattern as the user wrote it. `Unsupported` is raised for
    an invalid pattern, or one that is not regular.
    """
    name = f"the pattern {_shorten(shown or pattern)}"
    try:
        with warnings.catch_warnings():
            # Python may change the meaning of "[["; patterns keep today's.
            warnings.simplefilter("ignore", FutureWarning)
            parsed = _parser.parse(pattern)
        if parsed.state.flags & _REFUSED_FLAGS:
            raise Unsupported(f"{name} has the flag MULTILINE or LOCALE; remove it")
        reader = _Reader(name, bounds)
        inner = reader.read(parsed, parsed.state.flags)
        anything = Repeat(one_of(complement(()))) if is_search else Literal(b"")
        before = concat(Repeat(Literal(bytes([_BEGIN]))), anything)
        behind = concat(anything, Repeat(Literal(bytes([_END]))))
        marked = determinize(concat(before, inner, behind), bounds)
    except (re.error, OverflowError) as error:
        raise Malformed(f"{name}: {error}") from error
    except RecursionError as error:
        raise TooLarge(f"{name} is nested too deeply") from error
    return _without_anchors(reader.without_marks(marked), bounds)


def _without_anchors(marked: Automaton, bounds: Bounds) -> Automaton:
    """Return the strings between any number of the two anchors."""
    table = np.append(marked.transitions, np.full((1, 256), -1, np.int32), axis=0)
    begins = table[:, _BEGIN]
    start = 0
    # A longer run of anchors than states reaches no new state.
    for _ in range(len(table)):
        start = int(begins[start])
    ends = np.arange(len(table))
    for _ in range(len(table)):
        further = table[ends, _END]
        if np.array_equal(further, ends):
            break
        ends = further
    accepting = np.append(marked.accepting, False)[ends]
    table[:, [_BEGIN, _END]] = -1
    return minimize(begin_at(Automaton(table, accepting), start), bounds)


class _Reader:
    """Convert the parser's output to expressions."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self._name, self._bounds = name, bounds
        # For each mark, the strings (with marks) in which its assertion fails.
        self._wrong: list[Expression] = []
        self._is_inside = False  # True inside an assertion

    def read(self, items: Iterable[tuple[Any, Any]], flags: int) -> Expression:
        return concat(*(self._read_item(str(op), given, flags) for op, given in items))

    def without_marks(self, marked: Automaton) -> Automaton:
        """Subtract strings with failing marks, then remove the marks."""
        if not self._wrong:
            return marked
        right = subtract_expression(marked, Choice(self._wrong), self._bounds)
        nothing = dict.fromkeys(_MARKS, Literal(b""))
        return substitute(right, nothing, self._bounds)

    def _read_item(self, op: str, given: Any, flags: int) -> Expression:
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return one_of(self._read_set(op, given, flags))
            case "BRANCH":
                return Choice([self.read(branch, flags) for branch in given[1]])
            case "SUBPATTERN":
                _, added, removed, inner = given
                return self.read(inner, (flags | added) & ~removed)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = given
                bound = None if most == _parser.MAXREPEAT else int(most)
                return Repeat(self.read(inner, flags), int(least), bound)
            case "FAILURE":
                return Choice([])
            case "AT" if str(given) in _ANCHORS:
                return Literal(bytes([_ANCHORS[str(given)]]))
            case "AT" if str(given) in _BOUNDARIES:
                return self._boundary(_BOUNDARIES[str(given)], flags)
            case "ASSERT" | "ASSERT_NOT":
                return self._look(given[0] > 0, op == "ASSERT", given[1], flags)
        raise Unsupported(f"{op} in {self._name}")

    def _look(
        self, is_ahead: bool, is_wanted: bool, items: Any, flags: int
    ) -> Expression:
        """Return a mark for a lookahead or lookbehind, positive if `is_wanted`."""
        if self._is_inside:
            raise Unsupported(f"nested assertions in {self._name}")
        self._is_inside = True
        inner = self.read(items, flags)
        self._is_inside = False
        parts = (inner, _ANY_BYTES) if is_ahead else (_ANY_BYTES, inner)
        return self._mark([(self._side(concat(*parts), is_wanted), is_ahead)])

    def _boundary(self, is_wanted: bool, flags: int) -> Expression:
        r"""Return the mark of `\b`, or of `\B` if `is_wanted` is False."""
        word = one_of(_read_category("CATEGORY_WORD", flags))
        ahead, back = concat(word, _ANY_BYTES), concat(_ANY_BYTES, word)
        # `\b` fails where both sides agree, `\B` where they differ.
        return self._mark(
            *(
                [
                    (self._side(back, is_word), False),
                    (self._side(ahead, is_word == is_wanted), True),
                ]
                for is_word in (False, True)
            )
        )

    def _side(self, texts: Expression, is_complement: bool) -> Expression:
        """Return the strings, or their complement, with marks anywhere in them."""
        found = determinize(texts, self._bounds)
        if is_complement:
            everything = determinize(_ANY_BYTES, self._bounds)
            found = subtract(everything, found, self._bounds)
        table = found.transitions.copy()
        table[:, list(_MARKS)] = np.arange(len(table))[:, None]
        return Leaf(Automaton(table, found.accepting))

    def _mark(self, *wrong: list[tuple[Expression, bool]]) -> Expression:
        """Return a new mark, which fails where all sides of one list match."""
        if self._is_inside or len(self._wrong) == len(_MARKS):
            raise Unsupported(
                f"more than {len(_MARKS)} assertions, or nested ones, in {self._name}"
            )
        mark = Literal(bytes([_MARKS[len(self._wrong)]]))
        ways = []
        for sides in wrong:
            before = [side for side, is_ahead in sides if not is_ahead] or [_ANY_BYTES]
            behind = [side for side, is_ahead in sides if is_ahead] or [_ANY_BYTES]
            ways.append(concat(*before, mark, *behind))
        self._wrong.append(Choice(ways))
        return mark

    def _read_set(self, op: str, given: Any, flags: int) -> Ranges:
        if op == "ANY":
            return complement(() if flags & re.DOTALL else _LINE_END)
        members = given if op == "IN" else [("LITERAL", given)]
        found, categories = list[tuple[int, int]](), list[tuple[int, int]]()
        is_negated = op == "NOT_LITERAL"
        for kind, value in ((str(kind), value) for kind, value in members):
            if kind == "NEGATE":
                is_negated = True
            elif kind == "LITERAL":
                found.append((value, value))
            elif kind == "RANGE":
                found.append(value)
            else:
                categories += _read_category(str(value), flags)
        ranges = unite(*found)
        if flags & re.IGNORECASE:
            ranges = ignoring_case(ranges, is_ascii=bool(flags & re.ASCII))
        ranges = unite(*ranges, *categories)
        return complement(ranges) if is_negated else ranges


def _read_category(name: str, flags: int) -> Ranges:
    """Return the characters of CATEGORY_DIGIT, CATEGORY_NOT_WORD and so on."""
    kind = name.rpartition("_")[2]
    ranges = category(kind)
    if flags & re.ASCII:
        ranges = tuple((low, min(high, 0x7F)) for low, high in ranges if low < 0x80)
        ranges = _ASCII_SPACE if kind == "SPACE" else ranges
    return complement(ranges) if "_NOT_" in name else ranges


def _shorten(pattern: str) -> str:
    return repr(pattern if len(pattern) < 60 else pattern[:57] + "...")
