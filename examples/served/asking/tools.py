"""Tools of a chat, and the constraints on their calls.

A grammar allows free text and tagged calls, or calls only, with arguments that follow
each tool's schema (`jkv.grammar.from_tools`).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..mistakes import Refused
from ..values import read_flag, refuse_unknown
from .languages import Language, describe

MOST_TOOLS = 128  # as in the API
NAME = re.compile("[a-zA-Z0-9_.-]{1,128}")
OF_A_FUNCTION = {"name", "description", "parameters", "strict", "cache_control"}


class Tools(NamedTuple):
    """Tools of a chat."""

    listed: list[dict[str, Any]]  # unchanged, for the template
    language: Language | None  # None if calls are disabled


def read_tools(body: Mapping[str, Any], tags: tuple[str, str]) -> Tools | None:
    """Return the tools of a body, or None.

    Args:
        body: the fields.
        tags: the tags before and after a call.

    Raises:
        Refused: for invalid tools or an invalid choice.
    """
    is_parallel = read_flag(body, "parallel_tool_calls", True)
    listed = body.get("tools")
    choice = body.get("tool_choice")
    if listed is None or listed == []:
        if choice not in (None, "none", "auto"):
            raise Refused("tool_choice requires tools", "tool_choice")
        return None
    if not isinstance(listed, list) or len(listed) > MOST_TOOLS:
        raise Refused(f"tools must be a list of at most {MOST_TOOLS} tools", "tools")
    functions = {each["name"]: each for each in map(_read_tool, listed)}
    if len(functions) < len(listed):
        raise Refused("tools must have different names", "tools")
    choice = "auto" if choice is None else choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        functions, choice = _read_allowed(choice, functions)
    if choice == "none":
        return Tools(listed, None)
    if choice not in ("auto", "required"):
        name = _read_name(choice)
        if name not in functions:
            raise Refused(f"tool_choice: tools has no {name!r}", "tool_choice")
        functions, choice, is_parallel = {name: functions[name]}, "required", False
    described = {
        "tools": list(functions.values()),
        "choice": choice,
        "is_parallel": is_parallel,
        "begin": tags[0],
        "end": tags[1],
    }
    return Tools(listed, describe("tools", described, "tools"))


def _read_tool(tool: Any) -> dict[str, Any]:
    """Return the name and parameters of a tool."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise Refused("a tool must be an object of type function", "tools")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refused(
            "a tool must have a function with a name of 1 to 128 letters, digits, _, . "
            "or -",
            "tools",
        )
    unknown = [
        *(tool.keys() - {"type", "function", "cache_control"}),
        *(function.keys() - OF_A_FUNCTION),
    ]
    if unknown:
        raise Refused(
            f"{str(unknown[0])[:60]!r} of the tool {name} is not supported; omit it",
            "tools",
        )
    is_strict = read_flag(function, "strict", False)
    if not isinstance(function.get("description"), str | None):
        raise Refused(f"the description of the tool {name} must be a string", "tools")
    # Supported schemas are always enforced; strict forbids the fallback.
    strict = {"strict": True} if is_strict else {}
    return {"name": name, "parameters": _read_parameters(name, function)} | strict


def _read_parameters(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise Refused(
            f"the parameters of the tool {name} must be a schema of type object",
            "tools",
        )
    return {"type": "object", **schema}


def _read_name(choice: Any) -> str:
    """Return the name of the tool in a `tool_choice`."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise Refused(
            "tool_choice must be none, auto, required, an object of type function "
            "with a named function, or one of type allowed_tools",
            "tool_choice",
        )
    refuse_unknown(choice, {"type", "function"}, "tool_choice")
    refuse_unknown(function, {"name"}, "tool_choice")
    return name


def _read_allowed(
    choice: Mapping[str, Any], functions: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the allowed functions and the mode, auto or required."""
    refuse_unknown(choice, {"type", "allowed_tools"}, "tool_choice")
    allowed = choice.get("allowed_tools")
    given = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(given, list) or not given:
        raise Refused(
            "tool_choice of type allowed_tools must have allowed_tools, an object with "
            "mode and tools",
            "tool_choice",
        )
    refuse_unknown(allowed, {"mode", "tools"}, "tool_choice")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise Refused(
            "the mode of allowed_tools must be auto or required", "tool_choice"
        )
    names = [_read_name(each) for each in given]
    for name in names:
        if name not in functions:
            raise Refused(f"tool_choice: tools has no {name!r}", "tool_choice")
    return {name: functions[name] for name in names}, mode
