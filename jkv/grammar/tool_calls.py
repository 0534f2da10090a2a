"""Grammars of calls of tools: text, and calls between tags in it.

A call is written as Hermes, Qwen and others do, `<tool_call>{"name": ..., "arguments":
...}</tool_call>`; a text that has no opening tag in it is free.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jkv.grammar.errors import NoText
from jkv.grammar.expressions import (
    Choice,
    Expression,
    Leaf,
    Literal,
    Repeat,
    concat,
)
from jkv.grammar.grammar import Grammar
from jkv.grammar.json_texts import DEPTH, WHITESPACE
from jkv.grammar.kept_files import Folder, keep
from jkv.grammar.languages import MAX_BYTES, compile_expression
from jkv.grammar.products import subtract
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.compilation import SchemaCompiler
from jkv.grammar.schema.strings import ANYTHING, literal_string
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
    max_bytes: int = MAX_BYTES,
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
      max_bytes: as `from_json_schema` has it.
      folder: as `from_json_schema` has it.

    Raises:
      NoText: no tool is called `choice` (a ValueError).
      ValueError: `begin` ends as it begins, so that it may stand in free text and a
        call at once.
      Unsupported: a schema uses a keyword that is not served (a ValueError).
      TooLarge: `max_bytes` is exceeded (a ValueError).

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
    functions = [tool.get("function", tool) for tool in tools]
    if choice not in ("auto", "required"):
        functions = [one for one in functions if one["name"] == choice]
    if not functions:
        raise NoText(f"there is no tool to call; choice is {choice!r}")
    is_single = not is_parallel or choice not in ("auto", "required")

    def make() -> Grammar:
        calls = [_call(one, whitespace, depth, max_bytes) for one in functions]
        line = Repeat(Literal(b"\n"), 0, 1)
        inner = concat(begin.encode(), line, Choice(calls), line, end.encode())
        texts = _with_text(inner, begin, is_single, max_bytes)
        if choice != "auto":
            texts = concat(
                inner, Repeat(concat(line, inner), 0, 0 if is_single else None)
            )
        return compile_expression(texts, vocabulary, max_bytes=max_bytes)

    asked = ["tools", functions, choice, is_single, begin, end, whitespace, depth]
    return keep(folder, vocabulary, asked, make)


def _call(
    function: Mapping[str, Any], whitespace: str, depth: int, max_bytes: int
) -> Expression:
    """Return the calls of one tool, objects of its name and its arguments."""
    schema = function.get("parameters", {"type": "object", "properties": {}})
    compiler = SchemaCompiler(
        schema, whitespace=whitespace, depth=depth, max_bytes=max_bytes
    )
    marks = compiler.marks
    name = marks.property("name", literal_string(function["name"]))
    arguments = marks.property("arguments", compiler.compile(schema))
    return marks.object(marks.separated([(name, True), (arguments, True)]))


def _with_text(
    call: Expression, begin: str, is_single: bool, max_bytes: int
) -> Expression:
    """Return free texts with calls in them."""
    tagged = compile_regex(re.escape(begin), max_bytes, is_search=True)
    anything = compile_regex(ANYTHING, max_bytes)
    free = Leaf(subtract(anything, tagged, max_bytes=max_bytes))
    return concat(free, Repeat(concat(call, free), 0, 1 if is_single else None))
