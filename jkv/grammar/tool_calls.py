"""Structured output for tool calls: free text with tagged JSON calls.

A call has the format of Hermes and Qwen, `<tool_call>{"name": ..., "arguments":
...}</tool_call>`; text without an opening tag is free.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

from jkv.arguments import explains_arguments
from jkv.grammar.automaton import Choice, Expression, Leaf, Literal, Repeat, concat
from jkv.grammar.bounds import Bounds, Timeout
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import NoText, TooLarge, Unsupported
from jkv.grammar.grammar import Grammar
from jkv.grammar.kept_files import Limits
from jkv.grammar.languages import MAX_BYTES, concatenate
from jkv.grammar.parts import DEPTH, RECURSION, WHITESPACE, Part, Until
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.schema.strings import Punctuation, literal_string
from jkv.grammar.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class _Calls(Part):
    """The language of `from_tools`."""

    functions: Sequence[Mapping[str, Any]]
    choice: str
    is_single: bool
    begin: str
    end: str
    any_json: Sequence[str]  # functions with any JSON object as arguments
    answer: Mapping[str, Any] | bool | None
    reading: Reading

    def expression(self, bounds: Bounds) -> Expression:
        calls = [self._call(function, bounds) for function in self.functions]
        line = Repeat(Literal(b"\n"), 0, 1)
        begin, end = self.begin.encode(), self.end.encode()
        inner = concat(begin, line, Choice(calls), line, end)
        if self.choice == "auto" and self.answer is None:
            free = Until(self.begin).without(bounds)
            later = Repeat(concat(inner, free), 0, 1 if self.is_single else None)
            return concat(free, later)
        more = Repeat(concat(line, inner), 0, 0 if self.is_single else None)
        texts = concat(inner, more)
        if self.choice == "auto":
            return Choice([texts, compile_schema(self.answer, self.reading, bounds)])
        return texts

    def _call(self, function: Mapping[str, Any], bounds: Bounds) -> Expression:
        """Return the calls of one tool, objects with its name and arguments."""
        is_free = function["name"] in self.any_json
        schema = {"type": "object"} if is_free else _schema_of(function)
        try:
            texts = compile_schema(schema, self.reading, bounds)
        except (Unsupported, TooLarge) as error:
            message = f"tool {function['name']!r}: {error}"
            raise type(error)(message) from error
        marks = Punctuation(Leaf(compile_regex(self.reading.whitespace, bounds)))
        name = marks.property("name", literal_string(function["name"]))
        arguments = marks.property("arguments", texts)
        return marks.object(marks.separated([(name, True), (arguments, True)]))


@explains_arguments
def from_tools(
    tools: Sequence[Mapping[str, Any]],
    vocabulary: Vocabulary,
    *,
    choice: str = "auto",
    is_parallel: bool = True,
    begin: str = "<tool_call>",
    end: str = "</tool_call>",
    whitespace: str = WHITESPACE,
    depth: int = DEPTH,
    recursion: int = RECURSION,
    strict: bool = False,
    free_arguments: Collection[str] = (),
    answer: Mapping[str, Any] | bool | None = None,
    **limits: Unpack[Limits],
) -> Grammar:
    r"""Compile a grammar of valid tool calls.

    A call is an object of `name` and `arguments`, the latter constrained by the tool's
    schema, between two tags with optional newlines. Tags are spelled by ordinary
    tokens: a special token for a tag is not allowed, unless the vocabulary is made with
    its bytes.

    Args:
      tools: each with `name` and `parameters` (a JSON schema), or with these inside
        `function`, as in the OpenAI API.
      vocabulary: of the model.
      choice: "auto": free text with any number of calls, or none; "required": calls and
        nothing else; or the name of a tool, for one call of it.
      is_parallel: allow several calls.
      begin: opening tag; free text does not contain it.
      end: closing tag.
      whitespace: as in `from_json_schema`.
      depth: as in `from_json_schema`.
      recursion: as in `from_json_schema`.
      strict: as in `from_json_schema`.
      free_arguments: names of tools with unconstrained arguments, any JSON object, such
        as the tools in the result of `find_refused_tools`.
      answer: with choice "auto", a JSON schema that replaces the free text: the
        completion is either JSON of this schema or calls.
      **limits: `max_bytes`, `timeout` and `folder`, as in `concatenate`.

    Raises:
      NoText: no tool is named `choice` (a ValueError).
      ValueError: a suffix of `begin` is also its prefix, so that free text and a call
        could overlap.
      Unsupported: a schema uses an unsupported keyword; the message has its place (a
        ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_tools
      >>> tokens = [bytes([byte]) for byte in range(256)]
      >>> vocabulary = Vocabulary([*tokens, None], end_tokens=[256])
      >>> clock = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
      >>> from_tools([clock], vocabulary, choice="clock").num_states
      66
    """
    if any(begin.startswith(begin[i:]) for i in range(1, len(begin))):
        raise ValueError(
            f"begin must not overlap itself, got {begin!r}; use another tag"
        )
    functions = _functions(tools)
    if choice not in ("auto", "required"):
        functions = [one for one in functions if one["name"] == choice]
    if not functions:
        raise NoText(f"choice {choice!r} matches no tool in tools")
    is_single = not is_parallel or choice not in ("auto", "required")
    any_json = sorted({one["name"] for one in functions} & {*free_arguments})
    reading = Reading(whitespace, depth, recursion, strict)
    calls = _Calls(functions, choice, is_single, begin, end, any_json, answer, reading)
    return concatenate([calls], vocabulary, **limits)


@explains_arguments
def find_refused_tools(
    tools: Sequence[Mapping[str, Any]],
    *,
    recursion: int = RECURSION,
    strict: bool = False,
    max_bytes: int = MAX_BYTES,
    timeout: Timeout = None,
) -> dict[str, ValueError]:
    """Return the tools with unsupported argument schemas, each with its error.

    Pass their names to `from_tools(free_arguments=)`, and report the errors to the
    client. No vocabulary is needed; only `from_tools` detects a grammar that is too
    large for one.

    Args:
      tools: as in `from_tools`.
      recursion: as in `from_json_schema`.
      strict: as in `from_json_schema`.
      max_bytes: for each tool.
      timeout: for each tool.

    Raises:
      ValueError: a tool has no name.

    Example:
      >>> from jkv.grammar import find_refused_tools
      >>> lookup = {"name": "lookup", "parameters": {"$ref": "https://example.com/a"}}
      >>> print(find_refused_tools([lookup])["lookup"])
      $ref 'https://example.com/a' at #: only references within the schema are supported
    """
    reading, found = Reading(WHITESPACE, DEPTH, recursion, strict), {}
    for function in _functions(tools):
        bounds = Bounds(max_bytes, timeout)
        try:
            texts = compile_schema(_schema_of(function), reading, bounds)
            if determinize(texts, bounds).is_empty():
                raise NoText("no value is valid for its schema")
        except ValueError as error:
            found[function["name"]] = error
    return found


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    functions = [tool.get("function", tool) for tool in tools]
    if not all(isinstance(one.get("name"), str) for one in functions):
        raise ValueError("tools must each have a name, a string")
    return functions


def _schema_of(function: Mapping[str, Any]) -> Any:
    return function.get("parameters", {"type": "object", "properties": {}})
