"""Integers and decimals as languages, with bounds digit by digit.

Numbers without bounds are JSON's (RFC 8259, section 6). Bounded numbers are written
without an exponent, and zero without a sign; multiples and numbers with excluded values
without an exponent.
"""

import decimal
import functools
from collections.abc import Callable, Set

import numpy as np

from jkv.grammar.automaton import (
    Automaton,
    Choice,
    Expression,
    Leaf,
    concat,
    intersect,
    minimize,
    subtract,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.expansion import Way, given, named
from jkv.grammar.schema.keywords import is_number
from jkv.grammar.schema.negation import NOT_MULTIPLE, NOT_VALUES

# Patterns of numbers without sign and exponent, and so on.
_WHOLE, _FRACTION, ZEROS = "(?:0|[1-9][0-9]*)", r"(?:\.[0-9]+)?", r"(?:\.0+)?"
INTEGER, PLAIN = f"-?{_WHOLE}", f"-?{_WHOLE}{_FRACTION}"
NUMBER = f"{PLAIN}(?:[eE][+-]?[0-9]+)?"

# Bounds with more digits are rounded to this magnitude.
_MOST_DIGITS = 32

_Bound = tuple[decimal.Decimal, bool]  # with True if exclusive


def number_expression(way: Way, kinds: Set[str], bounds: Bounds) -> Expression:
    """Return the numbers that the atoms describe, of one or both kinds."""
    shape = _within_bounds(way, "fraction" not in kinds, bounds)
    wanted, unwanted = given(way, "multipleOf"), given(way, NOT_MULTIPLE)
    values = [value for value in named(way, NOT_VALUES) if is_number(value)]
    is_integer = "integer" in kinds
    if not (wanted or unwanted or values) and is_integer:
        return shape
    found = determinize(shape, bounds)
    for number in wanted:
        found = intersect(found, _multiples(number, bounds), bounds)
    if wanted and is_integer and not unwanted and not values:
        return Leaf(found)
    # Subtracted values are matched in plain notation only.
    found = intersect(found, compile_regex(PLAIN, bounds), bounds)
    taken = [_multiples(number, bounds) for number in unwanted]
    taken += [compile_regex(_spellings(value), bounds) for value in values]
    if not is_integer:
        taken.append(compile_regex(f"{INTEGER}{ZEROS}", bounds))
    for automaton in taken:
        found = subtract(found, automaton, bounds)
    return Leaf(found)


def _within_bounds(way: Way, is_integer: bool, bounds: Bounds) -> Expression:
    least = _read_bound(way, "minimum", "exclusiveMinimum", max)
    most = _read_bound(way, "maximum", "exclusiveMaximum", min)
    if least is None and most is None:
        return Leaf(compile_regex(INTEGER if is_integer else NUMBER, bounds))
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
    """Return the tightest bound; in draft 4 `exclusive` is a flag of `name`."""
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
    """Clamp a bound of too many digits towards the allowed numbers."""
    furthest = decimal.Decimal(10) ** _MOST_DIGITS
    if value > furthest and not is_least:
        return furthest, False
    if value < -furthest and is_least:
        return -furthest, False
    return value, is_exclusive


def _decimal(value: int | float) -> decimal.Decimal:
    return decimal.Decimal(str(value)) if value else decimal.Decimal(0)


def _multiples(number: int | float, bounds: Bounds) -> Automaton:
    """Return the multiples of a number, digit by digit; some strings are no numbers."""
    _, digits, exponent = _decimal(number).as_tuple()
    places = max(0, -int(exponent))
    divisor = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    # State: remainder per level, the integer part and each decimal place; 0 is
    # initial.
    count = divisor * (places + 2) + 1
    bounds.hold(count * 4096, f"the multiples of {number}")
    level, rest = np.divmod(np.arange(count - 1), divisor)
    place = np.maximum(level - 1, 0)
    table = np.full((count, 256), -1, np.int32)
    for digit in range(10):
        below = 1 + np.minimum(level + (level > 0), places + 1) * divisor
        below += (rest * 10 + digit) % divisor
        if digit == 0:  # after the last place only zeros may follow
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


def _spellings(value: int | float) -> str:
    """Return a pattern of a number in all notations without an exponent."""
    whole, _, fraction = f"{abs(_decimal(value)):f}".partition(".")
    fraction = fraction.rstrip("0")
    sign = "-?" if value == 0 else "-" if value < 0 else ""
    return f"{sign}{whole}" + (rf"\.{fraction}0*" if fraction else ZEROS)


@functools.lru_cache(maxsize=256)
def _magnitudes(
    least: _Bound, most: _Bound | None, is_integer: bool, bounds: Bounds
) -> Expression:
    """Return the unsigned numbers within two non-negative bounds."""
    found = compile_regex(_WHOLE if is_integer else f"{_WHOLE}{_FRACTION}", bounds)
    found = intersect(found, compile_regex(_at_least(*least), bounds), bounds)
    if most is not None:
        bound, is_exclusive = most
        above = compile_regex(_at_least(bound, not is_exclusive), bounds)
        found = subtract(found, above, bounds)
    return Leaf(found)


def _at_least(bound: decimal.Decimal, is_exclusive: bool) -> str:
    """Return a pattern of numbers >= bound, by their first higher digit.

    It also matches strings that are no numbers; callers intersect it.
    """
    whole, _, fraction = f"{bound:f}".partition(".")
    fraction = fraction.rstrip("0")
    behind = r"(?:\.[0-9]*)?"
    ways = [f"[1-9][0-9]{{{len(whole)},}}{behind}"]
    for place, digit in enumerate(whole):
        lower_digits = f"[0-9]{{{len(whole) - 1 - place}}}"
        ways.append(f"{whole[:place]}{_above(digit)}{lower_digits}{behind}")
    for place, digit in enumerate(fraction):
        ways.append(rf"{whole}\.{fraction[:place]}{_above(digit)}[0-9]*")
    more = "[0-9]*[1-9][0-9]*" if is_exclusive else "[0-9]*"
    ways.append(rf"{whole}\.{fraction}{more}")
    if not fraction and not is_exclusive:
        ways.append(whole)
    return "|".join(ways)


def _above(digit: str) -> str:
    """Return a pattern of the higher digits; 9 has none."""
    return "(?!)" if digit == "9" else f"[{int(digit) + 1}-9]"
