"""Convert a body of `/v1/messages` into the fields of a chat.

A tool result becomes a message with the role `tool`, and a tool call a part of the
assistant's message.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..asking.body import MOST_NAME
from ..asking.fields import Refusal, refuse_unserved
from ..mistakes import Refused
from ..values import read_number, refuse_unknown

REFUSED = {
    "container": Refusal("is not supported: the server runs no code"),
    "mcp_servers": Refusal("is not supported: the server calls no tools", ([],)),
    "inference_geo": Refusal("is not supported: the server has one location"),
    "speed": Refusal("is not supported: there is only one", ("standard",)),
}
# Fields with the same name and meaning in a chat.
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "cache_control")
_OWN = ("max_tokens", "messages", "system", "stop_sequences", "tools", "tool_choice")
_OWN += ("metadata", "thinking", "output_config", "output_format", "service_tier")
SERVED = {*_SAME, *_OWN, "context_management", "betas"}

# Chat fields, and the names of their sources here.
NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
NAMES |= {"response_format": "output_config", "reasoning_effort": "output_config"}
NAMES |= {"response_format.json_schema": "output_config", "user": "metadata"}
NAMES |= {"chat_template_kwargs": "thinking"}

# Ignored keys of a tool.
_DROPPED = {"type", "input_schema", "eager_input_streaming", "defer_loading"}
_DROPPED |= {"allowed_callers", "input_examples"}
# Ignored blocks of a history: tools that run elsewhere.
SKIPPED = {"redacted_thinking", "server_tool_use", "tool_reference", "compaction"}
SKIPPED |= {"container_upload", "mcp_tool_use", "mcp_tool_result", "fallback"}
# Prefix of a system line that some clients change with each request; it is dropped, as
# it would defeat prefix caching.
BILLING = "x-anthropic-billing-header:"


def read_message_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent fields of a chat, without `max_tokens`.

    Raises:
        Refused: for an unsupported field, by its name.
    """
    refuse_unserved(body, SERVED, REFUSED)
    fields = {name: body[name] for name in _SAME if body.get(name) is not None}
    fields["messages"] = _read_system(body) + _read_messages(body.get("messages"))
    if body.get("stop_sequences") is not None:
        fields["stop"] = body["stop_sequences"]
    if functions := _list_functions(body):
        fields["tools"] = functions
    fields |= _read_choice(body) | _read_output(body) | _read_user(body)
    return {**fields, **_read_thinking(body)}


def read_most_tokens(body: Mapping[str, Any]) -> int:
    """Return the maximum number of new tokens; the context may leave fewer.

    Raises:
        Refused: if `max_tokens` is missing or invalid.
    """
    if body.get("max_tokens") is None:
        raise Refused("max_tokens is required", "max_tokens")
    most: int = read_number(body, "max_tokens", 1, int, 1, 2**31 - 1)
    return most


def list_message_warnings(body: Mapping[str, Any]) -> list[str]:
    """Return warnings for the client about accepted fields that have no effect."""
    warnings = [
        f"tools of type {kind!r} are not supported: the model does not see them"
        for kind in dict.fromkeys(_list_hosted(body))
    ]
    thinking = body.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("budget_tokens") is not None:
        warnings.append(
            "thinking.budget_tokens has no effect: reasoning counts as output"
        )
    managed = body.get("context_management")
    if isinstance(managed, Mapping) and managed.get("edits"):
        warnings.append("context_management has no effect: messages are not edited")
    return warnings


def _read_system(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("system")
    if given is None or given == []:
        return []
    if not isinstance(given, str | list):
        raise Refused(
            "system must be a string or a list of blocks of type text", "system"
        )
    blocks = [given] if isinstance(given, str) else [_read_text(b) for b in given]
    system = "\n".join(text for text in blocks if not text.startswith(BILLING))
    return [{"role": "system", "content": system}] if system else []


def _read_messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list of at least one message", "messages")
    messages = []
    for message in given:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise Refused(
                "a message must be an object with a role (user, assistant or "
                "system) and content",
                "messages",
            )
        content = message.get("content")
        blocks = [content] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise Refused("content must be a string or a list of blocks", "messages")
        read = _read_assistant if role == "assistant" else _read_user_blocks
        messages += read(blocks, role)
    if messages[-1]["role"] == "assistant":
        raise Refused(
            "the last message must not be the assistant's, as the server does not "
            "continue messages; end with a user message",
            "messages",
        )
    return messages


def _read_assistant(blocks: list[Any], role: str) -> list[dict[str, Any]]:
    """Return one message with its text, reasoning and calls."""
    texts, thoughts, calls = list[str](), "", list[dict[str, Any]]()
    for block in blocks:
        kind = _find_kind(block)
        if kind == "thinking":
            thoughts += str(block.get("thinking") or "")
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append(
                {"id": block.get("id"), "type": "function", "function": function}
            )
        elif not _is_skipped(kind):
            texts.append(_read_text(block))
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts) or None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return [message]


def _read_user_blocks(blocks: list[Any], role: str) -> list[dict[str, Any]]:
    """Return tool results as messages, followed by the user's text."""
    texts, results = list[str](), list[dict[str, Any]]()
    for block in blocks:
        kind = _find_kind(block)
        if kind == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            results.append({**result, "content": _read_result(block)})
        elif not _is_skipped(kind):
            texts.append(_read_text(block))
    if texts or not results:
        return [*results, {"role": role, "content": "\n".join(texts)}]
    return results


def _read_result(block: Mapping[str, Any]) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(
            "the content of a tool_result must be a string or a list of blocks",
            "messages",
        )
    kept = [each for each in content if not _is_skipped(_find_kind(each))]
    return "\n".join(map(_read_text, kept))


def _read_text(block: Any) -> str:
    """Return the text of a block.

    Raises:
        Refused: for a block without text.
    """
    kind = _find_kind(block)
    found: Any = None
    if isinstance(block, str):
        found = block
    elif kind == "text":
        found = block.get("text")
    elif kind == "document":
        source = block.get("source")
        is_text = isinstance(source, Mapping) and source.get("type") == "text"
        found = source.get("data") if is_text else None
    elif kind == "search_result" and isinstance(block.get("content"), list):
        found = "\n".join(map(_read_text, block["content"]))
    if not isinstance(found, str):
        raise Refused(
            f"a block of type {kind[:60]!r} is not supported: the model reads and "
            f"writes text only",
            "messages",
        )
    return found


def _find_kind(block: Any) -> str:
    if isinstance(block, str):
        return "text"
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise Refused("a block must be an object with a type", "messages")
    return kind


def _is_skipped(kind: str) -> bool:
    is_result = kind.endswith("_tool_result")
    return kind in SKIPPED or is_result


def _list_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = body.get("tools")
    given = [] if given is None else given
    if not isinstance(given, list) or not all(isinstance(t, Mapping) for t in given):
        raise Refused("tools must be a list of objects", "tools")
    return given


def _list_hosted(body: Mapping[str, Any]) -> list[str]:
    """Return the types of hosted tools, which the server cannot run."""
    kinds = [each.get("type") for each in _list_tools(body)]
    return [str(kind)[:60] for kind in kinds if kind not in (None, "custom")]


def _list_functions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the client's tools in the format of a chat."""
    hosted, choice = _list_hosted(body), body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if hosted and kind not in (None, "auto", "none"):
        raise Refused(
            f"tools of type {hosted[0]!r} are not supported unless "
            f"tool_choice is auto or none; omit them",
            "tools",
        )
    found = []
    for tool in _list_tools(body):
        if tool.get("type") not in (None, "custom"):
            continue
        rest = {k: v for k, v in tool.items() if k not in _DROPPED and v is not None}
        function = {**rest, "parameters": tool.get("input_schema")}
        found.append({"type": "function", "function": function})
    return found


def _read_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tool_choice` in the format of a chat."""
    choice = body.get("tool_choice")
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        known = {"type", "name", "disable_parallel_tool_use"}
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in kinds:
        known = {"type", "disable_parallel_tool_use"}
        chosen = kinds[kind]
    else:
        raise Refused(
            "tool_choice must be an object of type auto, any, tool or none",
            "tool_choice",
        )
    refuse_unknown(choice, known, "tool_choice")
    is_single = choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise Refused("disable_parallel_tool_use must be true or false", "tool_choice")
    return {"tool_choice": chosen} | (
        {"parallel_tool_calls": False} if is_single else {}
    )


def _read_output(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response format and the reasoning effort."""
    config = body.get("output_config")
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise Refused("output_config must be an object", "output_config")
    refuse_unknown(config, {"format", "effort"}, "output_config")
    found = {}
    if config.get("effort") is not None:
        found["reasoning_effort"] = config["effort"]
    form = config.get("format")
    form = body.get("output_format") if form is None else form
    if form is None:
        return found
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise Refused(
            "output_config.format must be an object of type json_schema",
            "output_config",
        )
    described = {k: v for k, v in form.items() if k != "type"}
    response_format = {"type": "json_schema", "json_schema": described}
    return {**found, "response_format": response_format}


def _read_user(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client's name; a name that is too long is hashed."""
    given = body.get("metadata")
    given = {} if given is None else given
    name = given.get("user_id") if isinstance(given, Mapping) else 0
    if not isinstance(name, str | None):
        raise Refused("metadata must be an object with a user_id", "metadata")
    if name is not None and len(name) > MOST_NAME:
        name = hashlib.sha256(name.encode()).hexdigest()
    tier = body.get("service_tier")
    if not isinstance(tier, str | None):
        raise Refused("service_tier must be a string", "service_tier")
    return {"user": name} if name else {}


def _read_thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variable that enables or disables reasoning."""
    given = body.get("thinking")
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise Refused(
            "thinking must be an object of type enabled, adaptive or disabled",
            "thinking",
        )
    refuse_unknown(given, {"type", "budget_tokens", "display"}, "thinking")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}
