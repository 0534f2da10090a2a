"""Chat templates, rendered as in `transformers`.

Templates are jinja2 programs for the environment of `transformers`: a sandbox with
trimmed blocks, `break` and `continue`, the tag `generation`, a `tojson` without HTML
escapes, `raise_exception` and `strftime_now`. Templates differ in the type of tool-call
arguments (an object or a string), so `Arguments` is both, and in the type of a
message's content (`template_reading.py`).
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .gguf_reading import find_folder
from .settings import read_tokenizer_settings
from .template_reading import read_form

# Names of a message's reasoning; templates read the first one, gpt-oss the last.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")

# Variables of every template that callers must not set.
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object that concatenates and prints as its JSON.

    Some templates iterate over the arguments, others write `... + arguments`.
    """

    def __init__(self, values: Mapping[str, Any], text: str):
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: Any) -> str:
        return str(self) + other

    def __radd__(self, other: Any) -> str:
        return other + str(self)


def render_chat(
    folder: str | Path,
    messages: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the checkpoint's chat template, up to the next answer.

    Encode the result with ``add_special_tokens=False``: it contains special tokens.

    Args:
        folder: a checkpoint with chat_template.jinja, or ``chat_template`` in its
            tokenizer_config.json.
        messages: a question, or messages with "role" and "content" as in OpenAI's API.
        tools: available tools, in the format of OpenAI's API.
        variables: further template variables, such as "enable_thinking".

    Raises:
        ValueError: if there is no template, or it fails or refuses the messages.
    """
    settings = read_tokenizer_settings(find_folder(folder))
    source = _find_template(folder, settings, has_tools=bool(tools))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    values = {
        **_special_tokens(settings),
        **(variables or {}),
        "add_generation_prompt": True,
        "tools": list(tools) or None,
        "documents": None,
    }
    read = [_read_message(message, source) for message in messages]
    try:
        return _render(source, read, values)
    except Exception as error:  # templates may raise anything
        words = str(error) or type(error).__name__
        raise ValueError(f"the chat template of {folder}: {words}") from error


def has_chat_template(folder: str | Path) -> bool:
    """True if the checkpoint has a chat template."""
    try:
        settings = read_tokenizer_settings(find_folder(folder))
        return bool(_find_template(folder, settings))
    except ValueError:
        return False


def can_show_tools(folder: str | Path) -> bool:
    """True if the checkpoint's template renders tools."""
    settings = read_tokenizer_settings(find_folder(folder))
    source = _find_template(folder, settings, has_tools=True)
    return _shows_tools(source, tuple(_special_tokens(settings).items()))


@functools.lru_cache(maxsize=16)
def _shows_tools(source: str, special: tuple[tuple[str, str], ...]) -> bool:
    """True if a template renders the name of a tool, or fails."""
    name = "a_tool_to_be_shown"
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    values = dict(special) | {
        "add_generation_prompt": True,
        "tools": [{"type": "function", "function": function}],
        "documents": None,
    }
    try:
        return name in _render(source, [{"role": "user", "content": "?"}], values)
    except Exception:  # templates may raise anything
        return True


def _render(
    source: str, messages: list[dict[str, Any]], values: Mapping[str, Any]
) -> str:
    """Render a template with messages in the form that it accepts."""
    template = _compile(source)
    form = read_form(source, template.environment)
    if not form.takes_null:
        messages = [_fill(message) for message in messages]
    if form.takes_parts:
        messages = [_part(message) for message in messages]
    return str(template.render(messages=messages, **values))


def _fill(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with null content replaced by an empty string."""
    is_null = message.get("content") is None
    return {**message, "content": ""} if is_null else dict(message)


def _part(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a list of one text part."""
    text = message["content"] or ""
    return {**message, "content": [{"type": "text", "text": text}]}


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    """Compile a template in the environment of `transformers`."""
    # Imported here, since plain prompts do not need jinja2.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: marks the assistant's output for trainers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": _now}
    return environment.from_string(source)


def _read_message(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a message for templates: only its content may be null."""
    read = {k: v for k, v in message.items() if v is not None or k == "content"}
    thoughts = [read[name] for name in THOUGHTS if name in read]
    if thoughts:
        read |= {"reasoning_content": thoughts[0], "thinking": thoughts[0]}
    if read.get("role") == "developer" and "developer" not in source:
        read["role"] = "system"
    if not read.get("tool_calls"):
        read.pop("tool_calls", None)
        return read
    read["tool_calls"] = [_read_call(call) for call in read["tool_calls"]]
    return read


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    function["arguments"] = _read_arguments(function.get("arguments"))
    return {**call, "function": function}


def _read_arguments(given: Any) -> Any:
    """Return the arguments of a call, given as an object or as JSON.

    A string that is not a JSON object is returned unchanged, as it may be truncated.
    """
    if given is None or given == "":
        given = {}
    if isinstance(given, Mapping):
        return Arguments(given, json.dumps(given, ensure_ascii=False))
    try:
        values = json.loads(given)
    except (TypeError, ValueError, RecursionError):
        return given
    return Arguments(values, given) if isinstance(values, Mapping) else given


def _find_template(
    folder: str | Path, settings: Mapping[str, Any], *, has_tools: bool = False
) -> str:
    """Return the template from its own file or from the tokenizer's settings."""
    named = _read_templates(find_folder(folder))
    if not named:
        given = settings.get("chat_template")
        # There may be several by name: for tools, for retrieval, and the default.
        named = {"default": given}
        if isinstance(given, list):
            listed = (each for each in given if isinstance(each, Mapping))
            named = {str(each.get("name")): each.get("template") for each in listed}
    template = named.get("default")
    if has_tools:
        template = named.get("tool_use", template)
    if not isinstance(template, str):
        raise ValueError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): the model was not taught to chat"
        )
    return template


def _read_templates(folder: Path) -> dict[str, Any]:
    """Return the templates with files of their own, by name."""
    paths = {"default": folder / "chat_template.jinja"}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        paths[path.stem] = path
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in paths.items()
        if path.is_file()
    }


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, given as strings or objects with content."""
    extra = settings.get("extra_special_tokens")
    named = {name: each for name, each in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, Mapping) else {}
    texts = {
        name: token.get("content") if isinstance(token, Mapping) else token
        for name, token in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
