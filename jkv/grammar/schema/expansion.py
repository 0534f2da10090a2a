"""From schemas that must hold at once to the ways in which they do.

A way is a list of `Atom`s, all of which hold: keywords of single types, and listed
values. `$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if` and what depends on a property
are taken apart into them; what is negated becomes keywords that say the contrary.
A value is described exactly if all atoms of some way hold for it, but for ways that
are left out where a negation cannot be said, or recursion ends.
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
    """Which schemas that lead back to themselves a schema stands in."""

    opened: frozenset[int] = frozenset()  # ids of their schemas
    repeats: int = 0  # how often one was opened that was open already
    # Whether ways are asked for that hold for more values rather than for less, where
    # not all can be told.
    is_wide: bool = False


class Part(NamedTuple):
    """A schema that must hold somewhere, or must not."""

    schema: Any  # a mapping or a boolean, of the document
    route: Route = Route()  # where it stands
    is_negated: bool = False  # whether it must not hold

    def of(self, schema: Any, is_negated: bool = False) -> "Part":
        """Return another schema of the same place."""
        return Part(schema, self.route, is_negated)

    def widely(self) -> "Part":
        """Return this part, for which rather more than less may hold."""
        return self._replace(route=self.route._replace(is_wide=True))

    @property
    def key(self) -> tuple[int, Route, bool]:
        """Parts of one key mean the same."""
        return id(self.schema), self.route, self.is_negated


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """Keywords that hold at once, none of which joins schemas."""

    words: Mapping[str, Any]  # the keywords
    origin: Any  # the schema that they are of
    route: Route  # of schemas in them
    # Whether it comes from a schema that must not hold, so that what it says of
    # properties and items does not count as evaluated.
    is_muted: bool = False

    def part(self, schema: Any) -> Part:
        """Return a schema that stands in this one."""
        return Part(schema, self.route)


Way = list[Atom]
Ways = list[Way]


class Expander:
    """Takes schemas apart, and opens one so often where it is open already."""

    def __init__(self, document: Document, recursion: int, bounds: Bounds) -> None:
        self.document, self._recursion, self._bounds = document, recursion, bounds
        self._known: dict[tuple[int, Route, bool], tuple[Any, Ways]] = {}
        self.is_cut = False  # whether recursion has ended somewhere
        # Whether atoms can hold at once, as far as it is told cheaply (or at length).
        self.is_possible: Callable[[Way, bool], bool] = lambda _, __: True
        self.finds: Callable[[str, str], bool] = lambda _, __: False

    def expand(self, parts: Iterable[Part]) -> Ways:
        """Return the ways in which all parts hold; refuse too many of them."""
        ways: Ways = [[]]
        for part in parts:
            ways = self._both(ways, self._expand(part), part.schema)
        return ways

    def settle(self, ways: Ways) -> Ways:
        """Choose, where some property is meant, which of the named ones it is."""
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

    def _both(self, left: Ways, right: Ways, schema: Any) -> Ways:
        ways = [[*one, *other] for one in left for other in right]
        if len(ways) > 1:
            self._bounds.spend(sum(map(len, ways)))
            ways = [way for way in ways if self.is_possible(way, False)]
        self._check_number(ways, schema)
        return ways

    def _check_number(self, ways: Ways, schema: Any) -> None:
        if len(ways) > _MAX_WAYS:
            raise TooLarge(
                f"more than {_MAX_WAYS} ways to hold for the schema at "
                f"{self.document.pointer(schema)}"
            )

    def _expand(self, part: Part) -> Ways:
        if isinstance(part.schema, bool):
            return [[]] if part.schema != part.is_negated else []
        if part.key not in self._known:
            expand = self._negative if part.is_negated else self._positive
            self._known[part.key] = part.schema, expand(part)
        return self._known[part.key][1]

    def _positive(self, part: Part) -> Ways:
        words, route, schema = self.document.words(part.schema), part.route, part.schema
        own = {w: value for w, value in words.items() if w in _OWN}
        ways: Ways = [[Atom(own, schema, route)]]
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
        """Return a part for the target of a reference."""
        route = part.route
        if isinstance(target, dict) and self.document.is_recursive(target):
            repeats = route.repeats + (id(target) in route.opened)
            if repeats > self._recursion:  # nothing holds, or anything
                self.is_cut = True
                return part.of(part.route.is_wide)
            route = route._replace(opened=route.opened | {id(target)}, repeats=repeats)
        return Part(target, route, part.is_negated)

    def _one_of(self, part: Part, branches: Sequence[Any], beside: Ways) -> Ways:
        """Return the ways of each branch in which no other one holds."""
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

    def overlap(self, ways: Ways, others: Ways) -> bool:
        """Whether a value may hold in one way of each."""
        self._bounds.spend(len(ways) * len(others))
        return any(
            self.is_possible([*one, *other], True) for one in ways for other in others
        )

    def _condition(self, part: Part, words: Mapping[str, Any]) -> Ways:
        then, otherwise = words.get("then", True), words.get("else", True)
        yes = self.expand([part.of(words["if"]), part.of(then)])
        no = _muted(self._expand(part.of(words["if"], True)))
        return yes + self._both(no, self._expand(part.of(otherwise)), part.schema)

    def _dependent(self, part: Part, key: str, needed: Any) -> Ways:
        """Return the ways in which a property is not there, or what it needs is."""
        there: dict[str, Any] = {"type": "object", "required": [key]}
        if isinstance(needed, list):
            there["required"] += needed
        ways = [[Atom(there, part.schema, part.route)]]
        if not isinstance(needed, list):
            ways = self._both(ways, self._expand(part.of(needed)), part.schema)
        return [[Atom({ABSENT: [key]}, part.schema, part.route)], *ways]

    def _close_unevaluated(
        self, part: Part, words: Mapping[str, Any], ways: Ways
    ) -> Ways:
        """Say of each way what else there may be, of what nothing in it speaks."""
        closed = []
        for way in ways:
            added: dict[str, Any] = {}
            said = [atom.words for atom in way if not atom.is_muted]
            has_rest = any("additionalProperties" in one for one in said)
            if "unevaluatedProperties" in words and not has_rest:
                for word in ("properties", "patternProperties"):
                    added[word] = {k: True for one in said for k in one.get(word, ())}
                added["additionalProperties"] = words["unevaluatedProperties"]
            has_rest = any(items_of(one)[1] is not None for one in said)
            if "unevaluatedItems" in words and not has_rest:
                first = max((len(items_of(one)[0]) for one in said), default=0)
                added["prefixItems"] = [True] * first
                added["items"] = words["unevaluatedItems"]
            new = [Atom(added, part.schema, part.route)] if added else []
            closed.append([*way, *new])
        return closed

    def _negative(self, part: Part) -> Ways:
        """Return the ways in which some keyword does not hold."""
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
            there = [say(part, {"type": "object", "required": [key]})]
            if isinstance(needed, list):
                absent = [say(part, {ABSENT: [name]}) for name in needed]
                found += self._both(there, absent, part.schema)
            else:
                contrary = self._expand(part.of(needed, True))
                found += self._both(there, contrary, part.schema)
        for word in words:
            if word in _OWN:
                found += [say(part, words) for words in self._contraries(word, part)]
        found = [way for way in found if self.is_possible(way, False)]
        self._check_number(found, part.schema)
        return found

    def _not_one_of(self, part: Part, branches: Sequence[Any]) -> Ways:
        none = self.expand(part.of(one, True) for one in branches)
        pairs = [
            self.expand([part.of(one, False), part.of(other, False)])
            for index, one in enumerate(branches)
            for other in branches[:index]
        ]
        return none + sum(pairs, [])

    def _contraries(self, word: str, part: Part) -> list[dict[str, Any]]:
        """Return what may hold where a keyword does not."""
        if word == "format":  # by the standard it holds for all values
            return [{}] if part.route.is_wide else []
        words = self.document.words(part.schema)

        def negate(schema: Any) -> Any:
            return self._negation(schema, part.schema)

        found = contraries(word, words, negate)
        if found is None and part.route.is_wide:
            return [{}]
        if found is None:
            raise Unsupported(
                f"{word!r} at {self.document.pointer(part.schema)}, where it must not "
                "hold ('not', 'oneOf' with values in common, or 'if')"
            )
        return found


def said(way: Way, word: str) -> list[Any]:
    """Return what atoms say by a keyword, those that have it."""
    return [atom.words[word] for atom in way if word in atom.words]


def named(way: Way, word: str) -> list[Any]:
    """Return the keys or values that atoms list by a keyword."""
    return [one for listed in said(way, word) for one in listed]


def counts_of(way: Way, what: str) -> tuple[int, int | None]:
    """Return the least and the most that atoms allow of "Items", say; None for any."""
    least = max(map(int, said(way, f"min{what}")), default=0)
    return least, min(map(int, said(way, f"max{what}")), default=None)


def num_first_items(way: Way) -> int:
    """Return of how many items of an array atoms speak one by one."""
    return max((len(items_of(atom.words)[0]) for atom in way), default=0)


def parts_of_item(way: Way, index: int) -> list[Part]:
    """Return the schemas that atoms have for an item of an array."""
    found = []
    for atom in way:
        first, more = items_of(atom.words)
        schema = first[index] if index < len(first) else more
        if schema is not None:
            found.append(atom.part(schema))
    return found


def say(part: Part, words: Mapping[str, Any]) -> Way:
    """Return the way in which some keywords hold in the place of a part."""
    return [Atom(words, part.schema, part.route)]


def _dependencies(words: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys on which others depend, with a schema or a list of keys."""
    names = "dependentRequired", "dependentSchemas", "dependencies"
    return [pair for name in names for pair in words.get(name, {}).items()]


def _muted(ways: Ways) -> Ways:
    return [[dataclasses.replace(a, is_muted=True) for a in way] for way in ways]


_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
_OWN = {"type", "enum", "const"}.union(*OF_TYPE.values()) - {
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    *_UNEVALUATED,
}
