"""Parts of a concatenated grammar: choices, patterns, schemas, rules and free text."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jkv.grammar.automaton import (
    Choice,
    Concatenation,
    Expression,
    Leaf,
    Literal,
    concat,
    subtract,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.errors import NoText
from jkv.grammar.gbnf import compile_gbnf
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.schema.strings import ANYTHING
from jkv.status import UsageError

WHITESPACE = "[ ]?"
DEPTH, RECURSION = 3, 2


class Part:
    """Base class of languages."""

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language over bytes; subclasses document its errors."""
        raise NotImplementedError

    def cache_key(self) -> list[Any]:
        """Return the inputs of the language as JSON, for the cache key."""
        return [type(self).__name__, *vars(self).values()]


@dataclasses.dataclass(frozen=True)
class Choices(Part):
    """A choice between strings."""

    texts: Sequence[str]  # at least one; none raises `NoText`

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", read_list("texts", self.texts, str))

    def expression(self, bounds: Bounds) -> Expression:
        del bounds
        if not self.texts:
            raise NoText("texts is empty; pass at least one string")
        return Choice([Literal(text.encode()) for text in self.texts])


@dataclasses.dataclass(frozen=True)
class Pattern(Part):
    """A regular expression matched from end to end, as in `from_regex`."""

    pattern: str  # in the syntax of Python's `re`

    def expression(self, bounds: Bounds) -> Expression:
        return Leaf(compile_regex(self.pattern, bounds))


@dataclasses.dataclass(frozen=True)
class Schema(Part):
    """The JSON values of a schema, as in `from_json_schema`."""

    schema: Mapping[str, Any] | bool  # of JSON Schema
    # Pattern of the space around brackets, commas and colons.
    whitespace: str = WHITESPACE
    # Levels of arrays and objects in a value without a schema.
    depth: int = DEPTH
    # Depth to which a recursive schema may contain itself.
    recursion: int = RECURSION
    strict: bool = False  # raise for unknown keywords and formats
    around: str = ""  # pattern of the text before and after the value

    @property
    def reading(self) -> Reading:
        """Options of the schema compiler."""
        return Reading(self.whitespace, self.depth, self.recursion, self.strict)

    def expression(self, bounds: Bounds) -> Expression:
        value = compile_schema(self.schema, self.reading, bounds)
        if not self.around:
            return value
        around = Leaf(compile_regex(self.around, bounds))
        return concat(around, value, around)


@dataclasses.dataclass(frozen=True)
class Rules(Part):
    """A GBNF grammar, as in `from_gbnf`."""

    text: str  # GBNF rules
    # Depth to which a rule may contain itself, unless it is a repetition.
    recursion: int = RECURSION

    def expression(self, bounds: Bounds) -> Expression:
        del bounds
        return compile_gbnf(self.text, self.recursion)


@dataclasses.dataclass(frozen=True)
class Until(Part):
    """Free text up to and including the first occurrence of a mark."""

    mark: str  # at least one character, such as "</think>"
    # Accept strings without the mark, and without the parts after it.
    is_optional: bool = False

    def expression(self, bounds: Bounds) -> Expression:
        """Return the strings with exactly one mark, at their end."""
        mark = self._quoted()
        ending = compile_regex(f"(?:{ANYTHING}){mark}", bounds)
        too_far = compile_regex(rf"(?:{ANYTHING}){mark}(?s:.)(?:{ANYTHING})", bounds)
        return Leaf(subtract(ending, too_far, bounds))

    def without(self, bounds: Bounds) -> Expression:
        """Return the strings without the mark."""
        anything = compile_regex(ANYTHING, bounds)
        tagged = compile_regex(self._quoted(), bounds, is_search=True)
        return Leaf(subtract(anything, tagged, bounds))

    def _quoted(self) -> str:
        if not self.mark:
            raise NoText("mark is empty; pass at least one character")
        return re.escape(self.mark)


@dataclasses.dataclass(frozen=True)
class Either(Part):
    """A choice between several parts."""

    # Each a `Part` or a string, or a list of them to concatenate.
    parts: Sequence["Part | str | Sequence[Part | str]"]

    def __post_init__(self) -> None:
        parts = read_list("parts", self.parts, Part | str | Sequence)
        object.__setattr__(self, "parts", parts)

    def expression(self, bounds: Bounds) -> Expression:
        return Choice([join_parts(_listed(part), bounds) for part in self.parts])

    def cache_key(self) -> list[Any]:
        return ["Either", [list_cache_keys(_listed(part)) for part in self.parts]]


def read_list(name: str, given: Any, kind: Any) -> tuple[Any, ...]:
    """Return a list's items; raise for a single string, a list of characters."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        shown = f"{given!r:.60}"
        raise UsageError(f"{name} must be a list, got {shown}; pass [{shown}]")
    found = tuple(given)
    for each in found:
        if not isinstance(each, kind) or isinstance(each, bytes):
            raise UsageError(f"{name} must be a list of strings, got item {each!r:.60}")
    return found


def _listed(part: Part | str | Sequence[Part | str]) -> Sequence[Part | str]:
    return [part] if isinstance(part, Part | str) else part


def join_parts(parts: Sequence[Part | str], bounds: Bounds) -> Expression:
    """Return the concatenation of parts."""
    found: Expression = Literal(b"")
    for part in reversed(parts):
        if isinstance(part, str):
            part = Choices([part])
        found = Concatenation([part.expression(bounds), found])
        if isinstance(part, Until) and part.is_optional:
            found = Choice([part.without(bounds), found])
    return found


def list_cache_keys(parts: Sequence[Part | str]) -> list[Any]:
    """Return the inputs of the parts as JSON, for the cache key."""
    return [part if isinstance(part, str) else part.cache_key() for part in parts]
