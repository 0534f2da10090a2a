"""From a body of `/v1/responses` to the fields of a chat.

Input items become messages: a call belongs to the assistant's message before it, and
what a tool answered is a message of the role `tool`.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..asking.fields import SERVED_OF_CHATS, Refusal, refuse
from ..mistakes import Refused

_NOT_STORED = "is not served: nothing is stored; give the whole input"

REFUSED = {
    "previous_response_id": Refusal(_NOT_STORED),
    "conversation": Refusal(_NOT_STORED),
    "prompt": Refusal("is not served: there are no templates of prompts; give input"),
    "background": Refusal("is not served: nothing is stored", (False,)),
    "background_options": Refusal("is not served: nothing is stored"),
    "context_management": Refusal("is not served: an input is taken whole or refused"),
    "truncation": Refusal(
        "is not served: an input is taken whole or refused", ("disabled",)
    ),
    "max_tool_calls": Refusal("is not served: no tool is called here"),
    "moderation": Refusal("is not served: nothing is moderated"),
    "image": Refusal("is not served: the model reads and writes text"),
    "access_programs": Refusal("is not served"),
    "prompt_cache_options": Refusal("is not served: prompts are kept while they may"),
    "prompt_cache_retention": Refusal("is not served: prompts are kept while they may"),
}

# Fields of chats that a response has, too, in these words or in its own.
_OWN = ("input", "instructions", "max_output_tokens", "text", "reasoning", "include")
_NOT_HERE = {"messages", "max_tokens", "max_completion_tokens", "n", "logprobs"}
_NOT_HERE |= {"response_format", "reasoning_effort", "stream_options"}
SERVED = (SERVED_OF_CHATS - _NOT_HERE) | {*_OWN, "stream_options"}

# What fields of chats are called here.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
NAMES |= {"response_format": "text", "reasoning_effort": "reasoning"}

LOGPROBS = "message.output_text.logprobs"
# What `include` may name: nothing comes of the second, since thoughts are not hidden.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


def read_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that asks for the same.

    Raises:
        Refused: for what is not served, by its name.
    """
    for name, value in body.items():
        if value is not None and name not in SERVED:
            refuse(name, value, REFUSED)
    # A response always says what it took: `stream_options` ask for nothing.
    own = {*_OWN, *REFUSED, "stream_options"}
    fields = {n: v for n, v in body.items() if n not in own and v is not None}
    fields["messages"] = _read_instructions(body) + _read_input(body.get("input"))
    if body.get("max_output_tokens") is not None:
        fields["max_completion_tokens"] = body["max_output_tokens"]
    if tools := body.get("tools"):
        fields["tools"] = _read_tools(tools)
    if body.get("tool_choice") is not None:
        fields["tool_choice"] = _read_choice(body["tool_choice"])
    if body.get("top_logprobs") is not None or LOGPROBS in _read_include(body):
        fields["logprobs"] = True
    return {**fields, **_read_text(body), **_read_reasoning(body)}


def _read_instructions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = body.get("instructions")
    if said is None:
        return []
    if not isinstance(said, str):
        raise Refused("instructions must be a text", "instructions")
    return [{"role": "system", "content": said}]


def _read_input(given: Any) -> list[dict[str, Any]]:
    """Return the messages of an input: a text, or a list of items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refused("input must be a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for item in given:
        if not isinstance(item, Mapping):
            raise Refused("an item of input is an object", "input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts += _read_thoughts(item)
        elif kind == "function_call_output":
            messages.append(_read_output(item))
        elif kind == "function_call":
            _last_of_assistant(messages)["tool_calls"].append(_read_call(item))
        elif kind == "message" and isinstance(item.get("role"), str):
            message = {"role": item["role"], "content": item.get("content")}
            if message["role"] == "assistant":
                message["tool_calls"] = []
            messages.append(message)
        else:
            raise Refused(
                f"an item of type {str(kind)[:60]!r} is not served; messages, function "
                "calls and their outputs are",
                "input",
            )
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def _last_of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    return messages[-1]


def _read_call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _read_output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str | list):
        output = json.dumps(output)
    name = item.get("call_id")
    return {"role": "tool", "tool_call_id": name, "content": output}


def _read_thoughts(item: Mapping[str, Any]) -> str:
    """Return what a model thought, as far as it was told."""
    parts = [*(item.get("content") or []), *(item.get("summary") or [])]
    return "".join(p.get("text") or "" for p in parts if isinstance(p, Mapping))


def _read_tools(given: Any) -> list[Any]:
    """Return tools as chats have them: a function's fields are inside of it."""
    if not isinstance(given, list):
        raise Refused("tools must be a list", "tools")
    found = []
    for tool in given:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise Refused("a tool is an object of type function", "tools")
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}
        found.append({"type": "function", "function": function})
    return found


def _read_choice(given: Any) -> Any:
    if isinstance(given, Mapping) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _read_text(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the answer must be."""
    given = body.get("text")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Refused("text must be an object", "text")
    for name in given.keys() - {"format"}:
        # "medium" is what an answer is that nobody asks anything of.
        if given[name] not in (None, "medium"):
            raise Refused(f"text.{name[:60]} is not served; leave it out", "text")
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
    effort = given.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _read_include(body: Mapping[str, Any]) -> list[Any]:
    given = body.get("include")
    given = [] if given is None else given
    if not isinstance(given, list) or any(each not in INCLUDED for each in given):
        raise Refused(f"include takes {' and '.join(INCLUDED)}", "include")
    return given
