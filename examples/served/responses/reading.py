"""Convert a body of `/v1/responses` into the fields of a chat.

Input items become messages. A tool call becomes part of the preceding assistant
message, and a tool's output a message with the role `tool`.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..asking.fields import OF_CACHED_PROMPTS, SERVED_OF_CHATS, Refusal, refuse_unserved
from ..mistakes import Refused
from ..values import refuse_unknown
from .offered import Offered, read_choice, read_offered

_NOT_STORED = "is not supported: nothing is stored; send the whole input"

_OPEN = "is not supported: an input is never shortened"

REFUSED = {
    "previous_response_id": Refusal(_NOT_STORED),
    "conversation": Refusal(_NOT_STORED),
    "prompt": Refusal("is not supported: there are no prompt templates; send input"),
    "background": Refusal("is not supported: nothing is stored", (False,)),
    "background_options": Refusal("is not supported: nothing is stored"),
    "context_management": Refusal(_OPEN, ([],)),
    # Inputs that fit the context are never truncated.
    "truncation": Refusal(_OPEN, ("disabled", "auto")),
    "moderation": Refusal("is not supported: the server does not moderate"),
    "image": Refusal("is not supported: the model reads and writes text only"),
    "access_programs": Refusal("is not supported"),
    **OF_CACHED_PROMPTS,
}

# Supported fields of chats, and the endpoint's own.
_OWN = ("input", "instructions", "max_output_tokens", "text", "reasoning", "include")
# Accepted without an effect; the server calls no tools.
_DROPPED = ("client_metadata", "max_tool_calls")
_NOT_HERE = {"messages", "max_tokens", "max_completion_tokens", "n", "logprobs"}
_NOT_HERE |= {"response_format", "reasoning_effort", "stream_options"}
SERVED = (SERVED_OF_CHATS - _NOT_HERE) | {*_OWN, *_DROPPED, "stream_options"}

# Chat fields, and the names of their sources here.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
NAMES |= {"response_format": "text", "reasoning_effort": "reasoning"}
NAMES |= {"response_format.json_schema": "text"}

LOGPROBS = "message.output_text.logprobs"
# Supported values of `include`. Only LOGPROBS has an effect: reasoning is never hidden,
# and the server calls no tools.
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)

# Items of a history that are dropped: hosted tools and client metadata. With a
# `call_id` they are ordinary calls.
SKIPPED = (
    *("web_search_call", "file_search_call", "code_interpreter_call"),
    *("image_generation_call", "computer_call", "mcp_call", "tool_search_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("compaction", "compaction_summary", "context_compaction", "ghost_snapshot"),
    *("program", "additional_tools", "other"),
)
# Calls of tools that are neither functions nor custom tools, and their outputs.
CALLED = ("local_shell_call", "shell_call", "apply_patch_call", *SKIPPED)
OF_A_CALL = {"id", "type", "status", "call_id", "created_by", "namespace", "caller"}


def read_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent fields of a chat.

    Raises:
        Refused: for an unsupported field, by its name.
    """
    refuse_unserved(body, SERVED, REFUSED)
    if not isinstance(body.get("client_metadata"), Mapping | None):
        raise Refused("client_metadata must be an object", "client_metadata")
    offered = read_offered(body)
    # A response always has token counts, so `stream_options` has no effect.
    own = {*_OWN, *_DROPPED, *REFUSED, "stream_options", "tools", "tool_choice"}
    fields = {n: v for n, v in body.items() if n not in own and v is not None}
    messages = _read_instructions(body) + _read_input(body.get("input"), offered)
    fields["messages"] = messages or [{"role": "user", "content": ""}]
    if body.get("max_output_tokens") is not None:
        fields["max_completion_tokens"] = body["max_output_tokens"]
    if offered.functions:
        fields["tools"] = offered.functions
    if body.get("tool_choice") is not None:
        fields["tool_choice"] = read_choice(body["tool_choice"], offered)
    if body.get("top_logprobs") is not None or LOGPROBS in _read_include(body):
        fields["logprobs"] = True
    return {**fields, **_read_text(body), **_read_reasoning(body)}


def list_warnings(body: Mapping[str, Any]) -> list[str]:
    """Return warnings for the client about accepted fields that have no effect."""
    text = body.get("text")
    verbosity = text.get("verbosity") if isinstance(text, Mapping) else None
    warnings = [*read_offered(body).warnings]
    if verbosity not in (None, "medium"):
        warnings.append("text.verbosity has no effect: ask for it in the input")
    return warnings


def _read_instructions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions = body.get("instructions")
    if instructions is None:
        return []
    if not isinstance(instructions, str):
        raise Refused("instructions must be a string", "instructions")
    return [{"role": "system", "content": instructions}]


def _read_input(given: Any, offered: Offered) -> list[dict[str, Any]]:
    """Return the messages of an input, a string or a list of items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Refused("input must be a string or a list of items", "input")
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for item in given:
        if not isinstance(item, Mapping):
            raise Refused("an item of input must be an object", "input")
        kind = str(item.get("type") or "message")
        if kind in ("reasoning", "reasoning_text"):
            thoughts += _read_thoughts(item)
        elif kind.endswith("_output") and "call_id" in item:
            messages.append(_read_output(item))
        elif kind in ("function_call", "custom_tool_call") or (
            kind in CALLED and item.get("call_id") is not None
        ):
            call = _read_call(item, kind, offered)
            _last_of_assistant(messages)["tool_calls"].append(call)
        elif kind == "message" and isinstance(item.get("role"), str):
            message = {"role": item["role"], "content": item.get("content")}
            if message["role"] == "assistant":
                message["tool_calls"] = []
            messages.append(message)
        elif kind == "item_reference":
            raise Refused(
                "an item of type 'item_reference' is not supported: nothing is stored; "
                "send the item itself (store=false)",
                "input",
            )
        elif kind not in SKIPPED:
            raise Refused(
                f"an item of type {kind[:60]!r} is not supported; input may have "
                "messages, tool calls and their outputs",
                "input",
            )
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def _last_of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last assistant message, appended if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    return messages[-1]


def _read_call(item: Mapping[str, Any], kind: str, offered: Offered) -> dict[str, Any]:
    """Return a call in the format of a chat, with JSON arguments."""
    name, arguments = item.get("name"), item.get("arguments")
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")})
    elif kind != "function_call":
        name = kind.removesuffix("_call")
        rest = {k: v for k, v in item.items() if k not in OF_A_CALL}
        arguments = json.dumps(rest)
    name = offered.find(name, item.get("namespace"), "input")
    function = {"name": name, "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _read_output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if output is None:
        known = {"id", "type", "status", "call_id", "output", "execution"}
        rest = {k: v for k, v in item.items() if k not in known}
        output = json.dumps(rest) if rest else ""
    elif not isinstance(output, str | list):
        output = json.dumps(output)
    name = item.get("call_id")
    return {"role": "tool", "tool_call_id": name, "content": output}


def _read_thoughts(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item.

    Raises:
        Refused: for content or a summary that is no list of parts with a text.
    """
    texts = list[str]()
    for name in ("content", "summary"):
        parts = item.get(name) or []
        for part in parts if isinstance(parts, list) else [parts]:
            if not isinstance(part, Mapping):
                raise Refused(
                    f"the {name} of a reasoning item must be a list of objects, got "
                    f"{part!r:.60}",
                    "input",
                )
            text = part.get("text")
            if not isinstance(text, str | None):
                raise Refused(
                    f"the text in the {name} of a reasoning item must be a string, got "
                    f"{text!r:.60}",
                    "input",
                )
            texts.append(text or "")
    return "".join(texts)


def _read_text(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response format."""
    given = body.get("text")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Refused("text must be an object", "text")
    refuse_unknown(given, {"format", "verbosity"}, "text")
    if given.get("verbosity") not in (None, "low", "medium", "high"):
        raise Refused("text.verbosity must be low, medium or high", "text")
    form = given.get("format")
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return {} if form is None else {"response_format": form}
    described = {k: v for k, v in form.items() if k != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _read_reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("reasoning")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Refused("reasoning must be an object", "reasoning")
    known = {"effort", "summary", "generate_summary", "context"}
    refuse_unknown(given, known, "reasoning")
    effort = given.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _read_include(body: Mapping[str, Any]) -> list[Any]:
    given = body.get("include")
    given = [] if given is None else given
    if not isinstance(given, list) or any(each not in INCLUDED for each in given):
        raise Refused(f"include must list only {', '.join(INCLUDED)}", "include")
    return given
