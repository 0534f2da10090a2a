"""What languages are put together from: values that say which texts may stand there."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
from jkv.grammar.products import subtract
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.schema.strings import ANYTHING

WHITESPACE = "[ ]?"
DEPTH, RECURSION = 3, 2


class Part:
    """A language: one of the classes below, or a text that stands as it is."""

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language over bytes; see the class for what it raises."""
        raise NotImplementedError

    def asked(self) -> Any:
        """Return what the language depends on, of JSON."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Choices(Part):
    """Texts to choose from.

    Attributes:
      texts: at least one; `NoText` is raised for none.
    """

    texts: Sequence[str]

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language."""
        del bounds
        if not self.texts:
            raise NoText("there are no texts to choose from")
        return Choice([Literal(text.encode()) for text in self.texts])

    def asked(self) -> Any:
        """Return what it depends on."""
        return ["choices", list(self.texts)]


@dataclasses.dataclass(frozen=True)
class Pattern(Part):
    """What matches a regular expression from end to end, as `from_regex` has it.

    Attributes:
      pattern: in the syntax of Python's `re`.
    """

    pattern: str

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language."""
        return Leaf(compile_regex(self.pattern, bounds))

    def asked(self) -> Any:
        """Return what it depends on."""
        return ["regex", self.pattern]


@dataclasses.dataclass(frozen=True)
class Schema(Part):
    """The JSON values that a schema describes, as `from_json_schema` has it.

    Attributes:
      schema: of JSON Schema.
      whitespace: pattern of what may stand around brackets, commas and colons.
      depth: levels of arrays and objects in a value of which the schema says nothing.
      recursion: how often a schema that refers to itself may stand in itself.
      strict: whether unknown keywords and formats are errors.
      around: pattern of what may stand before the value and behind it.
    """

    schema: Mapping[str, Any] | bool
    whitespace: str = WHITESPACE
    depth: int = DEPTH
    recursion: int = RECURSION
    strict: bool = False
    around: str = ""

    @property
    def reading(self) -> Reading:
        """How the schema is read."""
        return Reading(self.whitespace, self.depth, self.recursion, self.strict)

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language."""
        value = compile_schema(self.schema, self.reading, bounds)
        if not self.around:
            return value
        around = Leaf(compile_regex(self.around, bounds))
        return concat(around, value, around)

    def asked(self) -> Any:
        """Return what it depends on."""
        around = [self.around] if self.around else []
        return ["schema", self.schema, *self.reading, *around]


@dataclasses.dataclass(frozen=True)
class Rules(Part):
    """What a grammar of llama.cpp's notation derives, as `from_gbnf` has it.

    Attributes:
      text: the rules.
      recursion: how often a rule may stand in itself, where that is no repetition.
    """

    text: str
    recursion: int = RECURSION

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language."""
        del bounds
        return compile_gbnf(self.text, self.recursion)

    def asked(self) -> Any:
        """Return what it depends on."""
        return ["gbnf", self.text, self.recursion]


@dataclasses.dataclass(frozen=True)
class Until(Part):
    """Free text up to a mark, the mark included, which stands in it nowhere else.

    Attributes:
      mark: at least one character, such as "</think>".
      is_optional: whether a text may end without the mark, and what follows it.
    """

    mark: str
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

    def asked(self) -> Any:
        """Return what it depends on."""
        return ["until", self.mark, self.is_optional]

    def _quoted(self) -> str:
        if not self.mark:
            raise NoText("a mark has a character at least")
        return re.escape(self.mark)


@dataclasses.dataclass(frozen=True)
class Either(Part):
    """A text of any of several languages.

    Attributes:
      parts: each a value of this module or a text, or a list of those that follow each
        other.
    """

    parts: Sequence["Part | str | Sequence[Part | str]"]

    def expression(self, bounds: Bounds) -> Expression:
        """Return the language."""
        return Choice([join_parts(_listed(part), bounds) for part in self.parts])

    def asked(self) -> Any:
        """Return what it depends on."""
        return ["either", [list_asked(_listed(part)) for part in self.parts]]


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
