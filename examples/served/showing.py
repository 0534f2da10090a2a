"""What a client of the API asks for: checked field by field, and how it is shown."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .asking import MOST_SAMPLES, Asked, read_body
from .fields import check_fields, check_texts
from .languages import read_language
from .loading import Served
from .mistakes import Refused
from .prompts import read_prompt_texts
from .rules import read_rules
from .values import read_flag, read_number


class Shown(NamedTuple):
    """What a reply shows of what comes."""

    num_choices: int  # of each prompt
    echoes: list[str]  # what each prompt's choices begin with
    has_logprobs: bool
    is_streamed: bool
    has_usage: bool  # at the end of a stream


def read_request(served: Served, body: bytes, *, is_chat: bool) -> tuple[Asked, Shown]:
    """Understand a client's body.

    Args:
        served: the model.
        body: JSON.
        is_chat: whether "messages" are continued, not a "prompt".

    Raises:
        Refused: for what cannot be or is not served, in words for the client.
        ValueError: likewise.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(fields, Mapping):
        raise Refused("the body must be an object")
    check_texts(fields)
    check_fields(fields, is_chat=is_chat)
    check_model(served, fields.get("model"))
    asked = read_body(served, fields, is_chat=is_chat)
    shown = _read_shown(served, fields, asked, is_chat=is_chat)
    best_of = _read_best_of(fields, asked.n, shown)
    calls = None if asked.tools is None else asked.tools.language
    language = read_language(fields, calls)
    if language is not None and not served.has_languages:
        raise Refused(
            f"{language.param} is not served here: start the server with --grammars",
            language.param,
            code="unsupported_parameter",
        )
    rules = read_rules(
        served,
        fields,
        stop_tokens=asked.ask.stop_tokens,
        max_new_tokens=asked.ask.max_new_tokens,
        has_language=language is not None,
    )
    ask = dataclasses.replace(asked.ask, n=best_of)
    return asked._replace(ask=ask, language=language, rules=rules), shown


def check_model(served: Served, model: Any) -> None:
    """Refuse the name of another model; none is the one that is served."""
    if model is not None and model != served.name:
        raise Refused(
            f"the model {str(model)[:60]!r} is not served here; {served.name!r} is",
            "model",
            status=404,
            code="model_not_found",
        )


def _read_shown(
    served: Served, body: Mapping[str, Any], asked: Asked, *, is_chat: bool
) -> Shown:
    is_streamed = read_flag(body, "stream", False)
    has_logprobs = _read_logprobs(body, is_chat=is_chat)
    echoes = [""] * len(asked.prompts)
    if not is_chat and read_flag(body, "echo", False):
        if has_logprobs:
            raise Refused(
                "echo with logprobs is not served: those of a prompt are not told",
                "echo",
            )
        echoes = read_prompt_texts(served, body)
    has_usage = _read_stream_options(body, is_streamed=is_streamed)
    return Shown(asked.n, echoes, has_logprobs, is_streamed, has_usage)


def _read_logprobs(body: Mapping[str, Any], *, is_chat: bool) -> bool:
    if is_chat:
        return read_flag(body, "logprobs", False)
    if body.get("logprobs") is None:
        return False
    if read_number(body, "logprobs", 0, int, 0, 5) > 0:
        raise Refused(
            "logprobs above 0 are not served: each token's own logprob is told, not "
            "those of others; give 0",
            "logprobs",
            code="unsupported_parameter",
        )
    return True


def _read_stream_options(body: Mapping[str, Any], *, is_streamed: bool) -> bool:
    """Return whether the tokens are counted at the end of a stream."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping) or not is_streamed:
        raise Refused(
            "stream_options is an object, and goes with stream", "stream_options"
        )
    for name, value in options.items():
        if name != "include_usage" and value is not None and value is not False:
            name = f"stream_options.{name[:60]}"
            raise Refused(f"{name} is not served; leave it out", name)
    return read_flag(options, "include_usage", False)


def _read_best_of(body: Mapping[str, Any], n: int, shown: Shown) -> int:
    best_of = read_number(body, "best_of", n, int, 1, MOST_SAMPLES)
    if best_of < n:
        raise Refused(f"best_of must be n, {n}, or more, got {best_of}", "best_of")
    if best_of > n and shown.is_streamed:
        raise Refused("best_of above n is known at the end: without stream", "best_of")
    return best_of
