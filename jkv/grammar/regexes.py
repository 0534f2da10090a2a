"""Regular expressions as automata: parsed by Python's own parser, put together here.

Two bytes that UTF-8 never has stand for the beginning and the end of a text while a
pattern is put together: `^` and `$` are texts of one such byte. So anchors may stand
anywhere; where a text cannot begin, `^` matches nothing.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from jkv.grammar.automaton import Automaton, minimize
from jkv.grammar.characters import (
    Ranges,
    category,
    complement,
    ignoring_case,
    one_of,
    unite,
)
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
from jkv.grammar.expressions import (
    Choice,
    Expression,
    Literal,
    Repeat,
    concat,
    optional,
)

# The standard library's parser has no public name since `sre_parse` was deprecated.
_parser = importlib.import_module("re._parser")

_BEGIN, _END = 0xFE, 0xFF
_ANCHORS = {
    "AT_BEGINNING": _BEGIN,
    "AT_BEGINNING_STRING": _BEGIN,
    "AT_END": _END,
    "AT_END_STRING": _END,
}
_LINE_END = ((0x0A, 0x0A),)
_REFUSED_FLAGS = re.MULTILINE | re.LOCALE


@functools.lru_cache(maxsize=256)
def compile_regex(
    pattern: str, max_bytes: int, *, is_search: bool = False, flags: int = 0
) -> Automaton:
    r"""Return the texts that a pattern matches.

    Args:
      pattern: in the syntax of Python's `re`.
      max_bytes: memory that compiling may take.
      is_search: whether it may be found anywhere; from end to end otherwise.
      flags: of `re`; with `re.ASCII` \d and \w are those of ASCII, as ECMA-262 has
        them, and \s is still any white space.

    Raises:
      TooLarge: it takes more than `max_bytes`.
      Unsupported: it is no pattern, or none that an automaton can match.
    """
    try:
        with warnings.catch_warnings():
            # Python may read "[[" otherwise one day; schemas mean what it reads now.
            warnings.simplefilter("ignore", FutureWarning)
            parsed = _parser.parse(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise Unsupported(f"the pattern {_shorten(pattern)}: {error}") from error
    if parsed.state.flags & _REFUSED_FLAGS:
        raise Unsupported(f"flags of the pattern {_shorten(pattern)}")
    inner = _Reader(pattern).read(parsed, parsed.state.flags)
    anything = Repeat(one_of(complement(()))) if is_search else Literal(b"")
    # A text begins before the pattern, unless the pattern has the beginning itself.
    before = optional(concat(bytes([_BEGIN]), anything))
    behind = optional(concat(anything, bytes([_END])))
    marked = determinize(concat(before, inner, behind), max_bytes=max_bytes)
    return _without_marks(marked)


def _without_marks(marked: Automaton) -> Automaton:
    """Return the texts that stand between the two marks."""
    table = marked.transitions
    start = int(table[0, _BEGIN])
    if start < 0:
        return Automaton(np.full((1, 256), -1, np.int32), np.zeros(1, bool))
    accepting = np.append(marked.accepting, False)[table[:, _END]]
    table = table.copy()
    table[:, [_BEGIN, _END]] = -1
    # The first state is the one that the mark led to; the two change places.
    names = np.arange(len(table) + 1, dtype=np.int32)
    names[[0, start, -1]] = start, 0, -1
    table = names[table]
    table[[0, start]], accepting[[0, start]] = table[[start, 0]], accepting[[start, 0]]
    return minimize(Automaton(table, accepting))


class _Reader:
    """From what the parser returns to expressions."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def read(self, items: Iterable[tuple[Any, Any]], flags: int) -> Expression:
        return concat(*(self._read_item(str(op), given, flags) for op, given in items))

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
            case "AT" if str(given) in _ANCHORS:
                return Literal(bytes([_ANCHORS[str(given)]]))
        raise Unsupported(f"{op} in the pattern {_shorten(self._pattern)}")

    def _read_set(self, op: str, given: Any, flags: int) -> Ranges:
        if op == "ANY":
            return complement(() if flags & re.DOTALL else _LINE_END)
        members = given if op == "IN" else [("LITERAL", given)]
        found: list[tuple[int, int]] = []
        is_negated = op == "NOT_LITERAL"
        for kind, value in ((str(kind), value) for kind, value in members):
            if kind == "NEGATE":
                is_negated = True
            elif kind == "LITERAL":
                found.append((value, value))
            elif kind == "RANGE":
                found.append(value)
            else:
                found += _read_category(str(value), flags)
        ranges = unite(*found)
        if flags & re.IGNORECASE:
            ranges = ignoring_case(ranges)
        return complement(ranges) if is_negated else ranges


def _read_category(name: str, flags: int) -> Ranges:
    """Return the characters of CATEGORY_DIGIT, CATEGORY_NOT_WORD and so on."""
    letter = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}[name.rpartition("_")[2]]
    ranges = category(letter)
    if flags & re.ASCII and letter != "s":
        ranges = tuple((low, min(high, 0x7F)) for low, high in ranges if low < 0x80)
    return complement(ranges) if "_NOT_" in name else ranges


def _shorten(pattern: str) -> str:
    return repr(pattern if len(pattern) < 60 else pattern[:57] + "...")
