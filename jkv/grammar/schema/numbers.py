"""Numbers: integers and decimals, within bounds digit by digit.

Numbers without bounds are those of JSON (RFC 8259, section 6). Those with bounds are
written without an exponent, and zero without a sign.
"""

import decimal
from collections.abc import Mapping
from typing import Any

from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
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
from jkv.grammar.products import intersect, subtract

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

_Bound = tuple[decimal.Decimal, bool]  # and whether the bound itself is left out


def number_expression(
    schema: Mapping[str, Any], *, is_integer: bool, max_bytes: int
) -> Expression:
    """Return the numbers that a schema describes.

    Raises:
      Unsupported: `multipleOf`, unless it says that numbers are whole.
    """
    if "multipleOf" in schema:
        if schema["multipleOf"] != 1:
            raise Unsupported("keyword 'multipleOf'")
        is_integer = True
    least = _read_bound(schema, "minimum", "exclusiveMinimum", max)
    most = _read_bound(schema, "maximum", "exclusiveMaximum", min)
    if least is None and most is None:
        return INTEGER if is_integer else NUMBER
    parts: list[Expression] = []
    zero = (decimal.Decimal(0), False)
    positive = least if least and least[0] >= 0 else zero
    if most is None or most[0] >= 0:
        parts.append(_magnitudes(positive, most, is_integer, max_bytes))
    if least is None or least[0] < 0:
        above = (-most[0], most[1]) if most and most[0] < 0 else (zero[0], True)
        below = (-least[0], least[1]) if least else None
        negative = _magnitudes(above, below, is_integer, max_bytes)
        parts.append(concat(b"-", negative))
    return Choice(parts)


def _read_bound(
    schema: Mapping[str, Any], name: str, exclusive: str, tighter: Any
) -> _Bound | None:
    """Read a bound; in draft 4 the exclusive one says of the other that it is."""
    found = []
    is_flag = isinstance(schema.get(exclusive), bool)
    if name in schema:
        found.append((_decimal(schema[name]), is_flag and schema[exclusive]))
    if exclusive in schema and not is_flag:
        found.append((_decimal(schema[exclusive]), True))
    if len(found) == 2 and found[0][0] == found[1][0]:
        return found[1]
    return tighter(found, key=lambda bound: bound[0]) if found else None


def _decimal(value: Any) -> decimal.Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(f"a bound of numbers that is none: {value!r}")
    return decimal.Decimal(str(value))


def _magnitudes(
    least: _Bound, most: _Bound | None, is_integer: bool, max_bytes: int
) -> Expression:
    """Return the numbers without a sign within two bounds that are not negative."""
    shape = _WHOLE if is_integer else concat(_WHOLE, optional(_FRACTION))
    found = determinize(shape, max_bytes=max_bytes)
    above = determinize(_at_least(*least), max_bytes=max_bytes)
    found = intersect(found, above, max_bytes=max_bytes)
    if most is not None:
        bound, is_exclusive = most
        above = determinize(_at_least(bound, not is_exclusive), max_bytes=max_bytes)
        found = subtract(found, above, max_bytes=max_bytes)
    return Leaf(found)


def _at_least(bound: decimal.Decimal, is_exclusive: bool) -> Expression:
    """Return numbers from a bound on (or above it), by their first higher digit.

    What is no number may be among them.
    """
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
