"""Convert the tools of a response's body into functions of a chat.

A custom tool, which takes free text, becomes a function with one string argument.
Functions of a namespace become ordinary functions. Hosted tools are omitted unless
`tool_choice` requires a call, which is refused.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..mistakes import Refused

INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
# Ignored keys of a function.
_DROPPED = {"type", "defer_loading", "allowed_callers"}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')


class Origin(NamedTuple):
    """A tool as the client defined it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class Offered(NamedTuple):
    """Tools of a chat."""

    functions: list[dict[str, Any]]  # in the format of a chat
    origins: dict[str, Origin]  # by function name
    warnings: tuple[str, ...]  # for the client
    left: list[Any]  # tools of the body that are supported

    def find(self, name: Any, namespace: Any, param: str) -> Any:
        """Return the name of a tool's function; of an unknown tool, its own name.

        Args:
            name, namespace: the client's names of the tool.
            param: the field that has them, for the error.

        Raises:
            Refused: if the namespace is not a string.
        """
        if not isinstance(namespace, str | None):
            raise Refused(
                f"{param}: a namespace must be a string, got {namespace!r:.60}", param
            )
        for function, origin in self.origins.items():
            if (origin.name, origin.namespace) == (name, namespace):
                return function
        return name


def read_offered(body: Mapping[str, Any]) -> Offered:
    """Return the tools of a body.

    Raises:
        Refused: for invalid tools, and for hosted tools if a call is required.
    """
    given = body.get("tools")
    given = [] if given is None else given
    if not isinstance(given, list):
        raise Refused("tools must be a list", "tools")
    offered = Offered([], {}, (), [])
    hosted = list[str]()
    for tool in given:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise Refused("a tool must be an object with a type", "tools")
        if kind == "namespace":
            hosted += _add_namespace(offered, tool)
        elif kind in ("function", "custom"):
            _add(offered, tool, None)
        else:
            hosted.append(kind)
            continue
        offered.left.append(tool)
    if hosted and body.get("tool_choice") not in (None, "auto", "none"):
        raise Refused(
            f"tools of type {hosted[0][:60]!r} are not supported unless "
            f"tool_choice is auto or none; omit them",
            "tools",
        )
    warnings = tuple(
        f"tools of type {kind[:60]!r} are not supported: the model does not see them"
        for kind in dict.fromkeys(hosted)
    )
    return offered._replace(warnings=warnings)


def read_choice(given: Any, offered: Offered) -> Any:
    """Return `tool_choice` in the format of a chat.

    Raises:
        Refused: for a tool type that is not supported.
    """
    if not isinstance(given, Mapping):
        return given
    if given.get("type") == "allowed_tools":
        tools = given.get("tools")
        tools = tools if isinstance(tools, list) else []
        allowed = {k: v for k, v in given.items() if k not in ("type", "tools")}
        allowed["tools"] = [read_choice(each, offered) for each in tools]
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if given.get("type") not in ("function", "custom"):
        raise Refused(
            f"tool_choice: a tool of type {str(given.get('type'))[:60]!r} is not "
            f"supported; use functions and custom tools",
            "tool_choice",
        )
    name = offered.find(given.get("name"), given.get("namespace"), "tool_choice")
    others = {k: v for k, v in given.items() if k not in ("type", "name", "namespace")}
    return {"type": "function", "function": {"name": name}, **others}


def read_custom_input(arguments: str) -> str:
    """Return the input of a custom tool from possibly incomplete arguments."""
    begin = _BEGIN.match(arguments)
    if begin is None:
        return ""
    found = re.match(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*', arguments[begin.end() :])
    assert found is not None, "nothing matches, too"
    text: str = json.loads(f'"{found[0]}"', strict=False)
    return text


def _add_namespace(offered: Offered, tool: Mapping[str, Any]) -> list[str]:
    """Add the tools of a namespace; return the types of omitted tools."""
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        raise Refused("a tool of type namespace must have a name and tools", "tools")
    hosted = []
    for each in tools:
        kind = each.get("type") if isinstance(each, Mapping) else None
        if kind in ("function", "custom"):
            _add(offered, each, name)
        else:
            hosted.append(str(kind))
    return hosted


def _add(offered: Offered, tool: Mapping[str, Any], namespace: str | None) -> None:
    function = {k: v for k, v in tool.items() if k not in _DROPPED and v is not None}
    origin = Origin(str(tool.get("name")), namespace, tool["type"] == "custom")
    if origin.is_custom:
        function.pop("format", None)
        function["parameters"] = INPUT
    name = origin.name
    if namespace is not None:
        function.pop("strict", None)
        if name in offered.origins:
            name = f"{namespace}.{name}"
        function["name"] = name
    offered.functions.append({"type": "function", "function": function})
    offered.origins[name] = origin
