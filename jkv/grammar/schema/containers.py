"""Arrays and objects: their contents, in order."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from jkv.grammar.automaton import (
    Automaton,
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    Separated,
    concat,
    intersect,
    size,
    subtract,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import TooLarge, Unsupported
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.expansion import (
    Part,
    Way,
    counts_of,
    given,
    named,
    num_first_items,
    parts_of_item,
)
from jkv.grammar.schema.judging import Judge, key_of
from jkv.grammar.schema.negation import ABSENT, NUMBERS
from jkv.grammar.schema.strings import ANYTHING, Punctuation, quoted
from jkv.grammar.schema.uniqueness import by_first_sign, listed_once

_MAX_REGIONS = 64  # limit of the sets into which patterns partition an object's keys
_MAX_HITS = 8  # limit of `contains` items in one array


class Compiler(Protocol):
    """Interface of the compiler of nested schemas."""

    marks: Punctuation
    judge: Judge
    bounds: Bounds
    max_counted: int

    def compile(self, parts: Sequence[Part]) -> Expression:
        """Return the language of values for which all parts hold."""

    def keys(self, parts: Sequence[Part]) -> Automaton:
        """Return the strings for which all parts hold, without quotes."""

    def values(self, parts: Sequence[Part]) -> list[Any] | None:
        """Return the values for which all parts hold; None if they are not listed."""

    def kinds(self, parts: Sequence[Part]) -> set[str]:
        """Return the kinds of values for which all parts may hold."""

    def value(self, value: Any) -> Expression:
        """Return the language of one value."""


def array_expression(way: Way, compiler: Compiler) -> Expression:
    """Return the arrays that the atoms describe."""
    items = _Items.of(way)
    least, most = counts_of(way, "Items")
    if items.rest is None:
        most = len(items.first) if most is None else min(most, len(items.first))
    if most is not None and least > most:
        return Choice([])
    wanted = [atom for atom in way if "contains" in atom.words]
    is_unique = any(given(way, "uniqueItems"))
    if is_unique and (most is None or most > 1):
        if wanted:
            raise Unsupported("'uniqueItems' beside 'contains'")
        return compiler.marks.array(_unique(items, least, most, compiler))
    found = compiler.marks.array(_in_order(items, least, most, compiler))
    for atom in wanted:
        hits = _with_hits(
            items, atom.part(atom.words["contains"]), atom.words, compiler
        )
        if hits is not None:
            found = _both(found, hits, compiler.bounds)
    return found


def _both(one: Expression, other: Expression, bounds: Bounds) -> Expression:
    automata = determinize(one, bounds), determinize(other, bounds)
    return Leaf(intersect(automata[0], automata[1], bounds))


class _Items(NamedTuple):
    """Schemas of an array's items."""

    first: list[list[Part]]  # of each leading item
    rest: list[Part] | None  # of the remaining items; None if there are none

    @classmethod
    def of(cls, way: Way) -> Self:
        num_first = num_first_items(way)
        first = [parts_of_item(way, index) for index in range(num_first)]
        rest = parts_of_item(way, num_first)
        is_open = bool(rest) or not num_first
        is_closed = any(part.schema is False for part in rest)
        return cls(first, rest if is_open and not is_closed else None)


def _in_order(
    items: _Items, least: int, most: int | None, compiler: Compiler
) -> Expression:
    """Return the contents of an array."""
    marks, first = compiler.marks, items.first[:most]
    if not first:
        item = Choice([]) if most == 0 else compiler.compile(items.rest or [])
        return marks.alike(item, least, _lower(most, least, item, compiler))
    rest: Expression = marks.space
    if items.rest is not None and (most is None or most > len(first)):
        behind = concat(marks.comma, compiler.compile(items.rest))
        count = max(0, least - len(first))
        others = (
            None if most is None else _lower(most - len(first), count, behind, compiler)
        )
        rest = concat(Repeat(behind, count, others), rest)
    # From the last to the first: an absent item implies that all later ones are
    # absent.
    for index in range(len(first) - 1, -1, -1):
        comma = marks.comma if index else Literal(b"")
        there = concat(comma, compiler.compile(first[index]), rest)
        ending = marks.space if index else Literal(b"")
        rest = there if index < least else Choice([there, ending])
    return rest


def _lower(
    most: int | None, least: int, item: Expression, compiler: Compiler
) -> int | None:
    """Cap `most` so that the items fit into the state budget."""
    if most is None:
        return None
    return min(most, max(least, compiler.max_counted // max(1, size(item))))


def _unique(
    items: _Items, least: int, most: int | None, compiler: Compiler
) -> Expression:
    """Return the contents of an array of distinct items."""
    judge, rest = compiler.judge, items.rest
    if rest is not None and (most is None or most > len(items.first)):
        if items.first:
            raise Unsupported("'uniqueItems' of items after 'prefixItems'")
        values, kinds = compiler.values(rest), compiler.kinds(rest)
        if values is not None:
            distinct: dict[Hashable, Any] = {}
            for value in values:
                distinct.setdefault(key_of(value), value)
            texts = [compiler.value(value) for value in distinct.values()]
            return listed_once(texts, least, most, compiler.marks)
        if not kinds <= {*NUMBERS, "string"}:
            raise Unsupported("'uniqueItems' of arrays or objects")
        texts = by_first_sign(compiler.compile(rest), least, most, compiler.bounds)
        return compiler.marks.separated(
            [(text, False) for text in texts], None, least, most
        )
    ways = [judge.expand(parts) for parts in items.first[:most]]
    pairs = ((one, two) for i, one in enumerate(ways) for two in ways[:i])
    if any(judge.expander.overlap(one, two) for one, two in pairs):
        raise Unsupported("'uniqueItems' of 'prefixItems' with values in common")
    return _in_order(items, least, most, compiler)


def _with_hits(
    items: _Items, hit: Part, words: Any, compiler: Compiler
) -> Expression | None:
    """Return the arrays that satisfy `contains`; None for all arrays."""
    least, most = int(words.get("minContains", 1)), words.get("maxContains")
    if least == 0 and most is None:
        return None
    if items.first or items.rest is None:
        raise Unsupported("'contains' beside 'prefixItems'")
    highest = least if most is None else int(most)
    counts = range(least, highest + 1)
    if highest > _MAX_HITS or least > _MAX_HITS:
        raise Unsupported(f"'contains' of more than {_MAX_HITS} items")
    marks, rest = compiler.marks, items.rest
    wanted = compiler.compile([*rest, hit])
    missed = rest if most is None else [*rest, hit._replace(is_negated=True)]
    other = compiler.compile(missed)
    ways = []
    for count in counts:
        behind = Repeat(concat(marks.comma, other))
        hits = [concat(wanted, behind)] * count
        inner = Separated([(one, True) for one in hits], marks.comma)
        before = Repeat(concat(other, marks.comma))
        some = concat(before, inner, marks.space)
        ways.append(some if count else marks.alike(other, 0, None))
    return marks.array(Choice(ways))


def object_expression(way: Way, compiler: Compiler) -> Expression:
    """Return the objects that the atoms describe.

    Named properties stand in the order of `properties`, then of `required`; other
    properties follow in any order.
    """
    marks, keys = compiler.marks, _Keys(way, compiler)
    entries = [
        (marks.property(key, compiler.compile(parts)), key in keys.required)
        for key, parts in keys.named.items()
    ]
    if keys.required - keys.named.keys():
        return Choice([])  # a required key is forbidden
    least, most = counts_of(way, "Properties")
    rest = [
        marks.property(quoted(found), compiler.compile(parts))
        for found, parts in keys.regions()
    ]
    other = Choice(rest) if rest else None
    if not other and (most is None or most >= len(entries)):
        most = None
    if other and least > len(entries) + 1:
        raise Unsupported("'minProperties' above 1 with unnamed properties")
    least = 0 if least <= len(keys.required) else least
    if most is not None and other is not None:
        most = _lower(most, max(least, len(keys.required)), other, compiler)
    if most is None or other is None or least < 2:
        return marks.object(marks.separated(entries, other, least, most))
    at_least = marks.object(marks.separated(entries, other, least))
    at_most = marks.object(marks.separated(entries, other, 0, most))
    return _both(at_least, at_most, compiler.bounds)


class _Keys:
    """Schemas of an object's properties.

    Attributes:
      required: required keys.
      named: named keys that are allowed, with their schemas.
    """

    def __init__(self, way: Way, compiler: Compiler) -> None:
        self._way, self._compiler = way, compiler
        self._judge, self._bounds = compiler.judge, compiler.bounds
        required, absent = named(way, "required"), named(way, ABSENT)
        self.required = {*required}
        self._all = dict.fromkeys([*named(way, "properties"), *required, *absent])
        self._names = [
            atom.part(atom.words["propertyNames"])
            for atom in way
            if "propertyNames" in atom.words
        ]
        self.named: dict[str, list[Part]] = {}
        for key in self._all:
            parts = self._judge.parts_of(way, key)
            is_false = any(part.schema is part.is_negated for part in parts)
            if key not in absent and not is_false:
                if all(self._judge.holds(name, key) for name in self._names):
                    self.named[key] = parts

    def regions(self) -> Iterable[tuple[Automaton, list[Part]]]:
        """Yield disjoint sets of unnamed keys, each with the schemas of its values."""
        patterns = dict.fromkeys(named(self._way, "patternProperties"))
        speak = given(self._way, "properties"), given(self._way, "patternProperties")
        others = given(self._way, "additionalProperties")
        is_open = False not in others if others else not any(speak)
        if not patterns and not is_open:
            return
        for keys, found in self._divide(list(patterns)):
            if not found and not is_open:
                continue
            parts = list[Part]()
            for atom in self._way:
                own = atom.words.get("patternProperties", {})
                schemas = [own[pattern] for pattern in found if pattern in own]
                if not schemas and "additionalProperties" in atom.words:
                    schemas = [atom.words["additionalProperties"]]
                parts += map(atom.part, schemas)
            if not any(part.schema is part.is_negated for part in parts):
                yield keys, parts

    def _divide(self, patterns: list[str]) -> list[tuple[Automaton, list[str]]]:
        """Partition the unnamed keys by their matching patterns."""
        everything = compile_regex(ANYTHING, self._bounds)
        if self._names:
            everything = self._compiler.keys(self._names)
        names = determinize(
            Choice([Literal(key.encode()) for key in self._all]), self._bounds
        )
        regions = [(subtract(everything, names, self._bounds), list[str]())]
        for pattern in patterns:
            found = self._judge.strings("pattern", pattern)
            divided = []
            for keys, known in regions:
                inside = intersect(keys, found, self._bounds)
                outside = subtract(keys, found, self._bounds)
                divided += [(inside, [*known, pattern]), (outside, known)]
            regions = [one for one in divided if not one[0].is_empty()]
            if len(regions) > _MAX_REGIONS:
                raise TooLarge(
                    f"'patternProperties' of {len(patterns)} patterns overlap in more "
                    f"than {_MAX_REGIONS} ways"
                )
        return regions
