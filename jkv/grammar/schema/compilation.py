"""Compile a JSON schema to an expression over bytes.

Properties and items that the schema does not mention are excluded. Properties stand in
the order of the schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jkv.grammar.automaton import Automaton, Choice, Expression, Leaf, Literal, size
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import TooLarge, Unsupported
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.containers import array_expression, object_expression
from jkv.grammar.schema.document import MAX_LEVELS, Document
from jkv.grammar.schema.expansion import Expander, Part, Way, named
from jkv.grammar.schema.judging import Judge, allowed_kinds, kind_of, spoken_kinds
from jkv.grammar.schema.negation import KINDS, NOT_VALUES, NUMBERS
from jkv.grammar.schema.numbers import number_expression
from jkv.grammar.schema.strings import (
    Punctuation,
    counted_characters,
    literal_string,
    string_automaton,
    string_expression,
)

_LEVELS_TO_DETERMINIZE = 6  # limits the nesting of expressions
# States of a grammar due to counted characters and items, and the least budget that
# each count keeps.
_MAX_STATES, _LEAST_COUNTED = 2**14, 2**8
_PARTS = 8  # of the bounds; one is for trying another level of recursion
_SMALL = 32  # larger expressions are determinized before reuse


class Reading(NamedTuple):
    """Options of the schema compiler."""

    whitespace: str  # pattern of the space around brackets, commas and colons
    depth: int  # levels of arrays and objects in a value without a schema
    recursion: int  # depth to which a recursive schema may contain itself
    strict: bool  # raise for unknown keywords and formats


def compile_schema(root: Any, reading: Reading, bounds: Bounds) -> Expression:
    """Return the language of a schema.

    Recursion is reduced below `reading.recursion` if it takes too many states.
    `Unsupported` names an unsupported keyword; `TooLarge` includes schemas that are
    nested too deeply.
    """
    for name in ("depth", "recursion"):
        number = getattr(reading, name)
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{name} must be an int >= 0, got {number!r:.60}")
    found, sizes = list[Expression](), list[int]()
    for recursion in range(reading.recursion + 1):
        less = reading._replace(recursion=recursion)
        within = bounds.share(_PARTS) if recursion else bounds
        compiler = SchemaCompiler(root, less, within)
        try:
            texts = compiler.compile_root()
        except TooLarge:
            if recursion:
                break
            raise
        if recursion and size(texts) > _MAX_STATES:
            break
        found.append(texts)
        sizes.append(size(texts))
        # The next level is expected to grow by the same factor.
        is_too_large = recursion and sizes[-1] ** 2 > _MAX_STATES * max(1, sizes[-2])
        if is_too_large or not compiler.is_cut:
            break
    return found[-1]


class SchemaCompiler:
    """Compiler of one schema, with state shared by all its parts."""

    def __init__(
        self,
        root: Any,
        reading: Reading,
        bounds: Bounds,
        max_counted: int = _MAX_STATES,
    ) -> None:
        self.bounds, self._reading, self.max_counted = bounds, reading, max_counted
        self.document = Document(root, is_strict=reading.strict)
        self._expander = Expander(self.document, reading.recursion, bounds)
        self.judge = Judge(self._expander, bounds)
        self.marks = Punctuation(Leaf(compile_regex(reading.whitespace, bounds)))
        self._free: dict[int, Expression] = {}
        self._known: dict[Any, tuple[Sequence[Part], Expression]] = {}
        self._level = 0

    @property
    def is_cut(self) -> bool:
        """True if recursion was truncated."""
        return self._expander.is_cut

    def compile_root(self) -> Expression:
        """Return the language of the whole schema.

        Counts of characters and items are lowered if they take too many states.
        """
        try:
            found = self.compile([Part(self.document.root)])
            if self.max_counted > _LEAST_COUNTED and size(found) > _MAX_STATES:
                less, root = self.max_counted // 4, self.document.root
                lower = SchemaCompiler(root, self._reading, self.bounds, less)
                lowered = lower.compile_root()
                # Lower counts may not help: most states may have another cause.
                return lowered if 4 * size(lowered) < 3 * size(found) else found
            return found
        except RecursionError as error:
            raise TooLarge("schema is nested too deeply") from error

    def compile(self, parts: Sequence[Part]) -> Expression:
        """Return the language of values for which all parts hold."""
        key = tuple(part.key for part in parts)
        if key in self._known:
            _, found = self._known[key]
            if not isinstance(found, Leaf) and size(found) > _SMALL:
                found = Leaf(determinize(found, self.bounds))
        else:
            found = self._compile(parts)
        self._known[key] = parts, found
        return found

    def _compile(self, parts: Sequence[Part]) -> Expression:
        self.bounds.spend(1)
        if self._level > MAX_LEVELS:
            raise TooLarge(f"values are nested too deeply at {self._at(parts)}")
        self._level += 1
        ways = self._ways(parts)
        try:
            found = Choice([self._compile_way(way) for way in ways])
        except (Unsupported, TooLarge) as error:
            if " at #" in str(error) or not parts:
                raise
            raise type(error)(f"{error}, at {self._at(parts)}") from error
        self._level -= 1
        if self._level and self._level % _LEVELS_TO_DETERMINIZE == 0:
            return Leaf(determinize(found, self.bounds))
        return found.parts[0] if len(found.parts) == 1 else found

    def _at(self, parts: Sequence[Part]) -> str:
        return self.document.pointer(parts[0].schema) if parts else "#"

    def _ways(self, parts: Sequence[Part]) -> list[Way]:
        return self._expander.settle(self._expander.expand(parts))

    def _compile_way(self, way: Way) -> Expression:
        way = [atom for atom in way if atom.words]
        if not way:
            return self._free_value(self._reading.depth)
        values = self.judge.listed(way)
        if values is not None:
            return Choice([self.value(value) for value in values])
        kinds = allowed_kinds(way) & spoken_kinds(way)
        found = [self._compile_kind(kind, way) for kind in sorted(kinds & _OTHER_KINDS)]
        if numbers := kinds - _OTHER_KINDS:
            found.append(number_expression(way, numbers, self.bounds))
        return Choice(found) if len(found) > 1 else found[0] if found else Choice([])

    def _compile_kind(self, kind: str, way: Way) -> Expression:
        match kind:
            case "null":
                return self._those([None], way)
            case "boolean":
                return self._those([True, False], way)
            case "string":
                return string_expression(way, self.judge, self.bounds, self.max_counted)
        others = [atom for atom in way if NOT_VALUES not in atom.words]
        for value in named(way, NOT_VALUES):
            if kind_of(value) == kind and self.judge.hold(others, value):
                raise Unsupported(f"'not' with a listed {kind}")
        make = array_expression if kind == "array" else object_expression
        return make(way, self)

    def _those(self, values: Sequence[Any], way: Way) -> Expression:
        return Choice([self.value(v) for v in values if self.judge.hold(way, v)])

    def values(self, parts: Sequence[Part]) -> list[Any] | None:
        """Return the values for which all parts hold; None if they are not listed."""
        found = []
        for way in self._ways(parts):
            values = self.judge.listed(way)
            if values is None and allowed_kinds(way) & spoken_kinds(way) <= {
                "null",
                "boolean",
            }:
                values = [v for v in (None, True, False) if self.judge.hold(way, v)]
            if values is None:
                return None
            found += values
        return found

    def kinds(self, parts: Sequence[Part]) -> set[str]:
        """Return the kinds of values for which all parts may hold."""
        ways = self._ways(parts)
        found = [allowed_kinds(way) & spoken_kinds(way) for way in ways]
        return {*KINDS}.intersection(set().union(*found))

    def keys(self, parts: Sequence[Part]) -> Automaton:
        """Return the strings for which all parts hold, without quotes."""
        found: list[Expression] = []
        for way in self._ways(parts):
            listed = self.judge.listed(way)
            if listed is not None:
                texts = [value for value in listed if isinstance(value, str)]
                found += [Literal(text.encode()) for text in texts]
            elif "string" in allowed_kinds(way):
                strings = string_automaton(way, self.judge, self.bounds)
                if not isinstance(strings, Automaton):
                    strings = counted_characters(*strings, self.bounds)
                found.append(Leaf(strings))
        return determinize(Choice(found), self.bounds)

    def value(self, value: Any, level: int = 0) -> Expression:
        if level > MAX_LEVELS:
            raise TooLarge("a value of 'enum' or 'const' is nested too deeply")
        if isinstance(value, str):
            return literal_string(value)
        marks = self.marks
        if isinstance(value, list):
            items = [(self.value(item, level + 1), True) for item in value]
            return marks.array(marks.separated(items))
        if isinstance(value, Mapping):
            entries = [
                (marks.property(key, self.value(part, level + 1)), True)
                for key, part in value.items()
            ]
            return marks.object(marks.separated(entries))
        return Literal(_compact(value).encode())

    def _free_value(self, depth: int) -> Expression:
        """Return all JSON values with up to `depth` levels of arrays and objects."""
        if depth not in self._free:
            found = [
                self._compile_kind(kind, []) for kind in ("null", "boolean", "string")
            ]
            found.append(number_expression([], {*NUMBERS}, self.bounds))
            if depth:
                inner, marks = self._free_value(depth - 1), self.marks
                key = self._compile_kind("string", [])
                entry = marks.property(key, inner)
                found.append(marks.array(marks.alike(inner, 0, None)))
                found.append(marks.object(marks.alike(entry, 0, None)))
            self._free[depth] = Leaf(determinize(Choice(found), self.bounds))
        return self._free[depth]


_OTHER_KINDS = {"null", "boolean", "string", "array", "object"}


def _compact(value: Any) -> str:
    """Return JSON without white space; integral floats are written as integers."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
