"""Write the reply of `/v1/responses`, whole or as a stream of events.

A response has one message for free text and one item per tool call.
"""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jkv import FinishReason
from jkv.serving import Completion, Event

from ..asking.showing import ParsedBody, Shown
from ..loading import Served
from ..replying.calls import CallPart
from ..replying.replies import Choice, write_event
from .offered import Origin, read_custom_input, read_offered
from .reading import list_warnings

# Fields of a body that are repeated in its response, with defaults.
REPEATED = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "top_logprobs": 0,
    "user": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
}


@dataclasses.dataclass
class Item:
    """A message or a tool call, possibly incomplete."""

    place: int  # index in the output
    name: str  # id
    text: str = ""  # of the message, or a call's arguments
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    call: CallPart | None = None  # the first part of a call
    origin: Origin | None = None  # the tool that is called

    @property
    def is_custom(self) -> bool:
        """True for a call of a custom tool."""
        return self.origin is not None and self.origin.is_custom

    def write(self, status: str) -> dict[str, Any]:
        """Return the item in the API's format."""
        if self.call is not None and self.origin is not None:
            namespace = self.origin.namespace
            called = {"call_id": self.call.id, "name": self.origin.name}
            if self.is_custom:
                kind, given = "custom_tool_call", {"input": self.input}
            else:
                kind, given = "function_call", {"arguments": self.text}
            return {
                "id": self.name,
                "type": kind,
                "status": status,
                **called,
                **({} if namespace is None else {"namespace": namespace}),
                **given,
            }
        is_begun = status == "in_progress"
        return {
            "id": self.name,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if is_begun else [self.write_part()],
        }

    @property
    def input(self) -> str:
        """Input of a custom tool."""
        return read_custom_input(self.text)

    def write_part(self) -> dict[str, Any]:
        """Return the message's text as a content part."""
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }


class ResponseReply:
    """A response, with the interface of `Reply`."""

    def __init__(
        self,
        body: Mapping[str, Any],
        served: Served,
        parsed: ParsedBody,
        shown: Shown,
    ):
        self._body, self._served = body, served
        warnings = [*parsed.warn(served).get("warnings", []), *list_warnings(body)]
        self._warnings = {"warnings": warnings} if warnings else {}
        self._offered = read_offered(body)
        self._used = {
            "temperature": parsed.request.sampling.temperature,
            "top_p": parsed.request.sampling.top_p,
            "max_output_tokens": parsed.request.max_new_tokens,
            "tools": self._offered.left,
        }
        self._name, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        (prompt,) = parsed.prompts
        self._choice = Choice(
            served,
            prompt,
            "",
            shown.num_top,
            None,
            is_chat=True,
            has_calls=parsed.has_calls,
            has_answer=parsed.has_answer,
        )
        self._num_prompt, self._num_new, self._num_cached = len(prompt), 0, 0
        self.is_scored = bool(shown.num_top)
        self._items: list[Item] = []
        self._message: Item | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens without text so far
        self._calls: dict[int, Item] = {}
        self._reason = FinishReason.RUNNING
        self._numbers = itertools.count()

    def whole(self, found: Sequence[Completion], num_new: int) -> dict[str, Any]:
        """Return the whole response."""
        del num_new
        for _ in self._take(found[0]):
            pass
        return self._write(self._status)

    def write_opening(self) -> str:
        """Return the first events of a stream."""
        begun = self._write("in_progress")
        return "".join(
            self._event(f"response.{kind}", response=begun)
            for kind in ("created", "in_progress")
        )

    def write_piece(self, index: int, event: Event) -> str:
        """Return the events of a new part."""
        del index
        return "".join(self._take(event))

    def write_closing(self) -> str:
        """Return the last events of a stream."""
        ended = self._write(self._status)
        return self._event(f"response.{self._status}", response=ended)

    def write_failure(self, error: Mapping[str, Any]) -> str:
        """Return the last event of a stream that failed."""
        described = {"code": "server_error", "message": error["error"]["message"]}
        failed = self._write("failed") | {"error": described}
        return self._event("response.failed", response=failed)

    def _take(self, new: Completion | Event) -> Iterator[str]:
        """Process a new part; yield its events."""
        scored = None
        if self.is_scored and self._served.scorer is not None:
            (scored,) = self._served.scorer.score([self._choice.tokens_before(new)])
        written = self._choice.write(new, "delta", scored)
        self._num_new += len(new.tokens)
        self._num_cached = new.cached_tokens
        self._reason = new.reason
        delta = written["delta"]
        self._logprobs += (written["logprobs"] or {}).get("content", [])
        if delta.get("content"):
            yield from self._add_text(delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._add_call(call)
        if self._reason != FinishReason.RUNNING:
            if not self._items or (self._message and self._logprobs):
                yield from self._add_text("")
            for item in self._items:
                yield from self._end(item)

    def _add_text(self, text: str) -> Iterator[str]:
        if self._message is None:
            self._message = item = self._begin("msg")
            yield self._added(item)
            yield self._of_part(
                "response.content_part.added", item, part=item.write_part()
            )
        item, logprobs, self._logprobs = self._message, self._logprobs, []
        item.text += text
        item.logprobs += logprobs
        yield self._of_part(
            "response.output_text.delta", item, delta=text, logprobs=logprobs
        )

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[str]:
        function, number = call["function"], call["index"]
        if number not in self._calls:
            item = self._calls[number] = self._begin("fc")
            item.call = CallPart(number, "", function["name"], call["id"])
            known, name = self._offered.origins, function["name"]
            item.origin = known.get(name, Origin(name))
            yield self._added(item)
        item = self._calls[number]
        if function["arguments"]:
            item.text += function["arguments"]
            if item.is_custom:
                return  # the input is sent at the end
            yield self._of_item(
                "response.function_call_arguments.delta",
                item,
                delta=function["arguments"],
            )

    def _begin(self, kind: str) -> Item:
        item = Item(len(self._items), f"{kind}_{uuid.uuid4().hex}")
        self._items.append(item)
        return item

    def _end(self, item: Item) -> Iterator[str]:
        if item.is_custom:
            kind = "response.custom_tool_call_input"
            yield self._of_item(f"{kind}.delta", item, delta=item.input)
            yield self._of_item(f"{kind}.done", item, input=item.input)
        elif item.call is not None and item.origin is not None:
            yield self._of_item(
                "response.function_call_arguments.done",
                item,
                arguments=item.text,
                name=item.origin.name,
            )
        else:
            yield self._of_part(
                "response.output_text.done",
                item,
                text=item.text,
                logprobs=item.logprobs,
            )
            yield self._of_part(
                "response.content_part.done", item, part=item.write_part()
            )
        yield self._event(
            "response.output_item.done",
            output_index=item.place,
            item=item.write(self._status),
        )

    @property
    def _status(self) -> str:
        """The API's status of the finished response."""
        is_whole = self._reason == FinishReason.STOP
        return "completed" if is_whole else "incomplete"

    def _write(self, status: str) -> dict[str, Any]:
        """Return the response in its current state."""
        is_begun = status == "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        repeated = {name: self._body.get(name) for name in REPEATED}
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._served.name,
            "output": [] if is_begun else [each.write(status) for each in self._items],
            "usage": None if is_begun else self._count(),
            "previous_response_id": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "truncation": "disabled",
            **self._used,
            **{n: REPEATED[n] if v is None else v for n, v in repeated.items()},
            **self._warnings,
        }

    def _count(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached},
            "output_tokens": self._num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt + self._num_new,
        }

    def _added(self, item: Item) -> str:
        return self._event(
            "response.output_item.added",
            output_index=item.place,
            item=item.write("in_progress"),
        )

    def _of_item(self, kind: str, item: Item, **fields: Any) -> str:
        return self._event(kind, item_id=item.name, output_index=item.place, **fields)

    def _of_part(self, kind: str, item: Item, **fields: Any) -> str:
        return self._of_item(kind, item, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\n{write_event(event)}"
