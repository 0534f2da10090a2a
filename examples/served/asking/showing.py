"""Parsing of a request body: checked fields, engine arguments and display options."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..loading import Served
from ..mistakes import Refused
from ..replying.scoring import MOST_TOP
from ..values import read_flag, read_number
from .body import MOST_SAMPLES, ParsedBody, read_body
from .fields import check_fields, check_texts
from .languages import read_language
from .prompts import read_chat, read_prompt_texts
from .rules import read_rules
from .tools import read_tools


class Shown(NamedTuple):
    """Display options of a reply."""

    num_choices: int  # per prompt
    echoes: list[str] | None  # prompts to repeat in the choices
    num_top: int | None  # top logprobs per token; None: no logprobs
    is_streamed: bool
    has_usage: bool = False  # in the last event of a stream
    has_running_usage: bool = False  # in every event

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if logprobs of prompt tokens are shown."""
        return self.echoes is not None and self.num_top is not None


def read_request(
    served: Served, body: bytes, *, is_chat: bool
) -> tuple[ParsedBody, Shown]:
    """Parse a client's body; see `read_fields`.

    Args:
        served: the model.
        body: JSON.
        is_chat: whether the body has "messages" instead of a "prompt".
    """
    return read_fields(served, read_json(body), is_chat=is_chat)


def read_json(body: bytes) -> Mapping[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        Refused: for any other body.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(fields, Mapping):
        raise Refused("the body must be an object")
    check_texts(fields)
    return fields


def read_fields(
    served: Served, fields: Mapping[str, Any], *, is_chat: bool
) -> tuple[ParsedBody, Shown]:
    """Parse the fields of a body into engine arguments and display options.

    Raises:
        Refused: for invalid or unsupported fields, with a message for the client.
        ValueError: likewise.
    """
    check_fields(fields, is_chat=is_chat)
    check_model(served, fields.get("model"))
    parsed = read_body(served, fields, is_chat=is_chat)
    shown = _read_shown(served, fields, parsed, is_chat=is_chat)
    best_of = _read_best_of(fields, parsed.n, shown)
    calls = None if parsed.tools is None else parsed.tools.language
    language = read_language(fields, calls)
    if language is not None and not served.has_languages:
        raise Refused(
            f"{language.param} is not enabled: start the server with --grammars",
            language.param,
            code="unsupported_parameter",
        )
    rules = read_rules(
        served,
        fields,
        stop_tokens=parsed.request.stop_tokens,
        max_new_tokens=parsed.request.max_new_tokens,
        has_language=language is not None,
    )
    request = dataclasses.replace(parsed.request, n=best_of)
    return parsed._replace(request=request, language=language, rules=rules), shown


def count_chat(served: Served, fields: Mapping[str, Any]) -> int:
    """Return the number of tokens of a chat's prompt; it may exceed the context.

    Raises:
        Refused: for invalid or unsupported fields.
    """
    check_fields(fields, is_chat=True)
    check_model(served, fields.get("model"))
    tools = read_tools(fields, served.tool_tags)
    (tokens,) = read_chat(served, fields, [] if tools is None else tools.listed)
    return len(tokens)


def check_model(served: Served, model: Any) -> None:
    """Refuse the name of another model; None is accepted."""
    if model is not None and model != served.name:
        raise Refused(
            f"the model {str(model)[:60]!r} does not exist; this server has "
            f"{served.name!r}",
            "model",
            status=404,
            code="model_not_found",
        )


def _read_shown(
    served: Served, body: Mapping[str, Any], parsed: ParsedBody, *, is_chat: bool
) -> Shown:
    is_streamed = read_flag(body, "stream", False)
    num_top = _read_num_top(body, is_chat=is_chat)
    echoes = None
    if not is_chat and read_flag(body, "echo", False):
        echoes = read_prompt_texts(served, body)
    if served.scorer is None and (num_top or (echoes and num_top is not None)):
        raise Refused(
            "logprobs of other tokens and of prompts are not supported: the model "
            "has recurrent states or runs in several processes",
            "logprobs",
            code="unsupported_parameter",
        )
    has_usage, is_running = _read_stream_options(body, is_streamed=is_streamed)
    return Shown(parsed.n, echoes, num_top, is_streamed, has_usage, is_running)


def _read_num_top(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """Return the number of top logprobs per token; None for no logprobs."""
    if is_chat:
        num_top: int = read_number(body, "top_logprobs", 0, int, 0, MOST_TOP)
        if read_flag(body, "logprobs", False):
            return num_top
        if num_top:
            raise Refused("top_logprobs requires logprobs", "top_logprobs")
        return None
    given = body.get("logprobs")
    if given is None or given is False:
        return None
    return int(read_number(body, "logprobs", 0, int, 0, MOST_TOP))


def _read_stream_options(
    body: Mapping[str, Any], *, is_streamed: bool
) -> tuple[bool, bool]:
    """Return flags: token counts in the last event of a stream, and in every event."""
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, Mapping) or (options and not is_streamed):
        raise Refused(
            "stream_options must be an object, and requires stream", "stream_options"
        )
    for name, value in options.items():
        is_served = name in ("include_usage", "continuous_usage_stats")
        is_nothing = value is None or value is False
        if not is_served and not is_nothing:
            name = f"stream_options.{name[:60]}"
            raise Refused(f"{name} is not supported; omit it", name)
    is_running = read_flag(options, "continuous_usage_stats", False)
    has_usage = read_flag(options, "include_usage", False)
    return has_usage, has_usage and is_running


def _read_best_of(body: Mapping[str, Any], n: int, shown: Shown) -> int:
    best_of = read_number(body, "best_of", n, int, 1, MOST_SAMPLES)
    if best_of < n:
        raise Refused(f"best_of must be at least n, {n}, got {best_of}", "best_of")
    if best_of > n and shown.is_streamed:
        raise Refused(
            "best_of must equal n with stream, as the best are known at the end",
            "best_of",
        )
    return best_of
