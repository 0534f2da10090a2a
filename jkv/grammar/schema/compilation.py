"""From a JSON schema to the expression of its texts.

Where a schema leaves open what else may be there, texts have nothing else: an object
has no other properties, a tuple no other items. Properties stand in the order in which
the schema names them.
"""

import json
from collections.abc import Mapping
from typing import Any

from jkv.grammar.automaton import Automaton
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
from jkv.grammar.expressions import Choice, Expression, Leaf, Literal
from jkv.grammar.products import intersect, is_empty
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.containers import (
    ContainerMaker,
    Punctuation,
    array_expression,
    object_expression,
)
from jkv.grammar.schema.keywords import OF_TYPE, constraints_of, types_of
from jkv.grammar.schema.merging import merge
from jkv.grammar.schema.numbers import number_expression
from jkv.grammar.schema.references import Reference, resolve
from jkv.grammar.schema.strings import literal_string, string_expression

Words = Mapping[str, Any]  # the keywords of a schema
SCALARS = "null", "boolean", "number", "string"


class SchemaCompiler:
    """What all parts of a schema share while they are compiled."""

    def __init__(
        self, root: Any, *, whitespace: str, depth: int, max_bytes: int
    ) -> None:
        """Take the whole schema, in which references are looked up."""
        self.root, self.depth, self.max_bytes = root, depth, max_bytes
        self.marks = Punctuation(Leaf(compile_regex(whitespace, max_bytes)))
        self._free: dict[int, Expression] = {}

    def compile(self, schema: Any, open_references: tuple[str, ...] = ()) -> Expression:
        """Return the texts of a schema.

        Args:
          schema: of JSON Schema, a mapping or a boolean.
          open_references: that this one stands in.

        Raises:
          Unsupported: recursion, or a keyword that is not served.
        """
        words, open_references = self._flatten(schema, open_references)
        return self._compile_flat(words, open_references)

    def _flatten(
        self, schema: Any, open_references: tuple[str, ...]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Put the schemas of `$ref` and `allOf` into the one that they stand in."""
        words = constraints_of(schema)
        parts = list(words.pop("allOf", ()))
        if "$ref" in words:
            parts.insert(0, Reference(words.pop("$ref")))
        for part in parts:
            if isinstance(part, Reference):
                if part.pointer in open_references:
                    raise Unsupported(f"recursion by $ref {part.pointer!r}")
                open_references = (*open_references, part.pointer)
                part = resolve(self.root, part.pointer)
            inner, open_references = self._flatten(part, open_references)
            words = merge(inner, words) if inner else words
        return words, open_references

    def _compile_flat(self, words: dict[str, Any], refs: tuple[str, ...]) -> Expression:
        for name in ("anyOf", "oneOf"):
            if name in words:
                return self._compile_branches(name, words, refs)
        if "const" in words or "enum" in words:
            return self._compile_values(words, refs)
        if not words:
            return self._free_value(self.depth)
        return Choice([self._compile_type(t, words, refs) for t in types_of(words)])

    def _compile_branches(
        self, name: str, words: dict[str, Any], refs: tuple[str, ...]
    ) -> Expression:
        """Return the texts of any branch, each with what stands beside them."""
        beside = {word: value for word, value in words.items() if word != name}
        branches = []
        for branch in words[name]:
            inner, inner_refs = self._flatten(branch, refs)
            both = merge(beside, inner) if beside else inner
            branches.append(self._compile_flat(both, inner_refs))
        if name == "oneOf":
            self._check_disjoint(branches)
        return Choice(branches)

    def _check_disjoint(self, branches: list[Expression]) -> None:
        automata = [self.automaton(branch) for branch in branches]
        for place, one in enumerate(automata):
            for other in automata[:place]:
                if not is_empty(intersect(one, other, max_bytes=self.max_bytes)):
                    raise Unsupported(
                        "'oneOf' with a text of two branches ('anyOf' is served)"
                    )

    def _compile_values(
        self, words: dict[str, Any], refs: tuple[str, ...]
    ) -> Expression:
        """Return the texts of listed values that hold for what stands beside them."""
        values = list(words["enum"]) if "enum" in words else [words["const"]]
        if "const" in words:
            values = [value for value in values if value == words["const"]]
        beside = {w: v for w, v in words.items() if w not in ("enum", "const")}
        if beside:
            rest = self.automaton(self._compile_flat(beside, refs))
            values = [
                value for value in values if rest.matches(_compact(value).encode())
            ]
        return Choice([self._value(value) for value in values])

    def _value(self, value: Any) -> Expression:
        """Return the texts of one value."""
        if isinstance(value, str):
            return literal_string(value)
        marks = self.marks
        if isinstance(value, list):
            items = [(self._value(item), True) for item in value]
            return marks.array(marks.separated(items))
        if isinstance(value, Mapping):
            entries = [
                (marks.property(key, self._value(part)), True)
                for key, part in value.items()
            ]
            return marks.object(marks.separated(entries))
        return Literal(_compact(value).encode())

    def _compile_type(
        self, kind: str, words: Words, refs: tuple[str, ...]
    ) -> Expression:
        is_number = kind in ("integer", "number")
        own = OF_TYPE.get("number" if is_number else kind, set())
        said = {word: value for word, value in words.items() if word in own}
        if is_number:
            is_integer = kind == "integer"
            return number_expression(
                said, is_integer=is_integer, max_bytes=self.max_bytes
            )
        match kind:
            case "null":
                return Literal(b"null")
            case "boolean":
                return Choice([Literal(b"true"), Literal(b"false")])
            case "string":
                return string_expression(said, self.max_bytes)
            case "array":
                return self._container(array_expression, said, refs)
        return self._container(object_expression, said, refs)

    def _container(
        self, make: ContainerMaker, words: Words, refs: tuple[str, ...]
    ) -> Expression:
        def compile_part(schema: Any) -> Expression:
            return self.compile(schema, refs)

        return make(words, compile_part, self.marks, self.max_bytes)

    def _free_value(self, depth: int) -> Expression:
        """Return any JSON of so many levels of arrays and objects."""
        if depth not in self._free:
            parts = [self._compile_type(t, {}, ()) for t in SCALARS]
            if depth:
                inner = self._free_value(depth - 1)
                for make in (array_expression, object_expression):
                    parts.append(make({}, lambda _: inner, self.marks, self.max_bytes))
            self._free[depth] = Leaf(self.automaton(Choice(parts)))
        return self._free[depth]

    def automaton(self, expression: Expression) -> Automaton:
        """Return the automaton of an expression, within the bounds of this compiler."""
        return determinize(expression, max_bytes=self.max_bytes)


def _compact(value: Any) -> str:
    """Return JSON without white space; a decimal that is whole is written so."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
