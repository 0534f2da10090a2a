"""Replies in the format of OpenAI's API: completions, chats and their chunks."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jkv import FinishReason
from jkv.serving import Completion, Event

from ..asking.showing import ParsedBody, Shown
from ..loading import Served
from ..mistakes import Refused
from .calls import CallPart, CallReader
from .logprobs import TokenTeller, write_of_chat, write_of_text
from .scoring import Scored

# The API has fewer finish reasons than the engine.
REASONS = {
    FinishReason.RUNNING: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.OUT_OF_BLOCKS: "length",
}


class Reply:
    """Reply of a request: common fields and choices."""

    def __init__(
        self,
        served: Served,
        parsed: ParsedBody,
        shown: Shown,
        scored: Sequence[Scored] = (),
        *,
        is_chat: bool,
    ):
        """Create the choices.

        Args:
            served: the model.
            parsed: the engine's arguments.
            shown: the display options.
            scored: scores of each prompt, if logprobs of prompts are shown.
            is_chat: whether this is a chat.
        """
        kind = "chatcmpl" if is_chat else "cmpl"
        self.name = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())  # seconds
        self._served, self._shown, self._is_chat = served, shown, is_chat
        self._num_prompt = sum(map(len, parsed.prompts))
        self._num_new = 0
        self._warnings = parsed.warn(served)
        self._num_cached = [0] * len(parsed.prompts)  # per prompt
        echoes = shown.echoes or [""] * len(parsed.prompts)
        self._choices = [
            Choice(
                served,
                prompt,
                echo,
                shown.num_top,
                scored[i] if scored else None,
                is_chat=is_chat,
                has_calls=parsed.has_calls,
                has_answer=parsed.has_answer,
            )
            for i, (prompt, echo) in enumerate(zip(parsed.prompts, echoes, strict=True))
            for _ in range(shown.num_choices)
        ]

    @property
    def is_scored(self) -> bool:
        """True if top logprobs are shown, which need another run of the model."""
        return bool(self._shown.num_top)

    def whole(self, found: Sequence[Completion], num_new: int) -> dict[str, Any]:
        """Return the whole reply.

        Args:
            found: the completion of each choice.
            num_new: number of new tokens, including completions that are not shown.
        """
        pairs = list(zip(self._choices, found, strict=True))
        for index, each in enumerate(found):
            self._note_cached(index, each)
        scored = self._score([choice.tokens_before(each) for choice, each in pairs])
        choices = [
            {"index": i, **choice.write(each, "message", scores)}
            for i, ((choice, each), scores) in enumerate(
                zip(pairs, scored, strict=True)
            )
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": self._count(num_new)}

    def write_opening(self) -> str:
        """Return the first events of a stream; here none."""
        return ""

    def write_piece(self, index: int, event: Event) -> str:
        """Return the event with a new part of choice `index`."""
        return write_event(self._piece(index, event))

    def write_closing(self) -> str:
        """Return the last events of a stream, with the token counts if requested."""
        closing = ""
        if self._shown.has_usage:
            usage = {"usage": self._count(self._num_new)}
            closing = write_event(self._frame(self._piece_kind, []) | usage)
        return closing + "data: [DONE]\n\n"

    def write_failure(self, error: dict[str, Any]) -> str:
        """Return the last event of a stream that failed."""
        return write_event(error)

    def _piece(self, index: int, event: Event) -> dict[str, Any]:
        choice = self._choices[index]
        (scores,) = self._score([choice.tokens_before(event)])
        self._num_new += len(event.tokens)
        self._note_cached(index, event)
        written = {"index": index, **choice.write(event, "delta", scores)}
        found = self._frame(self._piece_kind, [written])
        if self._shown.has_running_usage:
            return found | {"usage": self._count(choice.num_new)}
        return found | ({"usage": None} if self._shown.has_usage else {})

    def _note_cached(self, index: int, new: Completion | Event) -> None:
        """Record the cached tokens of a choice's prompt; samples share prompts."""
        prompt = index // self._shown.num_choices
        known = self._num_cached[prompt]
        self._num_cached[prompt] = max(known, new.cached_tokens)

    def _score(self, sequences: list[list[int]]) -> list[Scored | None]:
        """Return scores if top logprobs are shown, else None for each sequence."""
        if not self.is_scored or self._served.scorer is None:
            return [None] * len(sequences)
        return [*self._served.scorer.score(sequences)]

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # Only the first chunk of a stream has warnings.
        warnings, self._warnings = self._warnings, {}
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self._served.name,
            "choices": choices,
        } | warnings

    def _count(self, num_new: int) -> dict[str, Any]:
        """Return the API's token counts."""
        counts = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_new,
            "total_tokens": self._num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
        if self._served.roll is None:
            return counts
        lengths = [choice.num_tokens for choice in self._choices]
        return counts | {
            "dropped_tokens": sum(map(self._served.count_dropped, lengths))
        }


class Choice:
    """One completion of a reply, written whole or in parts."""

    def __init__(
        self,
        served: Served,
        prompt: Sequence[int],
        echo: str,
        num_top: int | None,
        scored: Scored | None,
        *,
        is_chat: bool,
        has_calls: bool,
        has_answer: bool,
    ):
        self._calls: CallReader | None = None
        if has_calls:
            self._calls = CallReader(*served.tool_tags, has_answer=has_answer)
        self._served, self._prompt, self._is_chat = served, list(prompt), is_chat
        self._echo, self._scored, self._new = echo, scored, list[int]()
        self._shown_echo = echo
        self._is_begun = False
        self._logprobs: TokenTeller | None = None
        if num_top is not None:
            self._logprobs = TokenTeller(served, prompt, num_top)

    @property
    def num_new(self) -> int:
        """Number of new tokens so far."""
        return len(self._new)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the completion so far."""
        return len(self._prompt) + len(self._new)

    def tokens_before(self, new: Completion | Event) -> list[int]:
        """Return all tokens up to, but not including, the last one of `new`."""
        return [*self._prompt, *self._new, *new.tokens[:-1]]

    def write(
        self, new: Completion | Event, part: str, scored: Scored | None = None
    ) -> dict[str, Any]:
        """Return the new part, or the whole choice, in the API's format.

        Args:
            new: the new event or completion.
            part: "message" for a whole choice, "delta" for a part.
            scored: scores of `tokens_before`.
        """
        text, self._echo = self._echo + (new.text or ""), ""
        reason = REASONS[new.reason]
        if self._calls is not None:
            written = {part: self._write_calls(self._calls, new, part)}
            if reason == "stop" and self._calls.has_called:
                reason = "tool_calls"
        elif self._is_chat:
            written = {part: {"content": text}}
        else:
            written = {"text": text}
        if self._is_chat and not self._is_begun:
            # Only in the first chunk, since clients concatenate the fields of chunks.
            written[part] = {"role": "assistant", **written[part]}
        logprobs = self._write_logprobs(new, scored)
        self._is_begun = True
        self._new += new.tokens
        return {**written, "logprobs": logprobs, "finish_reason": reason}

    def _write_calls(
        self, calls: CallReader, new: Completion | Event, part: str
    ) -> dict[str, Any]:
        """Return the message or its new part: free text and tool calls."""
        is_last = new.reason != FinishReason.RUNNING
        parsed = calls.advance(new.text or "", is_last=is_last)
        written: dict[str, Any] = {"content": parsed.content}
        if parsed.calls:
            whole = join_parts(parsed.calls)
            if part == "message":
                whole = [
                    {k: v for k, v in one.items() if k != "index"} for one in whole
                ]
            written |= {"content": parsed.content or None, "tool_calls": whole}
        return written

    def _write_logprobs(
        self, new: Completion | Event, scored: Scored | None
    ) -> dict[str, Any] | None:
        """Return the logprobs of new tokens, after the prompt's if they are shown."""
        if self._logprobs is None:
            return None
        shown = []
        if self._scored is not None and not self._is_begun:
            shown += self._logprobs.read_prompt(self._scored, self._shown_echo)
        shown += self._logprobs.read(new, scored)
        write = write_of_chat if self._is_chat else write_of_text
        return write(self._served, shown)


def join_parts(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    """Join the parts of each call, in the API's format."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part.index, {"index": part.index, "function": {}})
        function = call["function"]
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            function["name"] = part.name
        function["arguments"] = function.get("arguments", "") + part.arguments
    return list(calls.values())


def select_likely(completions: list[Completion], count: int) -> list[Completion]:
    """Return the `count` completions with the largest mean logprob, best first."""
    if count == len(completions):
        return completions

    def measure(completion: Completion) -> float:
        return (
            sum(completion.logprobs) / len(completion.tokens)
            if completion.tokens
            else -float("inf")
        )

    return sorted(completions, key=measure, reverse=True)[:count]


def check_reason(reason: FinishReason) -> None:
    """Raise if generation ended by other causes than a stop or a length limit.

    Raises:
        Refused: for other causes.
    """
    if reason in REASONS:
        return
    if reason == FinishReason.NAN_LOGITS:
        raise Refused(
            "the model returned NaN logits; generation cannot continue",
            status=500,
            code="nan_logits",
        )
    if reason == FinishReason.CANCELLED:
        raise Refused("the server is shutting down", status=503)
    if reason == FinishReason.DEADLINE:
        raise refuse_overdue()
    if reason == FinishReason.NOTHING_ALLOWED:
        raise Refused(
            "no token is allowed: the request's grammar, min_tokens, "
            "bad_words and allowed_token_ids exclude all of them",
            code="nothing_allowed",
        )
    name = reason.name.lower()
    raise Refused(f"generation ended: {name}", status=500, code=name)


def refuse_overdue() -> Refused:
    """Return the error of a timed-out request."""
    return Refused(
        "the text was not done within its timeout",
        status=504,
        code="deadline",
        # Otherwise OpenAI's client would retry.
        headers={"x-should-retry": "false"},
    )


def write_event(found: dict[str, Any]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(found)}\n\n"
