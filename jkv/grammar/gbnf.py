"""GBNF, llama.cpp's grammar notation, compiled to expressions over bytes.

Recursive rules are not regular. A rule that is left- or right-recursive in itself
becomes a repetition, which is exact; other recursion is expanded to a given depth.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from jkv.grammar.automaton import Choice, Concatenation, Expression, Literal, Repeat
from jkv.grammar.characters import complement, one_of, unite
from jkv.grammar.errors import Malformed, Unsupported

ROOT = "root"
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_LINES = re.compile(r"(?:\s|#[^\n]*)*")
_BOUNDS = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_TIMES: dict[str, tuple[int, int | None]] = {
    "*": (0, None),
    "+": (1, None),
    "?": (0, 1),
}
_EVERY = complement(())
MOST_DEPTH = 64  # of nested groups


@dataclasses.dataclass(frozen=True)
class _Reference(Expression):
    """A reference to a rule by name."""

    name: str


def compile_gbnf(text: str, recursion: int) -> Expression:
    """Return the language of rule `root`, with recursion expanded to a depth."""
    rules = _Reader(text).read()
    if ROOT not in rules:
        raise Malformed(f"text has no rule {ROOT!r}; add one")
    for name, item in rules.items():
        for other in _names(item):
            if other not in rules:
                raise Malformed(f"rule {name!r} refers to an undefined rule {other!r}")
    return _Expander(rules, recursion).expand(ROOT, recursion)


class _Reader:
    """A recursive-descent parser of rules."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def read(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._skip(_LINES)
        while self._at < len(self._text):
            name = self._take(_NAME, "a rule name")
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_LINES)
            if name in rules:
                raise self._wrong(f"rule {name!r} is defined twice")
            rules[name] = self._ways(_SPACE)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._wrong("expected the end of the line after a rule")
            self._skip(_LINES)
        return rules

    def _ways(self, space: "re.Pattern[str]") -> Expression:
        """Parse alternatives separated by `|`; a group may span lines."""
        ways = [self._sequence(space)]
        while self._accept("|"):
            self._skip(_LINES)
            ways.append(self._sequence(space))
        return ways[0] if len(ways) == 1 else Choice(ways)

    def _sequence(self, space: "re.Pattern[str]") -> Expression:
        parts: list[Expression] = []
        while (part := self._item()) is not None:
            self._skip(space)
            parts.append(self._times(part))
            self._skip(space)
        return parts[0] if len(parts) == 1 else Concatenation(parts)

    def _item(self) -> Expression | None:
        if self._accept('"'):
            return self._literal()
        if self._accept("["):
            return self._characters()
        if self._accept("."):
            return one_of(_EVERY)
        if self._accept("("):
            return self._group()
        if self._accept("<") or self._accept("!"):
            raise Unsupported(
                "token literals are not supported; write the text instead"
            )
        found = _NAME.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return _Reference(found[0])

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._wrong("groups are nested too deeply")
        self._skip(_LINES)
        found = self._ways(_LINES)
        self._skip(_LINES)
        self._expect(")")
        self._depth -= 1
        return found

    def _times(self, part: Expression) -> Expression:
        for sign, (least, most) in _TIMES.items():
            if self._accept(sign):
                return Repeat(part, least, most)
        if not self._text.startswith("{", self._at):
            return part
        found = _BOUNDS.match(self._text, self._at)
        if found is None or (not found[2] and found[3]):
            raise self._wrong("expected bounds such as {2}, {2,} or {2,5}")
        self._at = found.end()
        least = int(found[1])
        most = int(found[3]) if found[3] else (None if found[2] else least)
        if most is not None and most < least:
            raise self._wrong("the lower bound exceeds the upper one")
        return Repeat(part, least, most)

    def _literal(self) -> Expression:
        signs = []
        while not self._accept('"'):
            signs.append(self._sign('a string has no closing "'))
        text = "".join(signs)
        try:
            return Literal(text.encode())
        except UnicodeEncodeError:
            raise Unsupported(f"{text!r} is not valid Unicode") from None

    def _characters(self) -> Expression:
        is_inverted = self._accept("^")
        ranges = []
        while not self._accept("]"):
            low = high = ord(self._sign("a character set has no closing ]"))
            if not self._text.startswith("-]", self._at) and self._accept("-"):
                high = ord(self._sign("a character set has no closing ]"))
            if high < low:
                raise self._wrong("a character range ends before it begins")
            ranges.append((low, high))
        found = unite(*ranges)
        return one_of(complement(found) if is_inverted else found)

    def _sign(self, missing: str) -> str:
        """Read one character, escaped or not."""
        sign = self._text[self._at : self._at + 1]
        if not sign or sign == "\n":
            raise self._wrong(missing)
        self._at += 1
        if sign != "\\":
            return sign
        sign = self._text[self._at : self._at + 1]
        self._at += 1
        if sign in _HEX:
            digits = self._text[self._at : self._at + _HEX[sign]]
            self._at += _HEX[sign]
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise self._wrong(f"\\{sign}{digits} is not a character") from None
        if sign in _ESCAPES:
            return _ESCAPES[sign]
        if not sign or sign not in '"\\[]-^':
            raise self._wrong(f"\\{sign} is not an escape sequence")
        return sign

    def _skip(self, space: "re.Pattern[str]") -> None:
        found = space.match(self._text, self._at)
        assert found is not None  # the pattern matches the empty string
        self._at = found.end()

    def _take(self, pattern: "re.Pattern[str]", what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._wrong(f"expected {what}")
        self._at = found.end()
        return found[0]

    def _accept(self, text: str) -> bool:
        """Consume `text` if it comes next; return True if it did."""
        stands = self._text.startswith(text, self._at)
        self._at += len(text) * stands
        return stands

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._wrong(f"expected {text}")

    def _wrong(self, what: str) -> Malformed:
        line = self._text.count("\n", 0, self._at) + 1
        return Malformed(f"line {line} of the grammar: {what}")


def _names(item: Expression) -> Iterator[str]:
    match item:
        case _Reference(name):
            yield name
        case Concatenation(parts) | Choice(parts):
            for part in parts:
                yield from _names(part)
        case Repeat(part):
            yield from _names(part)


class _Expander:
    """Replace references to rules by their languages."""

    def __init__(self, rules: dict[str, Expression], recursion: int) -> None:
        self._rules = rules
        self._reached = {name: self._reach(_names(rules[name])) for name in rules}
        self._order = {name: i for i, name in enumerate(self._reach([ROOT]))}
        self._most = recursion
        self._known: dict[tuple[str, int], Expression] = {}

    def _reach(self, names: Iterable[str]) -> dict[str, None]:
        """Return the rules reachable from `names`, in order of first reference."""
        found: dict[str, None] = {}
        ahead = [*names][::-1]
        while ahead:
            name = ahead.pop()
            if name not in found:
                found[name] = None
                ahead += reversed([*_names(self._rules[name])])
        return found

    def expand(self, name: str, left: int) -> Expression:
        """Return the language of a rule, with `left` levels of recursion."""
        key = name, left
        if key not in self._known:
            rule = self._rules[name]
            repeated = self._as_repetition(name, rule)
            self._known[key] = (
                self._item(name, rule, left) if repeated is None else repeated
            )
        return self._known[key]

    def _as_repetition(self, name: str, rule: Expression) -> Expression | None:
        """Return a left- or right-recursive rule as a repetition; None for other rules.

        For example r ::= a r | b, which is a* b (D. N. Arden, Delayed-logic and
        finite-state machines, 1961).
        """
        ways = rule.parts if isinstance(rule, Choice) else (rule,)
        for at in (-1, 0):
            repeated: list[Expression] = []
            others: list[Expression] = []
            for way in ways:
                parts = way.parts if isinstance(way, Concatenation) else (way,)
                if len(parts) > 1 and parts[at] == _Reference(name):
                    repeated.append(Concatenation(parts[:-1] if at else parts[1:]))
                elif way != _Reference(name):  # r ::= r adds no string
                    others.append(way)
            rest = [*repeated, *others]
            if not repeated or any(self._is_within(name, part) for part in rest):
                continue
            loop = Repeat(self._choice(name, repeated))
            end = self._choice(name, others)
            return Concatenation([loop, end] if at else [end, loop])
        return None

    def _is_within(self, name: str, item: Expression) -> bool:
        """Return True if `item` refers to rule `name`, directly or not."""
        return any(
            other == name or name in self._reached[other] for other in _names(item)
        )

    def _choice(self, name: str, items: Sequence[Expression]) -> Expression:
        return Choice([self._item(name, item, self._most) for item in items])

    def _item(self, name: str, item: Expression, left: int) -> Expression:
        match item:
            case Concatenation(parts) | Choice(parts):
                return type(item)([self._item(name, each, left) for each in parts])
            case Repeat(part, least, most):
                return Repeat(self._item(name, part, left), least, most)
            case _Reference(other):
                return self._reference(name, other, left)
        return item

    def _reference(self, name: str, other: str, left: int) -> Expression:
        if name not in self._reached[other] and other != name:
            return self.expand(other, self._most)
        # Mutually recursive rules are ordered: only a reference backwards costs a
        # level.
        if self._order[other] <= self._order[name]:
            left -= 1
        return Choice([]) if left < 0 else self.expand(other, left)
