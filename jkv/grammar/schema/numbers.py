"""Numbers: integers and decimals, within bounds digit by digit.

Numbers without bounds are those of JSON (RFC 8259, section 6). Those with bounds are
written without an exponent, and zero without a sign; those with `multipleOf`, or of
which some are excluded, without an exponent.
"""

import decimal
import functools
from collections.abc import Callable, Set

import numpy as np

from jkv.grammar.automaton import Automaton, intersect, minimize, subtract
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.expressions import (
    ByteRange,
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    concat,
    optional,
)
from jkv.grammar.schema.expansion import Way, named, said
from jkv.grammar.schema.keywords import is_number
from jkv.grammar.schema.negation import NOT_MULTIPLE, NOT_VALUES

_DIGIT, _NOT_ZERO = ByteRange(0x30, 0x39), ByteRange(0x31, 0x39)
_DIGITS = Repeat(_DIGIT)
_WHOLE = Choice([Literal(b"0"), concat(_NOT_ZERO, _DIGITS)])
_FRACTION = concat(b".", _DIGIT, _DIGITS)
_SIGN = Choice([Literal(b"+"), Literal(b"-")])
_POWER = concat(
    Choice([Literal(b"e"), Literal(b"E")]), optional(_SIGN), _DIGIT, _DIGITS
)
INTEGER = concat(optional(Literal(b"-")), _WHOLE)
NUMBER = concat(INTEGER, optional(_FRACTION), optional(_POWER))
PLAIN = concat(INTEGER, optional(_FRACTION))
ZEROS = concat(b".", b"0", Repeat(Literal(b"0")))

# Bounds with more digits allow numbers of so many.
_MOST_DIGITS = 32

_Bound = tuple[decimal.Decimal, bool]  # and whether the bound itself is left out


def number_expression(way: Way, kinds: Set[str], bounds: Bounds) -> Expression:
    """Return the numbers that atoms describe, of one or both kinds."""
    shape = _within_bounds(way, "fraction" not in kinds, bounds)
    wanted, unwanted = said(way, "multipleOf"), said(way, NOT_MULTIPLE)
    values = [value for value in named(way, NOT_VALUES) if is_number(value)]
    is_integer = "integer" in kinds
    if not (wanted or unwanted or values) and is_integer:
        return shape
    found = determinize(shape, bounds)
    for number in wanted:
        found = intersect(found, _multiples(number, bounds), bounds)
    if wanted and is_integer and not unwanted and not values:
        return Leaf(found)
    # A number is taken away however it is written, so it has no exponent.
    found = intersect(found, determinize(PLAIN, bounds), bounds)
    taken = [_multiples(number, bounds) for number in unwanted]
    taken += [determinize(_spellings(value), bounds) for value in values]
    if not is_integer:
        taken.append(determinize(concat(INTEGER, optional(ZEROS)), bounds))
    for automaton in taken:
        found = subtract(found, automaton, bounds)
    return Leaf(found)


def _within_bounds(way: Way, is_integer: bool, bounds: Bounds) -> Expression:
    least = _read_bound(way, "minimum", "exclusiveMinimum", max)
    most = _read_bound(way, "maximum", "exclusiveMaximum", min)
    if least is None and most is None:
        return INTEGER if is_integer else NUMBER
    parts: list[Expression] = []
    zero = (decimal.Decimal(0), False)
    positive = least if least and least[0] >= 0 else zero
    if most is None or most[0] >= 0:
        parts.append(_magnitudes(positive, most, is_integer, bounds))
    if least is None or least[0] < 0:
        above = (-most[0], most[1]) if most and most[0] < 0 else (zero[0], True)
        below = (-least[0], least[1]) if least else None
        negative = _magnitudes(above, below, is_integer, bounds)
        parts.append(concat(b"-", negative))
    return Choice(parts)


def _read_bound(
    way: Way, name: str, exclusive: str, tighter: Callable[..., _Bound]
) -> _Bound | None:
    """Read a bound; in draft 4 the exclusive one says of the other that it is."""
    found = []
    for atom in way:
        flag = atom.words.get(exclusive)
        if name in atom.words:
            found.append((_decimal(atom.words[name]), flag is True))
        if flag is not None and not isinstance(flag, bool):
            found.append((_decimal(flag), True))
    if not found:
        return None
    value, _ = tighter(found, key=lambda bound: bound[0])
    is_exclusive = (value, True) in found
    return _round(value, tighter is max, is_exclusive)


def _round(value: decimal.Decimal, is_least: bool, is_exclusive: bool) -> _Bound:
    """Bring a bound of more digits than are served towards the numbers it allows."""
    furthest = decimal.Decimal(10) ** _MOST_DIGITS
    if value > furthest and not is_least:
        return furthest, False
    if value < -furthest and is_least:
        return -furthest, False
    return value, is_exclusive


def _decimal(value: int | float) -> decimal.Decimal:
    return decimal.Decimal(str(value)) if value else decimal.Decimal(0)


def _multiples(number: int | float, bounds: Bounds) -> Automaton:
    """Return the multiples of a number (and no numbers), digit by digit."""
    _, digits, exponent = _decimal(number).as_tuple()
    places = max(0, -int(exponent))
    divisor = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    # Levels: of the whole part, then of each place behind the point. State 0 begins.
    count = divisor * (places + 2) + 1
    bounds.hold(count * 4096, f"the multiples of {number}")
    level, rest = np.divmod(np.arange(count - 1), divisor)
    place = np.maximum(level - 1, 0)
    table = np.full((count, 256), -1, np.int32)
    for digit in range(10):
        below = 1 + np.minimum(level + (level > 0), places + 1) * divisor
        below += (rest * 10 + digit) % divisor
        if digit == 0:  # behind the last place, where nothing counts any more
            below = np.where(place == places, np.arange(count - 1) + 1, below)
            below = np.where(level == 0, 1 + rest * 10 % divisor, below)
        is_allowed = (level == 0) | (place < places) | (digit == 0)
        table[1:, 0x30 + digit] = np.where(is_allowed, below, -1)
    table[1:, 0x2E] = np.where(level == 0, 1 + divisor + rest, -1)
    table[0] = table[1]
    table[0, 0x2D] = 1
    powers = np.array([pow(10, places - int(p), divisor) for p in range(places + 1)])
    is_multiple = rest * powers[np.minimum(place, places)] % divisor == 0
    return minimize(Automaton(table, np.append(False, is_multiple)), bounds)


def _spellings(value: int | float) -> Expression:
    """Return a number in every way that has no exponent."""
    whole, _, fraction = f"{abs(_decimal(value)):f}".partition(".")
    fraction = fraction.rstrip("0")
    sign = b"-" if value < 0 else b""
    number = concat(sign, whole.encode())
    if value == 0:
        number = concat(optional(Literal(b"-")), b"0")
    if fraction:
        return concat(number, f".{fraction}".encode(), Repeat(Literal(b"0")))
    return concat(number, optional(ZEROS))


@functools.lru_cache(maxsize=256)
def _magnitudes(
    least: _Bound, most: _Bound | None, is_integer: bool, bounds: Bounds
) -> Expression:
    """Return the numbers without a sign within two bounds that are not negative."""
    shape = _WHOLE if is_integer else concat(_WHOLE, optional(_FRACTION))
    found = determinize(shape, bounds)
    above = determinize(_at_least(*least), bounds)
    found = intersect(found, above, bounds)
    if most is not None:
        bound, is_exclusive = most
        above = determinize(_at_least(bound, not is_exclusive), bounds)
        found = subtract(found, above, bounds)
    return Leaf(found)


def _at_least(bound: decimal.Decimal, is_exclusive: bool) -> Expression:
    """Return numbers from a bound on (and no numbers), by their first higher digit."""
    whole, _, fraction = f"{bound:f}".partition(".")
    fraction = fraction.rstrip("0")
    any_fraction = optional(concat(b".", _DIGITS))
    parts = [concat(_NOT_ZERO, Repeat(_DIGIT, len(whole)), any_fraction)]
    for place, digit in enumerate(whole):
        lower_digits = Repeat(_DIGIT, count := len(whole) - 1 - place, count)
        higher = concat(whole[:place].encode(), _above(digit), lower_digits)
        parts.append(concat(higher, any_fraction))
    for place, digit in enumerate(fraction):
        same = f"{whole}.{fraction[:place]}".encode()
        parts.append(concat(same, _above(digit), _DIGITS))
    more = concat(_DIGITS, _NOT_ZERO, _DIGITS) if is_exclusive else _DIGITS
    parts.append(concat(f"{whole}.{fraction}".encode(), more))
    if not fraction and not is_exclusive:
        parts.append(Literal(whole.encode()))
    return Choice(parts)


def _above(digit: str) -> Expression:
    return ByteRange(ord(digit) + 1, 0x39) if digit != "9" else Choice([])
