"""Token ids of a body's prompts: strings, token lists, or a chat.

Tokenizing is slow; only `encode_batch` releases the GIL. Prompts that are too long for
the context are refused by their number of characters, before tokenizing.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pretrained

from ..loading import Served
from ..mistakes import Refused
from ..values import is_tokens, read_flag

MOST_PROMPTS = 2048

# Message fields that text templates cannot render. Other fields, such as reasoning, are
# rendered if the template supports them.
NOT_OF_TEXTS = ("audio", "images", "videos", "function_call")

# Supported content parts, and the key of their text.
PARTS = {"text": "text", "input_text": "text", "output_text": "text"}
PARTS |= {"refusal": "refusal"}


def read_prompts(served: Served, body: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of the prompts: strings or token lists, not mixed.

    Raises:
        Refused: for any other value, and for a prompt that is too long.
    """
    prompt = _list_prompts(body)
    if all(isinstance(text, str) for text in prompt):
        has_special = read_flag(body, "add_special_tokens", True)
        prompt = _encode(served, "prompt", prompt, add_special_tokens=has_special)
    for token in itertools.chain.from_iterable(prompt):
        if not 0 <= token < served.vocabulary_size:
            raise Refused(
                f"the prompt has token {str(token)[:60]}; the model has "
                f"{served.vocabulary_size} tokens, numbered from 0",
                "prompt",
            )
    if served.begin_tokens:
        prompt = [tokens or list(served.begin_tokens) for tokens in prompt]
    return prompt


def read_prompt_texts(served: Served, body: Mapping[str, Any]) -> list[str]:
    """Return the prompts as strings; token lists are decoded."""
    prompt = _list_prompts(body)
    decode = served.tokenizer.decode
    return [
        p if isinstance(p, str) else decode(p, skip_special_tokens=False)
        for p in prompt
    ]


def read_chat(
    served: Served, body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
) -> list[list[int]]:
    """Return the token ids of a conversation, rendered by the checkpoint's template.

    Args:
        served: the model.
        body: the fields.
        tools: tools for the template.

    Raises:
        Refused: for unsupported messages, too long prompts, or a template's error.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of at least one message", "messages")
    read = list(map(_read_message, messages))
    others = [tools, *(each.get("tool_calls", ()) for each in read)]
    written = sum(len(json.dumps(each)) for each in others if each)
    length = written + sum(len(each["content"] or "") for each in read)
    _check_length(served, "messages", length)
    variables = _read_variables(body)
    try:
        text = pretrained.render_chat(served.folder, read, tools, variables)
    except ValueError as error:
        # Do not show the model's path to clients.
        words = str(error).replace(str(served.folder), "the model")
        raise Refused(words, "messages") from error
    has_special = read_flag(body, "add_special_tokens", False)
    return _encode(served, "messages", [text], add_special_tokens=has_special)


def _list_prompts(body: Mapping[str, Any]) -> list[Any]:
    """Return a list of strings or a list of token lists."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or is_tokens(prompt) or prompt == []:
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Refused(
            "prompt must be a string, a list of token ids, or a list of these", "prompt"
        )
    if len(prompt) > MOST_PROMPTS:
        raise Refused(f"prompt must have at most {MOST_PROMPTS} prompts", "prompt")
    is_text = [isinstance(text, str) for text in prompt]
    if not all(is_text) and not all(each == [] or is_tokens(each) for each in prompt):
        raise Refused(
            "prompt must have only strings or only lists of integer token ids", "prompt"
        )
    return prompt


def _read_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return further template variables, such as enable_thinking."""
    name = "chat_template_kwargs"
    given = body.get(name)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise Refused(f"{name} must be an object", name)
    for variable in pretrained.OWN_VARIABLES:
        if variable in given:
            raise Refused(
                f"{name} must not set {variable}, which the server sets", name
            )
    effort = body.get("reasoning_effort")
    if not isinstance(effort, str | None):
        raise Refused("reasoning_effort must be a string", "reasoning_effort")
    return {**({} if effort is None else {"reasoning_effort": effort}), **given}


def _read_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message must be an object with role and content", "messages")
    for name in NOT_OF_TEXTS:
        if message.get(name):
            raise Refused(
                f"{name!r} of a message is not supported; omit it", "messages"
            )
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise Refused(f"the {name} of a message must be a string", "messages")
    calls, content = message.get("tool_calls"), message.get("content")
    if not isinstance(calls, list | None) or not all(map(_is_call, calls or [])):
        raise Refused(
            "the tool_calls of a message must be a list of calls, each with a "
            "function, its name and its arguments (a string, an object or null)",
            "messages",
        )
    # Content may be null for an assistant message with only calls or reasoning, and for
    # a tool without a result.
    if content is None and message["role"] in ("tool", "function"):
        content = ""
    if content is not None or message["role"] != "assistant":
        content = _read_content(content)
    return {**message, "content": content}


def _is_call(call: Any) -> bool:
    """True if `call` is a tool call; arguments may be truncated JSON or missing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | Mapping | None)
    )


def _read_content(content: Any) -> str:
    """Return the text of a message, a string or a list of parts."""
    if isinstance(content, list) and all(map(_is_part, content)):
        return "\n".join(part[PARTS[part.get("type", "text")]] for part in content)
    if not isinstance(content, str):
        raise Refused(
            "content must be a string or a list of parts of type text", "messages"
        )
    return content


def _is_part(part: Any) -> bool:
    """True if `part` is a text part."""
    if not isinstance(part, dict):
        return False
    name = PARTS.get(str(part.get("type", "text")))
    return name is not None and isinstance(part.get(name), str)


def _encode(
    served: Served, name: str, texts: list[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of strings."""
    for text in texts:
        _check_length(served, name, len(text))
    encoded = served.tokenizer.encode_batch(
        texts, add_special_tokens=add_special_tokens
    )
    return [encoding.ids for encoding in encoded]


def _check_length(served: Served, name: str, count: int) -> None:
    """Refuse strings with more characters than the context's tokens can have."""
    if count > served.most_characters:
        raise Refused(
            f"{name} has a text of {count} characters; the context is "
            f"{served.context} tokens, and a text has {served.most_characters} "
            f"characters at most",
            name,
            code="context_length_exceeded",
        )
