"""The tokenizer of a checkpoint, and the template by which it was taught to chat."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .gguf_reading import find_folder
from .settings import read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer.json of a checkpoint folder.

    What it says of padding and truncation is for training, and is switched off: a model
    would take the padding for text.

    Raises:
        FileNotFoundError: when there is none.
        ValueError: when it cannot be read.
    """
    path = find_folder(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; older formats (tokenizer.model, vocab.json) must be "
            "converted to it first"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def render_chat(
    folder: str | Path,
    messages: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Write a chat as the checkpoint's own template has it, up to the answer.

    Encode the text with ``add_special_tokens=False``: the template brings its own.

    Args:
        folder: a checkpoint with a chat_template.jinja, or with a ``chat_template`` in
            its tokenizer_config.json.
        messages: a question, or what was said so far, each with "role" and "content".
        tools: that the model may call, as the API of OpenAI has them.

    Raises:
        ValueError: when there is no template, or it refuses the messages.
    """
    # Imported here: plain prompts need no jinja2.
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    settings = _read_settings(folder)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        template = _find_template(folder, settings, has_tools=bool(tools))
        return environment.from_string(template).render(
            messages=messages,
            add_generation_prompt=True,
            tools=list(tools) or None,
            documents=None,
            **_special_tokens(settings),
        )
    except TemplateError as error:
        raise ValueError(f"the chat template of {folder}: {error}") from error


def has_chat_template(folder: str | Path) -> bool:
    """Whether the checkpoint was taught to chat."""
    settings = _read_settings(folder)
    try:
        return bool(_find_template(folder, settings))
    except ValueError:
        return False


def _read_settings(folder: str | Path) -> dict[str, Any]:
    """Read tokenizer_config.json, if there is one."""
    path = find_folder(folder) / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _find_template(
    folder: str | Path, settings: Mapping[str, Any], *, has_tools: bool = False
) -> str:
    """Return the template, from a file of its own or from the tokenizer's settings."""
    path = find_folder(folder) / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several by name: one for tools, one for retrieval, and the one for chats.
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
        if has_tools:
            template = named.get("tool_use", template)
    if not isinstance(template, str):
        raise ValueError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): the model was not taught to chat"
        )
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; each is a text, or has one as content."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _to_json(value: Any, indent: int | None = None) -> str:
    # As it stands: jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
