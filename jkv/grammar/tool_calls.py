"""Grammars of calls of tools: text, and calls between tags in it.

A call is written as Hermes, Qwen and others do, `<tool_call>{"name": ..., "arguments":
...}</tool_call>`; a text that has no opening tag in it is free.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jkv.grammar.bounds import Bounds, Timeout
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import NoText, TooLarge, Unsupported
from jkv.grammar.expressions import (
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    concat,
)
from jkv.grammar.grammar import Grammar
from jkv.grammar.kept_files import Folder, keep
from jkv.grammar.languages import MAX_BYTES, compile_expression
from jkv.grammar.parts import DEPTH, RECURSION, WHITESPACE, Until
from jkv.grammar.products import is_empty
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.schema.punctuation import Punctuation
from jkv.grammar.schema.strings import literal_string
from jkv.grammar.vocabulary import Vocabulary


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
    max_bytes: int = MAX_BYTES,
    timeout: Timeout = None,
    folder: Folder = None,
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
      max_bytes: as `from_json_schema` has it.
      timeout: as `from_json_schema` has it.
      folder: as `from_json_schema` has it.

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

    def make() -> Grammar:
        bounds = Bounds(max_bytes, timeout)
        calls = [
            _call(one, reading, bounds, one["name"] in any_json) for one in functions
        ]
        line = Repeat(Literal(b"\n"), 0, 1)
        inner = concat(begin.encode(), line, Choice(calls), line, end.encode())
        more = Repeat(concat(line, inner), 0, 0 if is_single else None)
        texts: Expression = concat(inner, more)
        if choice == "auto" and answer is None:
            free = Until(begin).without(bounds)
            later = Repeat(concat(inner, free), 0, 1 if is_single else None)
            texts = concat(free, later)
        elif choice == "auto":
            texts = Choice([texts, compile_schema(answer, reading, bounds)])
        return compile_expression(texts, vocabulary, bounds)

    reading = Reading(whitespace, depth, recursion, strict)
    asked = [
        "tools",
        functions,
        choice,
        is_single,
        begin,
        end,
        any_json,
        answer,
        *reading,
    ]
    return keep(folder, vocabulary, asked, make)


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
            if is_empty(determinize(texts, bounds)):
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


def _call(
    function: Mapping[str, Any], reading: Reading, bounds: Bounds, is_free: bool
) -> Expression:
    """Return the calls of one tool, objects of its name and its arguments."""
    schema = {"type": "object"} if is_free else _schema_of(function)
    try:
        texts = compile_schema(schema, reading, bounds)
    except (Unsupported, TooLarge) as error:
        message = f"tool {function['name']!r}: {error}"
        raise type(error)(message) from error
    marks = Punctuation(Leaf(compile_regex(reading.whitespace, bounds)))
    name = marks.property("name", literal_string(function["name"]))
    arguments = marks.property("arguments", texts)
    return marks.object(marks.separated([(name, True), (arguments, True)]))
