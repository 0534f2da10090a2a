"""Sets of Unicode characters, and their UTF-8 bytes."""

import functools
import re
import sys
from collections.abc import Callable, Iterator

from jkv.grammar.automaton import Automaton, ByteRange, Choice, Expression, Leaf, concat
from jkv.grammar.bounds import UNBOUNDED
from jkv.grammar.determinization import determinize

Ranges = tuple[tuple[int, int], ...]  # of code points, sorted, not adjacent

_LAST = sys.maxunicode
_SURROGATES = ((0xD800, 0xDFFF),)
# The character categories of `re`.
_MEANT: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda character: character.isalnum() or character == "_",
}
# Last code points of one, two, three and four bytes.
_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, _LAST)


def unite(*ranges: tuple[int, int]) -> Ranges:
    """Sort ranges and merge adjacent ones."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters, without surrogates."""
    found, next_ = [], 0
    for low, high in unite(*ranges, *_SURROGATES):
        if next_ < low:
            found.append((next_, low - 1))
        next_ = high + 1
    return tuple([*found, (next_, _LAST)] if next_ <= _LAST else found)


def select(is_meant: Callable[[str], bool]) -> Ranges:
    """Return the code points for which `is_meant` is True."""
    codes = (code for code in range(_LAST + 1) if is_meant(chr(code)))
    return unite(*((code, code) for code in codes))


@functools.cache
def category(name: str) -> Ranges:
    return select(_MEANT[name])


def ignoring_case(ranges: Ranges, *, is_ascii: bool) -> Ranges:
    """Add the characters that `re.IGNORECASE` treats as equal."""
    others = [
        (other, other)
        for code, cases in _cases(is_ascii).items()
        if any(low <= code <= high for low, high in ranges)
        for other in cases
    ]
    return unite(*ranges, *others)


@functools.cache
def _cases(is_ascii: bool) -> dict[int, list[int]]:
    """Return the other cases of each cased character, as `re` matches them."""
    groups: dict[str, list[str]] = {}
    for character in map(chr, range(0x80 if is_ascii else 0x20000)):
        groups.setdefault(character.lower()[0].upper()[0], []).append(character)
    flags = re.IGNORECASE | (re.ASCII if is_ascii else 0)
    found: dict[int, list[int]] = {}
    for alike in (each for each in groups.values() if len(each) > 1):
        for one in alike:
            same = re.compile(re.escape(one), flags)
            others = [ord(c) for c in alike if c != one and same.fullmatch(c)]
            found[ord(one)] = others
    return found


@functools.lru_cache(maxsize=512)
def one_of(ranges: Ranges) -> Expression:
    """Return the language of one character of the set, in UTF-8."""
    if all(high < 0x80 for _, high in ranges):
        return Choice([ByteRange(low, high) for low, high in ranges])
    sequences: list[Expression] = []
    for low, high in complement(complement(ranges)):
        first = 0
        for last in _LAST_OF_LENGTH:
            sequences += _split(max(low, first), min(high, last))
            first = last + 1
    automaton: Automaton = determinize(Choice(sequences), UNBOUNDED)
    return Leaf(automaton)


def _split(low: int, high: int) -> Iterator[Expression]:
    """Yield the UTF-8 byte ranges of the code points low to high, all of one length.

    Each continuation byte holds six bits of a code point. Hence characters that differ
    only in the last byte form a byte range, as do aligned blocks of 64 or 64 * 64.
    """
    while low <= high:
        last = min(high, low | 0x3F)
        for size in (2**12, 2**18):
            if low % size == 0 and low + size - 1 <= high:
                last = low + size - 1
        yield concat(*map(ByteRange, chr(low).encode(), chr(last).encode()))
        low = last + 1
