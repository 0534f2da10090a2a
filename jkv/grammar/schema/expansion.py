"""Expand schemas to a disjunction of keyword sets.

A way is a conjunction of `Atom`s: type keywords and listed values. `$ref`, `allOf`,
`anyOf`, `oneOf`, `not`, `if` and property dependencies are expanded; negated keywords
become their contraries. A value is valid exactly if all atoms of some way hold, except
for ways that are dropped where a negation is inexpressible or recursion is truncated.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jkv.grammar.bounds import Bounds
from jkv.grammar.errors import TooLarge, Unsupported
from jkv.grammar.schema.document import Document
from jkv.grammar.schema.keywords import OF_TYPE
from jkv.grammar.schema.negation import (
    ABSENT,
    SOME_PROPERTY,
    Others,
    contraries,
    items_of,
)

_MAX_WAYS = 512


class Route(NamedTuple):
    """The recursive schemas around a schema."""

    opened: frozenset[int] = frozenset()  # ids of the recursive schemas
    repeats: int = 0  # number of recursive re-entries
    # Approximate inexpressible schemas by a superset rather than a subset.
    is_wide: bool = False


class Part(NamedTuple):
    """A schema that must hold, or must not, at a location."""

    schema: Any  # a mapping or a boolean of the document
    route: Route = Route()  # enclosing recursive schemas
    is_negated: bool = False  # True if the schema must not hold

    def of(self, schema: Any, is_negated: bool = False) -> "Part":
        """Return another schema at the same location."""
        return Part(schema, self.route, is_negated)

    def widely(self) -> "Part":
        """Return this part, approximated by a superset."""
        return self._replace(route=self.route._replace(is_wide=True))

    @property
    def key(self) -> tuple[int, Route, bool]:
        """Cache key; parts with equal keys are equivalent."""
        return id(self.schema), self.route, self.is_negated


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """Keywords that hold at once, without combinators such as `anyOf`."""

    words: Mapping[str, Any]  # keyword values
    origin: Any  # source schema
    route: Route  # of nested schemas
    # True for negated schemas, where properties and items do not count as evaluated.
    is_muted: bool = False

    def part(self, schema: Any) -> Part:
        """Return a nested schema as a part."""
        return Part(schema, self.route)


Way = list[Atom]
Techniques = list[Way]


class Expander:
    """Expands schemas, and recursive schemas to a limited depth."""

    def __init__(self, document: Document, recursion: int, bounds: Bounds) -> None:
        self.document, self._recursion, self._bounds = document, recursion, bounds
        self._known: dict[tuple[int, Route, bool], tuple[Any, Techniques]] = {}
        self.is_cut = False  # True if recursion was truncated
        # True unless the atoms contradict each other; the flag requests a thorough
        # check.
        self.is_possible: Callable[[Way, bool], bool] = lambda _, __: True
        self.finds: Callable[[str, str], bool] = lambda _, __: False

    def expand(self, parts: Iterable[Part]) -> Techniques:
        """Return the ways in which all parts hold; raise if there are too many."""
        ways: Techniques = [[]]
        for part in parts:
            ways = self._both(ways, self._expand(part), part.schema)
        return ways

    def settle(self, ways: Techniques) -> Techniques:
        """Replace each unspecified property by each named one that it may be."""
        settled, open_ = [], list(reversed(ways))
        while open_:
            way = open_.pop()
            self._bounds.spend(len(way))
            found = next((a for a in way if SOME_PROPERTY in a.words), None)
            if found is None:
                settled.append(way)
                continue
            others: Others = found.words[SOME_PROPERTY]
            keys = dict.fromkeys(named(way, "properties") + named(way, "required"))
            keys = {key: None for key in keys if others.mean(key, self.finds)}
            rest = [atom for atom in way if atom is not found]
            for key in reversed(keys):
                words = {
                    "type": "object",
                    "required": [key],
                    "properties": {key: self._negation(others.schema, found.origin)},
                }
                chosen = [*rest, Atom(words, found.origin, found.route)]
                if self.is_possible(chosen, False):
                    open_.append(chosen)
            self._check_number(settled + open_, found.origin)
        return settled

    def _negation(self, schema: Any, like: Any) -> Any:
        if isinstance(schema, bool):
            return not schema
        return self.document.add({"not": schema}, like)

    def _both(self, left: Techniques, right: Techniques, schema: Any) -> Techniques:
        ways = [[*one, *other] for one in left for other in right]
        if len(ways) > 1:
            self._bounds.spend(sum(map(len, ways)))
            ways = [way for way in ways if self.is_possible(way, False)]
        self._check_number(ways, schema)
        return ways

    def _check_number(self, ways: Techniques, schema: Any) -> None:
        if len(ways) > _MAX_WAYS:
            raise TooLarge(
                f"schema at {self.document.pointer(schema)} expands to more than "
                f"{_MAX_WAYS} alternatives"
            )

    def _expand(self, part: Part) -> Techniques:
        if isinstance(part.schema, bool):
            return [[]] if part.schema != part.is_negated else []
        if part.key not in self._known:
            expand = self._negative if part.is_negated else self._positive
            self._known[part.key] = part.schema, expand(part)
        return self._known[part.key][1]

    def _positive(self, part: Part) -> Techniques:
        words, route, schema = self.document.words(part.schema), part.route, part.schema
        own = {w: value for w, value in words.items() if w in _OWN}
        ways: Techniques = [[Atom(own, schema, route)]]
        joined = [*self._references(part), *map(part.of, words.get("allOf", ()))]
        for inner in joined:
            ways = self._both(self._expand(inner), ways, schema)
        if "anyOf" in words:
            branches = [self._expand(part.of(branch)) for branch in words["anyOf"]]
            ways = self._both(ways, sum(branches, []), schema)
        if "oneOf" in words:
            branches = words["oneOf"]
            if route.is_wide:
                each = [self._expand(part.of(branch)) for branch in branches]
                ways = self._both(ways, sum(each, []), schema)
            else:
                ways = self._one_of(part, branches, ways)
        if "not" in words:
            contrary = _muted(self._expand(part.of(words["not"], True)))
            ways = self._both(ways, contrary, schema)
        if "if" in words and words.keys() & {"then", "else"}:
            ways = self._both(ways, self._condition(part, words), schema)
        for key, needed in _dependencies(words):
            ways = self._both(ways, self._dependent(part, key, needed), schema)
        if route.is_wide or not words.keys() & _UNEVALUATED:
            return ways
        return self._close_unevaluated(part, words, ways)

    def _references(self, part: Part) -> list[Part]:
        found = []
        for word in ("$ref", "$dynamicRef", "$recursiveRef"):
            if word in self.document.words(part.schema):
                target = self.document.target(part.schema, word)
                found.append(self._open(part, target))
        return found

    def _open(self, part: Part, target: Any) -> Part:
        """Return the part of a reference's target."""
        route = part.route
        if isinstance(target, dict) and self.document.is_recursive(target):
            repeats = route.repeats + (id(target) in route.opened)
            # truncate to the empty language, or to all values
            if repeats > self._recursion:
                self.is_cut = True
                return part.of(part.route.is_wide)
            route = route._replace(opened=route.opened | {id(target)}, repeats=repeats)
        return Part(target, route, part.is_negated)

    def _one_of(
        self, part: Part, branches: Sequence[Any], beside: Techniques
    ) -> Techniques:
        """Return the ways in which exactly one branch holds."""
        schema, found = part.schema, list[Way]()
        each = [
            self._both(beside, self._expand(part.of(branch)), schema)
            for branch in branches
        ]
        for index, ways in enumerate(each):
            for other, branch in enumerate(branches):
                if other == index or not ways:
                    continue
                if self.overlap(ways, self._expand(part.of(branch).widely())):
                    contrary = _muted(self._expand(part.of(branch, True)))
                    ways = self._both(ways, contrary, schema)
            found += ways
        self._check_number(found, schema)
        return found

    def overlap(self, ways: Techniques, others: Techniques) -> bool:
        """Return True if a value may satisfy a way of each."""
        self._bounds.spend(len(ways) * len(others))
        return any(
            self.is_possible([*one, *other], True) for one in ways for other in others
        )

    def _condition(self, part: Part, words: Mapping[str, Any]) -> Techniques:
        then, otherwise = words.get("then", True), words.get("else", True)
        yes = self.expand([part.of(words["if"]), part.of(then)])
        no = _muted(self._expand(part.of(words["if"], True)))
        return yes + self._both(no, self._expand(part.of(otherwise)), part.schema)

    def _dependent(self, part: Part, key: str, needed: Any) -> Techniques:
        """Return the ways without property `key`, or with its dependencies."""
        there: dict[str, Any] = {"type": "object", "required": [key]}
        if isinstance(needed, list):
            there["required"] += needed
        ways = [[Atom(there, part.schema, part.route)]]
        if not isinstance(needed, list):
            ways = self._both(ways, self._expand(part.of(needed)), part.schema)
        return [[Atom({ABSENT: [key]}, part.schema, part.route)], *ways]

    def _close_unevaluated(
        self, part: Part, words: Mapping[str, Any], ways: Techniques
    ) -> Techniques:
        """Add the unevaluated keywords to each way as additional ones."""
        closed = []
        for way in ways:
            added: dict[str, Any] = {}
            active = [atom.words for atom in way if not atom.is_muted]
            has_rest = any("additionalProperties" in one for one in active)
            if "unevaluatedProperties" in words and not has_rest:
                for word in ("properties", "patternProperties"):
                    added[word] = {k: True for one in active for k in one.get(word, ())}
                added["additionalProperties"] = words["unevaluatedProperties"]
            has_rest = any(items_of(one)[1] is not None for one in active)
            if "unevaluatedItems" in words and not has_rest:
                first = max((len(items_of(one)[0]) for one in active), default=0)
                added["prefixItems"] = [True] * first
                added["items"] = words["unevaluatedItems"]
            new = [Atom(added, part.schema, part.route)] if added else []
            closed.append([*way, *new])
        return closed

    def _negative(self, part: Part) -> Techniques:
        """Return the ways in which at least one keyword fails."""
        words, found = self.document.words(part.schema), list[Way]()
        for inner in (
            *self._references(part),
            *(part.of(one, True) for one in words.get("allOf", ())),
        ):
            found += self._expand(inner)
        if "anyOf" in words:
            found += self.expand(part.of(one, True) for one in words["anyOf"])
        if "oneOf" in words:
            found += self._not_one_of(part, words["oneOf"])
        if "not" in words:
            found += self._expand(part.of(words["not"], False))
        if "if" in words:
            for is_met, word in ((True, "then"), (False, "else")):
                if word in words:
                    condition = part.of(words["if"], not is_met)
                    found += self.expand([condition, part.of(words[word], True)])
        for key, needed in _dependencies(words):
            there = [require(part, {"type": "object", "required": [key]})]
            if isinstance(needed, list):
                absent = [require(part, {ABSENT: [name]}) for name in needed]
                found += self._both(there, absent, part.schema)
            else:
                contrary = self._expand(part.of(needed, True))
                found += self._both(there, contrary, part.schema)
        for word in words:
            if word in _OWN:
                found += [
                    require(part, words) for words in self._contraries(word, part)
                ]
        found = [way for way in found if self.is_possible(way, False)]
        self._check_number(found, part.schema)
        return found

    def _not_one_of(self, part: Part, branches: Sequence[Any]) -> Techniques:
        none = self.expand(part.of(one, True) for one in branches)
        pairs = [
            self.expand([part.of(one, False), part.of(other, False)])
            for index, one in enumerate(branches)
            for other in branches[:index]
        ]
        return none + sum(pairs, [])

    def _contraries(self, word: str, part: Part) -> list[dict[str, Any]]:
        """Return the keyword sets under which a keyword fails."""
        if word == "format":  # an annotation by the standard: it never fails
            return [{}] if part.route.is_wide else []
        words = self.document.words(part.schema)

        def negate(schema: Any) -> Any:
            return self._negation(schema, part.schema)

        found = contraries(word, words, negate)
        if found is None and part.route.is_wide:
            return [{}]
        if found is None:
            raise Unsupported(
                f"{word!r} at {self.document.pointer(part.schema)} cannot be negated "
                "(in 'not', 'if', or 'oneOf' with values in common)"
            )
        return found


def given(way: Way, word: str) -> list[Any]:
    """Return the values of a keyword, of the atoms that have it."""
    return [atom.words[word] for atom in way if word in atom.words]


def named(way: Way, word: str) -> list[Any]:
    """Return the keys or values that the atoms list under a keyword."""
    return [one for listed in given(way, word) for one in listed]


def counts_of(way: Way, what: str) -> tuple[int, int | None]:
    """Return the bounds of "Items", say; 0 and None if unbounded."""
    least = max(map(int, given(way, f"min{what}")), default=0)
    return least, min(map(int, given(way, f"max{what}")), default=None)


def num_first_items(way: Way) -> int:
    """Return the number of items with a schema of their own."""
    return max((len(items_of(atom.words)[0]) for atom in way), default=0)


def parts_of_item(way: Way, index: int) -> list[Part]:
    """Return the schemas of an array's item."""
    found = []
    for atom in way:
        first, more = items_of(atom.words)
        schema = first[index] if index < len(first) else more
        if schema is not None:
            found.append(atom.part(schema))
    return found


def require(part: Part, words: Mapping[str, Any]) -> Way:
    """Return the way with the given keywords, at the location of a part."""
    return [Atom(words, part.schema, part.route)]


def _dependencies(words: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return pairs of a key and its dependency, a schema or a list of keys."""
    names = "dependentRequired", "dependentSchemas", "dependencies"
    return [pair for name in names for pair in words.get(name, {}).items()]


def _muted(ways: Techniques) -> Techniques:
    return [[dataclasses.replace(a, is_muted=True) for a in way] for way in ways]


_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
_OWN = {"type", "enum", "const"}.union(*OF_TYPE.values()) - {
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    *_UNEVALUATED,
}
