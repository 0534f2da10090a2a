"""Grammars of calls of tools: text, and calls between tags in it.

A call is written as Hermes, Qwen and others do, `<tool_call>{"name": ..., "arguments":
...}</tool_call>`; a text that has no opening tag in it is free.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

from jkv.arguments import explains_arguments
from jkv.grammar.bounds import Bounds, Timeout
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import NoText, TooLarge, Unsupported
from jkv.grammar.expressions import Choice, Expression, Leaf, Literal, Repeat, concat
from jkv.grammar.grammar import Grammar
from jkv.grammar.kept_files import Limits
from jkv.grammar.languages import MAX_BYTES, concatenate
from jkv.grammar.parts import DEPTH, RECURSION, WHITESPACE, Part, Until
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.schema.punctuation import Punctuation
from jkv.grammar.schema.strings import literal_string
from jkv.grammar.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class _Calls(Part):
    """Texts with calls in them, as `from_tools` has it."""

    functions: Sequence[Mapping[str, Any]]
    choice: str
    is_single: bool
    begin: str
    end: str
    any_json: Sequence[str]  # names of functions whose arguments are any JSON object
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
        """Return the calls of one tool, objects of its name and its arguments."""
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
    r"""Make a grammar of texts in which tools are called rightly.

    A call is an object of `name` and `arguments`, the latter after the tool's schema,
    between two tags; around it may be a line's end. Tags are spelled by tokens of the
    vocabulary: a special token that stands for one is not allowed, since special tokens
    spell nothing, unless the vocabulary is made with its bytes.

    Args:
      tools: each with `name` and `parameters` (a JSON schema), or with these inside of
        `function`, as the API of OpenAI has it.
      vocabulary: of the model.
      choice: "auto": free text with any number of calls in it, one after the other or
        none; "required": calls and nothing else; or the name of a tool, one call of it.
      is_parallel: whether there may be several calls.
      begin: the tag before a call; free text does not have it.
      end: the tag behind a call.
      whitespace: as `from_json_schema` has it.
      depth: as `from_json_schema` has it.
      recursion: as `from_json_schema` has it.
      strict: as `from_json_schema` has it.
      free_arguments: names of tools whose arguments are any JSON object, whatever their
        schemas say: those that `find_refused_tools` has found.
      answer: a JSON schema, for "auto": a text is then JSON that it describes, or calls
        and nothing else.
      **limits: `max_bytes`, `timeout` and `folder`, as `concatenate` has them.

    Raises:
      NoText: no tool is called `choice` (a ValueError).
      ValueError: `begin` ends as it begins, so that it may stand in free text and a
        call at once.
      Unsupported: a schema uses what is not served, at which place (a ValueError).
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
        raise ValueError(f"begin, {begin!r}, ends as it begins: take another tag")
    functions = _functions(tools)
    if choice not in ("auto", "required"):
        functions = [one for one in functions if one["name"] == choice]
    if not functions:
        raise NoText(f"there is no tool to call; choice is {choice!r}")
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
    """Return the tools whose arguments' schemas cannot be served, each with the reason.

    Give them to `from_tools(free_arguments=)`, and say so to whoever asked for them.
    No vocabulary is needed; that a grammar is too large for one, `from_tools` tells.

    Args:
      tools: as `from_tools` has them.
      recursion: as `from_json_schema` has it.
      strict: as `from_json_schema` has it.
      max_bytes: for each tool.
      timeout: for each tool.

    Raises:
      ValueError: one of the tools has no name.

    Example:
      >>> from jkv.grammar import find_refused_tools
      >>> lookup = {"name": "lookup", "parameters": {"$ref": "https://example.com/a"}}
      >>> print(find_refused_tools([lookup])["lookup"])
      $ref 'https://example.com/a' at #: only places of this schema are served
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
        raise ValueError("a tool needs a name, a string")
    return functions


def _schema_of(function: Mapping[str, Any]) -> Any:
    return function.get("parameters", {"type": "object", "properties": {}})
