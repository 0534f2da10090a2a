"""Write the reply of `/v1/messages`, whole or as a stream of events.

A message is a list of blocks: texts and tool calls.
"""

import dataclasses
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jkv import FinishReason
from jkv.serving import Completion, Event

from ..asking.showing import ParsedBody
from ..loading import Served
from ..mistakes import Refused
from ..replying.replies import Choice
from .reading import list_message_warnings, read_most_tokens

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def write_error(error: Refused) -> dict[str, Any]:
    """Return an error in the API's format."""
    kind = KINDS.get(error.status, "api_error")
    words = error.body["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": words}}


@dataclasses.dataclass
class Block:
    """A text or a tool call, possibly incomplete."""

    index: int
    text: str = ""  # or a call's arguments
    call: dict[str, str] | None = None  # its id and name
    number: int = -1  # of the call

    def write(self, *, is_begun: bool = False) -> dict[str, Any]:
        """Return the block in the API's format."""
        if self.call is None:
            return {"type": "text", "text": "" if is_begun else self.text}
        try:
            given = json.loads(self.text)
        except ValueError:  # truncated
            given = {}
        return {"type": "tool_use", **self.call, "input": {} if is_begun else given}


class MessageReply:
    """A message, with the interface of `Reply`."""

    is_scored = False

    def __init__(self, body: Mapping[str, Any], served: Served, parsed: ParsedBody):
        self._served, self._asked = served, parsed
        self._is_bounded = parsed.request.max_new_tokens < read_most_tokens(body)
        warnings = [
            *parsed.warn(served).get("warnings", []),
            *list_message_warnings(body),
        ]
        self._warnings = {"warnings": warnings} if warnings else {}
        self._name = f"msg_{uuid.uuid4().hex}"
        (self._prompt,) = parsed.prompts
        self._choice = Choice(
            served,
            self._prompt,
            "",
            None,
            None,
            is_chat=True,
            has_calls=parsed.has_calls,
            has_answer=parsed.has_answer,
        )
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._tokens: list[int] = []
        self._text = ""
        self._num_cached = 0
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def whole(self, found: Sequence[Completion], num_new: int) -> dict[str, Any]:
        """Return the whole message."""
        del num_new
        for _ in self._take(found[0]):
            pass
        return self._write([each.write() for each in self._blocks])

    def write_opening(self) -> str:
        """Return the first events of a stream."""
        return _event("message_start", message=self._write([])) + _event("ping")

    def write_piece(self, index: int, event: Event) -> str:
        """Return the events of a new part."""
        del index
        return "".join(self._take(event))

    def write_closing(self) -> str:
        """Return the last events of a stream."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return _event("message_delta", delta=delta, usage=self._count()) + _event(
            "message_stop"
        )

    def write_failure(self, error: Mapping[str, Any]) -> str:
        """Return the last event of a stream that failed."""
        described = {"type": "api_error", "message": error["error"]["message"]}
        return _event("error", error=described)

    def _take(self, new: Completion | Event) -> Iterator[str]:
        """Process a new part; yield its events."""
        self._tokens += new.tokens
        self._text += new.text or ""
        self._num_cached = new.cached_tokens
        written = self._choice.write(new, "delta")
        delta = written["delta"]
        calls = list(delta.get("tool_calls", ()))
        # The rest of an open call precedes the other parts.
        while (
            calls and self._open is not None and calls[0]["index"] == self._open.number
        ):
            yield self._add_arguments(calls.pop(0))
        if delta.get("content"):
            yield from self._add_text(delta["content"])
        for call in calls:
            yield from self._begin_call(call)
        if new.reason != FinishReason.RUNNING:
            self._find_reason(new.reason, written["finish_reason"])
            if not self._blocks:
                yield from self._add_text("")
            yield from self._close()

    def _add_text(self, text: str) -> Iterator[str]:
        if self._open is None or self._open.call is not None:
            yield from self._begin(None, -1)
        assert self._open is not None, "it was begun"
        self._open.text += text
        delta = {"type": "text_delta", "text": text}
        yield _event("content_block_delta", index=self._open.index, delta=delta)

    def _begin_call(self, call: Mapping[str, Any]) -> Iterator[str]:
        known = {"id": call["id"], "name": call["function"]["name"]}
        yield from self._begin(known, call["index"])
        if call["function"]["arguments"]:
            yield self._add_arguments(call)

    def _add_arguments(self, call: Mapping[str, Any]) -> str:
        assert self._open is not None, "it was begun"
        part = call["function"]["arguments"]
        self._open.text += part
        delta = {"type": "input_json_delta", "partial_json": part}
        return _event("content_block_delta", index=self._open.index, delta=delta)

    def _begin(self, call: dict[str, str] | None, number: int) -> Iterator[str]:
        yield from self._close()
        block = self._open = Block(len(self._blocks), "", call, number)
        self._blocks.append(block)
        begun = block.write(is_begun=True)
        yield _event("content_block_start", index=block.index, content_block=begun)

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._open.index)
            self._open = None

    def _find_reason(self, reason: FinishReason, word: str | None) -> None:
        """Set the stop reason, and the stop sequence if one ended the completion."""
        if word == "length":
            context = "model_context_window_exceeded"
            is_limit = reason == FinishReason.LENGTH and not self._is_bounded
            self._stop_reason = "max_tokens" if is_limit else context
            return
        self._stop_reason = "tool_use" if word == "tool_calls" else "end_turn"
        request = self._asked.request
        is_end = self._tokens[-1:] and self._tokens[-1] in tuple(
            request.stop_tokens or ()
        )
        if is_end or not request.stop_strings:
            return
        decode = self._served.tokenizer.decode
        text = decode([*self._prompt, *self._tokens])[len(decode(self._prompt)) :]
        rest = text[len(self._text) :]  # the stop string and the rest of its token
        stops = [stop for stop in request.stop_strings if rest.startswith(stop)]
        if stops:
            self._stop_reason, self._stop_sequence = "stop_sequence", stops[0]

    def _write(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the message in its current state."""
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._count(),
            **self._warnings,
        }

    def _count(self) -> dict[str, Any]:
        """Return the token counts; cached tokens are counted separately."""
        return {
            "input_tokens": len(self._prompt) - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": len(self._tokens),
        }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
