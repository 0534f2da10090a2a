"""Request and reply formats by endpoint path."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..asking.showing import ParsedBody, Shown
from ..loading import Served
from ..messages import reading as messages
from ..messages.reading import read_message_body, read_most_tokens
from ..messages.writing import MessageReply, write_error
from ..mistakes import Refused
from ..responses import reading as responses
from ..responses.reading import read_response
from ..responses.writing import ResponseReply
from .replies import Reply
from .scoring import Scored

Fields = Mapping[str, Any]
AnyReply = Reply | ResponseReply | MessageReply


class Kind(NamedTuple):
    """Functions of an endpoint: parse its body and write its reply."""

    is_chat: bool
    read: Callable[[Fields], Fields]  # converts a body to completion or chat fields
    # Arguments: model, body, engine arguments, display options, scores of the prompts.
    reply: Callable[[Served, Fields, ParsedBody, Shown, Sequence[Scored]], AnyReply]
    names: Mapping[str, str] = {}  # its names of chat fields
    write_error: Callable[[Refused], dict[str, Any]] = lambda error: error.body
    # Limits the request by its body.
    bound: Callable[[Served, Fields, ParsedBody], ParsedBody] = lambda _, __, parsed: (
        parsed
    )

    def rename(self, error: Refused) -> Refused:
        """Return the error with the field's name in this endpoint."""
        error.param = self.names.get(error.param or "", error.param)
        return error


def _reply_in_text(
    served: Served,
    _: Fields,
    parsed: ParsedBody,
    shown: Shown,
    scored: Sequence[Scored],
) -> Reply:
    return Reply(served, parsed, shown, scored, is_chat=False)


def _reply_in_chat(
    served: Served,
    _: Fields,
    parsed: ParsedBody,
    shown: Shown,
    scored: Sequence[Scored],
) -> Reply:
    return Reply(served, parsed, shown, scored, is_chat=True)


def _reply_in_response(
    served: Served,
    body: Fields,
    parsed: ParsedBody,
    shown: Shown,
    _: Sequence[Scored],
) -> ResponseReply:
    return ResponseReply(body, served, parsed, shown)


def _reply_in_message(
    served: Served, body: Fields, parsed: ParsedBody, _: Shown, __: Sequence[Scored]
) -> MessageReply:
    return MessageReply(body, served, parsed)


def _bound_message(served: Served, body: Fields, parsed: ParsedBody) -> ParsedBody:
    """Return the request with `max_new_tokens` limited to the context."""
    # The last token needs no slot.
    room = served.context - len(parsed.prompts[0]) + 1
    most = min(read_most_tokens(body), room)
    return parsed._replace(
        request=dataclasses.replace(parsed.request, max_new_tokens=most)
    )


KINDS = {
    "/v1/completions": Kind(False, dict, _reply_in_text),
    "/v1/chat/completions": Kind(True, dict, _reply_in_chat),
    "/v1/responses": Kind(True, read_response, _reply_in_response, responses.NAMES),
    "/v1/messages": Kind(
        True,
        read_message_body,
        _reply_in_message,
        messages.NAMES,
        write_error,
        _bound_message,
    ),
}
