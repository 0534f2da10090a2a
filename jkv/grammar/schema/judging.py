"""Validate values against schemas, and detect unsatisfiable ones."""

import fractions
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from jkv.grammar.automaton import Automaton, intersect
from jkv.grammar.bounds import Bounds
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema import negation
from jkv.grammar.schema.expansion import (
    Atom,
    Expander,
    Part,
    Route,
    Way,
    counts_of,
    given,
    named,
    num_first_items,
    parts_of_item,
)
from jkv.grammar.schema.formats import COUNTED, FORMATS
from jkv.grammar.schema.keywords import OF_TYPE, is_number
from jkv.grammar.schema.negation import items_of, kinds_of
from jkv.grammar.schema.patterns import find_pattern

# Lower and upper bound keywords by kind of value.
_OF_NUMBERS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS: dict[str, tuple[tuple[str, ...], ...]]
_BOUNDS = dict.fromkeys(negation.NUMBERS, _OF_NUMBERS)
_BOUNDS |= {kind: ((f"min{n}",), (f"max{n}",)) for n, kind in negation.COUNTS.items()}

_LEVELS = 3  # depth to which two schemas are checked for contradictions


class Judge:
    """Validator of values against the schemas of a document."""

    def __init__(self, expander: Expander, bounds: Bounds) -> None:
        """Attach the satisfiability checks to the expander."""
        self.expander, self._bounds = expander, bounds
        self._strings: dict[tuple[str, str], Automaton] = {}
        # By id; the lists are stored too, since a freed one's id could be reused.
        self._keys: dict[int, tuple[list[Any], frozenset[Any]]] = {}
        expander.is_possible = self.is_possible
        expander.finds = self.finds

    def finds(self, pattern: str, text: str) -> bool:
        """Return True if a pattern of a schema matches within a string."""
        return self.strings("pattern", pattern).matches(text.encode())

    def strings(self, word: str, value: str) -> Automaton:
        """Return the strings of a `pattern`, a `format` or a "short format"."""
        if (word, value) not in self._strings:
            if word == "pattern":
                found = find_pattern(value, self._bounds)
            else:
                forms = COUNTED if word == "short format" else FORMATS
                found = compile_regex(forms[value], self._bounds)
            self._strings[word, value] = found
        return self._strings[word, value]

    def described(self, way: Way, *, is_short: bool = False) -> list[Automaton]:
        """Return the languages of all patterns and known formats."""
        found = [self.strings("pattern", one) for one in given(way, "pattern")]
        for form in (one for one in given(way, "format") if one in FORMATS):
            kind = "short format" if is_short and form in COUNTED else "format"
            found.append(self.strings(kind, form))
        return found

    def holds(self, part: Part, value: Any) -> bool:
        """Return True if a part holds for a value."""
        part = part._replace(route=Route(is_wide=part.route.is_wide))
        ways = self.expander.expand([part])
        return any(self.hold(way, value) for way in ways)

    def hold(self, way: Way, value: Any) -> bool:
        """Return True if all atoms of a way hold for a value."""
        return all(
            self._holds(atom, word, value) for atom in way for word in atom.words
        )

    def _holds(self, atom: Atom, word: str, value: Any) -> bool:
        """Return True if a keyword holds, or does not apply to the value's kind."""
        self._bounds.spend(1)
        wanted, kind = atom.words[word], kind_of(value)
        if negation.COUNTS.get(word[3:]) == kind:
            return len(value) >= wanted if word[:3] == "min" else len(value) <= wanted
        match word, kind:
            case "type", _:
                return kind in kinds_of(wanted)
            case negation.KIND, _:
                return kind in wanted
            case "const", _:
                return key_of(value) == key_of(wanted)
            case "enum", _:
                return key_of(value) in self._list_keys(wanted)
            case negation.NOT_VALUES, _:
                return key_of(value) not in self._list_keys(wanted)
            case _, "integer" | "fraction":
                return _holds_for_number(word, wanted, atom.words, value)
            case "pattern", "string":
                return self.finds(wanted, value)
            case negation.NOT_PATTERN, "string":
                return not self.finds(wanted, value)
            case "format", "string" if wanted in FORMATS:
                return self.strings("format", wanted).matches(value.encode())
            case _, "array":
                return self._holds_for_array(atom, word, value)
            case _, "object":
                return self._holds_for_object(atom, word, value)
        return True

    def _list_keys(self, values: list[Any]) -> frozenset[Any]:
        """Return the keys of the values that a keyword lists."""
        if id(values) not in self._keys:
            self._keys[id(values)] = values, frozenset(map(key_of, values))
        return self._keys[id(values)][1]

    def _holds_for_array(self, atom: Atom, word: str, value: list[Any]) -> bool:
        wanted, (first, more) = atom.words[word], items_of(atom.words)
        match word:
            case "uniqueItems" if wanted:
                return len(set(map(key_of, value))) == len(value)
            case "contains":
                count = sum(self.holds(atom.part(wanted), item) for item in value)
                least = atom.words.get("minContains", 1)
                return least <= count <= atom.words.get("maxContains", count)
            case "prefixItems" | "items":
                schemas = [*first, *([more] * (len(value) - len(first)))]
                return all(
                    schema is None or self.holds(atom.part(schema), item)
                    for schema, item in zip(schemas, value, strict=False)
                )
        return True

    def _holds_for_object(
        self, atom: Atom, word: str, value: Mapping[str, Any]
    ) -> bool:
        wanted = atom.words[word]
        match word:
            case "required":
                return value.keys() >= {*wanted}
            case negation.ABSENT:
                return not value.keys() & {*wanted}
            case "propertyNames":
                return all(self.holds(atom.part(wanted), key) for key in value)
            case "properties" | "patternProperties" | "additionalProperties":
                return all(
                    self.holds(atom.part(schema), one)
                    for key, one in value.items()
                    for schema in self.schemas_of(atom.words, key)
                )
            case negation.SOME_PROPERTY:
                return any(
                    wanted.mean(key, self.finds)
                    and not self.holds(atom.part(wanted.schema), one)
                    for key, one in value.items()
                )
        return True

    def schemas_of(self, words: Mapping[str, Any], key: str) -> list[Any]:
        """Return the schemas of a property in one set of keywords."""
        own = words.get("properties", {})
        found = [own[key]] if key in own else []
        for pattern, schema in words.get("patternProperties", {}).items():
            if self.finds(pattern, key):
                found.append(schema)
        if not found and "additionalProperties" in words:
            found.append(words["additionalProperties"])
        return found

    def parts_of(self, way: Way, key: str) -> list[Part]:
        """Return the schemas of a property in all atoms."""
        return [
            atom.part(schema)
            for atom in way
            for schema in self.schemas_of(atom.words, key)
        ]

    def listed(self, way: Way) -> list[Any] | None:
        """Return the valid values of `const` or `enum`; None without such a list."""
        for atom in way:
            if "const" in atom.words or "enum" in atom.words:
                values = atom.words.get("enum", [atom.words.get("const")])
                return [value for value in values if self.hold(way, value)]
        return None

    def expand(self, parts: Sequence[Part]) -> list[Way]:
        """Return the ways in which parts hold, approximated by a superset."""
        return self.expander.expand([part.widely() for part in parts])

    def is_possible(self, way: Way, is_thorough: bool) -> bool:
        """Return False if no value can satisfy the way; True if undecided."""
        return self._is_possible(way, is_thorough, _LEVELS if is_thorough else 1)

    def _is_possible(self, way: Way, is_thorough: bool, levels: int) -> bool:
        if len(way) < 2 and not is_thorough:
            return True
        kinds = allowed_kinds(way)
        if not kinds:
            return False
        values = self.listed(way)
        if values is not None:
            return bool(values)
        return any(
            self._is_kind_possible(kind, way, is_thorough, levels) for kind in kinds
        )

    def _is_kind_possible(
        self, kind: str, way: Way, is_thorough: bool, levels: int
    ) -> bool:
        if _contradict(way, *_BOUNDS.get(kind, ((), ()))):
            return False
        needed: Iterable[list[Part]] = ()
        match kind:
            case "string" if is_thorough and (found := self.described(way)):
                both = functools.partial(intersect, bounds=self._bounds)
                return not functools.reduce(both, found).is_empty()
            case "array":
                least, _ = counts_of(way, "Items")
                places = range(min(least, num_first_items(way) + 1))
                needed = (parts_of_item(way, index) for index in places)
            case "object":
                required = {*named(way, "required")}
                if required.intersection(named(way, negation.ABSENT)):
                    return False
                needed = (self.parts_of(way, key) for key in required)
        return all(self._is_part_possible(each, is_thorough, levels) for each in needed)

    def _is_part_possible(
        self, parts: list[Part], is_thorough: bool, levels: int
    ) -> bool:
        if any(part.schema is part.is_negated for part in parts):
            return False
        if not levels or len(parts) < 2 and not is_thorough:
            return True
        ways = self.expand(parts)
        return any(self._is_possible(way, is_thorough, levels - 1) for way in ways)


def allowed_kinds(way: Way) -> set[str]:
    """Return the kinds of values that the types of all atoms allow."""
    allowed = [*map(kinds_of, given(way, "type")), *map(set, given(way, negation.KIND))]
    return {*negation.KINDS}.intersection(*allowed)


def spoken_kinds(way: Way) -> set[str]:
    """Return the kinds that the atoms' keywords apply to; all without keywords."""
    words = {word for atom in way for word in atom.words}
    types = [name for name, own in OF_TYPE.items() if own & words]
    if negation.ABSENT in words:
        types.append("object")
    return {*negation.KINDS} if "type" in words or not types else kinds_of(types)


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if is_number(value) and value == int(value) else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def key_of(value: Any) -> Hashable:
    """Return a key that equal JSON values share; true differs from 1, 1.0 does not."""
    kind = kind_of(value)
    if isinstance(value, list):
        return kind, tuple(map(key_of, value))
    if isinstance(value, Mapping):
        return kind, frozenset((name, key_of(part)) for name, part in value.items())
    return kind, value


def exact(value: int | float) -> fractions.Fraction:
    """Return a number's exact decimal value."""
    return fractions.Fraction(str(value))


def _holds_for_number(
    word: str, wanted: Any, words: Mapping[str, Any], value: int | float
) -> bool:
    if isinstance(wanted, bool):
        return True  # draft 4: a flag that makes the other bound exclusive
    match word:
        case "minimum" if words.get("exclusiveMinimum") is not True:
            return exact(value) >= exact(wanted)
        case "maximum" if words.get("exclusiveMaximum") is not True:
            return exact(value) <= exact(wanted)
        case "minimum" | "exclusiveMinimum":
            return exact(value) > exact(wanted)
        case "maximum" | "exclusiveMaximum":
            return exact(value) < exact(wanted)
        case "multipleOf" | negation.NOT_MULTIPLE:
            is_multiple = (exact(value) / exact(wanted)).denominator == 1
            return is_multiple == (word == "multipleOf")
    return True


def _contradict(way: Way, least: tuple[str, ...], most: tuple[str, ...]) -> bool:
    """Return True if a lower bound exceeds an upper one, or meets it exclusively."""
    bounds = [
        [
            (exact(atom.words[word]), word)
            for atom in way
            for word in names
            if not isinstance(atom.words.get(word, True), bool)
        ]
        for names in (least, most)
    ]
    return any(
        low > high or low == high and "exclusive" in lower + upper
        for low, lower in bounds[0]
        for high, upper in bounds[1]
    )
