"""What languages are put together from: values that say which texts may stand there."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jkv.grammar.automaton import subtract
from jkv.grammar.bounds import Bounds
from jkv.grammar.errors import NoText
from jkv.grammar.expressions import (
    Choice,
    Concatenation,
    Expression,
    Leaf,
    Literal,
    concat,
)
from jkv.grammar.gbnf import compile_gbnf
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.schema.strings import ANYTHING
from jkv.status import UsageError

WHITESPACE = "[ ]?"
DEPTH, RECURSION = 3, 2


class Part:
    """A language: one of the classes below, or a text that stands as it is."""

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language over bytes; see the class for what it raises."""
        raise NotImplementedError

    def asked(self) -> list[Any]:
        """Return what the language depends on, of JSON."""
        return [type(self).__name__, *vars(self).values()]


@dataclasses.dataclass(frozen=True)
class Choices(Part):
    """Texts to choose from."""

    texts: Sequence[str]  # at least one; `NoText` is raised for none

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", read_list("texts", self.texts, str))

    def expression(self, bounds: Bounds) -> Expression:
        del bounds
        if not self.texts:
            raise NoText("there are no texts to choose from")
        return Choice([Literal(text.encode()) for text in self.texts])


@dataclasses.dataclass(frozen=True)
class Pattern(Part):
    """What matches a regular expression from end to end, as `from_regex` has it."""

    pattern: str  # in the syntax of Python's `re`

    def expression(self, bounds: Bounds) -> Expression:
        return Leaf(compile_regex(self.pattern, bounds))


@dataclasses.dataclass(frozen=True)
class Schema(Part):
    """The JSON values that a schema describes, as `from_json_schema` has it."""

    schema: Mapping[str, Any] | bool  # of JSON Schema
    # Pattern of what may stand around brackets, commas and colons.
    whitespace: str = WHITESPACE
    # Levels of arrays and objects in a value of which the schema says nothing.
    depth: int = DEPTH
    # How often a schema that refers to itself may stand in itself.
    recursion: int = RECURSION
    strict: bool = False  # whether unknown keywords and formats are errors
    around: str = ""  # pattern of what may stand before the value and behind it

    @property
    def reading(self) -> Reading:
        """How the schema is read."""
        return Reading(self.whitespace, self.depth, self.recursion, self.strict)

    def expression(self, bounds: Bounds) -> Expression:
        value = compile_schema(self.schema, self.reading, bounds)
        if not self.around:
            return value
        around = Leaf(compile_regex(self.around, bounds))
        return concat(around, value, around)


@dataclasses.dataclass(frozen=True)
class Rules(Part):
    """What a grammar of llama.cpp's notation derives, as `from_gbnf` has it."""

    text: str  # the rules
    # How often a rule may stand in itself, where that is no repetition.
    recursion: int = RECURSION

    def expression(self, bounds: Bounds) -> Expression:
        del bounds
        return compile_gbnf(self.text, self.recursion)


@dataclasses.dataclass(frozen=True)
class Until(Part):
    """Free text up to a mark, the mark included, which stands in it nowhere else."""

    mark: str  # at least one character, such as "</think>"
    # Whether a text may end without the mark, and what follows it.
    is_optional: bool = False

    def expression(self, bounds: Bounds) -> Expression:
        """Return the texts that end with the mark."""
        mark = self._quoted()
        ending = compile_regex(f"(?:{ANYTHING}){mark}", bounds)
        too_far = compile_regex(rf"(?:{ANYTHING}){mark}(?s:.)(?:{ANYTHING})", bounds)
        return Leaf(subtract(ending, too_far, bounds))

    def without(self, bounds: Bounds) -> Expression:
        """Return the texts that do not have the mark."""
        anything = compile_regex(ANYTHING, bounds)
        tagged = compile_regex(self._quoted(), bounds, is_search=True)
        return Leaf(subtract(anything, tagged, bounds))

    def _quoted(self) -> str:
        if not self.mark:
            raise NoText("a mark has a character at least")
        return re.escape(self.mark)


@dataclasses.dataclass(frozen=True)
class Either(Part):
    """A text of any of several languages."""

    # Each a value of this module or a text, or a list of those that follow each other.
    parts: Sequence["Part | str | Sequence[Part | str]"]

    def __post_init__(self) -> None:
        parts = read_list("parts", self.parts, Part | str | Sequence)
        object.__setattr__(self, "parts", parts)

    def expression(self, bounds: Bounds) -> Expression:
        return Choice([join_parts(_listed(part), bounds) for part in self.parts])

    def asked(self) -> list[Any]:
        return ["Either", [list_asked(_listed(part)) for part in self.parts]]


def read_list(name: str, given: Any, kind: Any) -> tuple[Any, ...]:
    """Return what a list holds; one text would be a list of characters."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        shown = f"{given!r:.60}"
        raise UsageError(f"{name} must be a list, got {shown}; give [{shown}]")
    found = tuple(given)
    for each in found:
        if not isinstance(each, kind) or isinstance(each, bytes):
            raise UsageError(f"{name} must be a list of texts, got {each!r:.60} in it")
    return found


def _listed(part: Part | str | Sequence[Part | str]) -> Sequence[Part | str]:
    return [part] if isinstance(part, Part | str) else part


def join_parts(parts: Sequence[Part | str], bounds: Bounds) -> Expression:
    """Return the language of parts that follow each other."""
    found: Expression = Literal(b"")
    for part in reversed(parts):
        if isinstance(part, str):
            part = Choices([part])
        found = Concatenation([part.expression(bounds), found])
        if isinstance(part, Until) and part.is_optional:
            found = Choice([part.without(bounds), found])
    return found


def list_asked(parts: Sequence[Part | str]) -> list[Any]:
    """Return what a language of parts depends on, of JSON."""
    return [part if isinstance(part, str) else part.asked() for part in parts]
