"""Arrays and objects: what may stand between their brackets, in which order."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
from jkv.grammar.expressions import (
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    Separated,
    concat,
    optional,
)
from jkv.grammar.products import subtract
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.quoting import quote
from jkv.grammar.schema.strings import (
    ANYTHING,
    in_quotes,
    literal_string,
    search_pattern,
)

Compile = Callable[[Any], Expression]  # the texts of a schema


@dataclasses.dataclass(frozen=True, eq=False)
class Punctuation:
    """What stands between values.

    Attributes:
      space: white space, allowed around each of the others but outside of the value.
    """

    space: Expression

    @functools.cached_property
    def comma(self) -> Expression:
        """A comma with the space around it."""
        return concat(self.space, b",", self.space)

    def separated(
        self, entries: Sequence[tuple[Expression, bool]], rest: Expression | None = None
    ) -> Expression:
        """Return entries, each with whether it must be there, and white space."""
        return Separated(entries, self.comma, rest, self.space)

    def property(self, key: str | Expression, value: Expression) -> Expression:
        """Return a key and its value."""
        key = literal_string(key) if isinstance(key, str) else key
        return concat(key, self.space, b":", self.space, value)

    def array(self, inner: Expression) -> Expression:
        """Put brackets around what ends with white space, unless it is empty."""
        return concat(b"[", self.space, inner, b"]")

    def object(self, inner: Expression) -> Expression:
        """Put braces around it."""
        return concat(b"{", self.space, inner, b"}")

    def alike(self, item: Expression, least: int, most: int | None) -> Expression:
        """Return so many alike items, and white space."""
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


class ContainerMaker(Protocol):
    """`array_expression` or `object_expression`."""

    def __call__(
        self,
        words: Mapping[str, Any],
        compile_part: Compile,
        marks: Punctuation,
        max_bytes: int,
    ) -> Expression:
        """Return the texts that the keywords of a type describe."""
        ...


def array_expression(
    words: Mapping[str, Any], compile_part: Compile, marks: Punctuation, max_bytes: int
) -> Expression:
    """Return the arrays that a schema describes.

    Args:
      words: its keywords of arrays.
      compile_part: returns the texts of a schema inside.
      marks: what stands between values.
      max_bytes: not used, since arrays compile nothing.
    """
    del max_bytes
    first, more = words.get("prefixItems", []), words.get("items", not words)
    if isinstance(more, list):  # before the draft of 2020
        first, more = more, words.get("additionalItems", False)
    elif "items" not in words and not first:
        more = True
    least, most = words.get("minItems", 0), words.get("maxItems")
    if more is False:
        most = len(first) if most is None else min(most, len(first))
    first = first[:most]
    if most is not None and least > most:
        return Choice([])
    rest: Expression = marks.space
    if not first:
        item = compile_part(more) if most != 0 else Choice([])
        return marks.array(marks.alike(item, least, most))
    if most is None or most > len(first):
        others = None if most is None else most - len(first)
        behind = concat(marks.comma, compile_part(more))
        rest = concat(Repeat(behind, max(0, least - len(first)), others), rest)
    # From the last to the first: each that may lack takes the ones behind it along.
    for place in range(len(first) - 1, -1, -1):
        comma = marks.comma if place else Literal(b"")
        there = concat(comma, compile_part(first[place]), rest)
        ending = marks.space if place else Literal(b"")
        rest = there if place < least else Choice([there, ending])
    return marks.array(rest)


def object_expression(
    words: Mapping[str, Any], compile_part: Compile, marks: Punctuation, max_bytes: int
) -> Expression:
    """Return the objects that a schema describes.

    Named properties stand in the order of `properties`, then of `required`; those that
    have no name follow in any order.

    Args:
      words: its keywords of objects.
      compile_part: returns the texts of a schema inside.
      marks: what stands between values.
      max_bytes: of the automata of keys.

    Raises:
      Unsupported: `minProperties` or `maxProperties` where they would count named ones.
    """
    named = dict(words.get("properties", {}))
    patterns = words.get("patternProperties", {})
    # An object that says nothing of its properties has any.
    is_named = "properties" in words or "patternProperties" in words
    other = words.get("additionalProperties", not is_named)
    required = words.get("required", [])
    for key in required:
        named.setdefault(key, words.get("additionalProperties", True))
    entries = []
    for key, schema in named.items():
        also = [inner for pattern, inner in patterns.items() if _finds(pattern, key)]
        value = compile_part({"allOf": [schema, *also]} if also else schema)
        entries.append((marks.property(key, value), key in required))
    keys = _Keys(named, patterns, max_bytes)
    rest = [
        marks.property(keys.of_pattern(pattern), compile_part(schema))
        for pattern, schema in patterns.items()
    ]
    if other is not False:
        rest.append(marks.property(keys.of_others(), compile_part(other)))
    least, most = words.get("minProperties", 0), words.get("maxProperties")
    if not entries:
        return marks.object(marks.alike(Choice(rest), least, most))
    is_counted = most is not None and (rest or most < len(entries))
    if least > len(required) or is_counted:
        raise Unsupported("'minProperties' or 'maxProperties' beside 'properties'")
    return marks.object(marks.separated(entries, Choice(rest) if rest else None))


def _finds(pattern: str, key: str) -> bool:
    found = compile_regex(search_pattern(pattern), _KEY_BYTES)
    return found.matches(key.encode())


_KEY_BYTES = 2**28


class _Keys:
    """Keys of properties that are not named."""

    def __init__(
        self, named: Iterable[str], patterns: Iterable[str], max_bytes: int
    ) -> None:
        self._max_bytes = max_bytes
        self._patterns = list(patterns)
        literals = Choice([Literal(key.encode()) for key in named])
        self._named = determinize(literals, max_bytes=max_bytes)

    def of_pattern(self, pattern: str) -> Expression:
        """Return the keys in which a pattern is found."""
        return self._without(search_pattern(pattern), [])

    def of_others(self) -> Expression:
        """Return the keys in which no pattern is found."""
        return self._without(ANYTHING, self._patterns)

    def _without(self, pattern: str, others: Sequence[str]) -> Expression:
        keys = compile_regex(pattern, self._max_bytes)
        taken = [compile_regex(search_pattern(p), self._max_bytes) for p in others]
        for automaton in (self._named, *taken):
            keys = subtract(keys, automaton, max_bytes=self._max_bytes)
        return in_quotes(Leaf(quote(keys)))
