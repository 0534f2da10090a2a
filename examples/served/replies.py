"""Replies in the words of OpenAI's API: texts and chats, and pieces of both."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from jkv import FinishReason
from jkv.serving import Completion, Event
from jkv.serving.request.texts import TextStream

from .calls import CallPart, CallReader
from .loading import Served
from .mistakes import Refused
from .showing import Asked, Shown

# The API has few words for why a text ended.
REASONS = {
    FinishReason.RUNNING: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.OUT_OF_BLOCKS: "length",
}

LEAST_LOGPROB = -9999.0  # as the API writes what is less likely


class Reply:
    """One reply: what all of its parts have in common, and its choices."""

    def __init__(self, served: Served, asked: Asked, shown: Shown, *, is_chat: bool):
        kind = "chatcmpl" if is_chat else "cmpl"
        self.name = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())  # seconds
        self._model, self._is_chat = served.name, is_chat
        self._num_prompt = sum(map(len, asked.prompts))
        self._choices = [
            Choice(
                served,
                prompt,
                echo,
                shown.has_logprobs,
                is_chat=is_chat,
                may_call=asked.tools is not None and asked.tools.language is not None,
            )
            for prompt, echo in zip(asked.prompts, shown.echoes, strict=True)
            for _ in range(shown.num_choices)
        ]

    def whole(self, found: Sequence[Completion], num_new: int) -> dict[str, Any]:
        """Return the whole reply.

        Args:
            found: what came of each choice.
            num_new: tokens, those of texts that are not shown, too.
        """
        choices = [
            {"index": i, **choice.write(each, "message")}
            for i, (choice, each) in enumerate(zip(self._choices, found, strict=True))
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._frame(kind, choices) | self._usage(num_new)

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        """Return a part of choice `index`."""
        choice = {"index": index, **self._choices[index].write(event, "delta")}
        return self._frame(self._piece_kind, [choice])

    def closing(self, num_new: int) -> dict[str, Any]:
        """Return the part that says what it took."""
        return self._frame(self._piece_kind, []) | self._usage(num_new)

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self, num_new: int) -> dict[str, Any]:
        """Return the tokens that the reply took."""
        counts = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_new,
            "total_tokens": self._num_prompt + num_new,
        }
        return {"usage": counts}


class Choice:
    """One text of a reply, written at once or in pieces."""

    def __init__(
        self,
        served: Served,
        prompt: Sequence[int],
        echo: str,
        has_logprobs: bool,
        *,
        is_chat: bool,
        may_call: bool,
    ):
        self._calls = CallReader(*served.tool_tags) if may_call else None
        self._echo, self._is_chat = echo, is_chat
        self._tokens: TextStream | None = None
        if has_logprobs:
            self._tokens = TextStream(served.tokenizer.decode, prompt, ())

    def write(self, new: Completion | Event, part: str) -> dict[str, Any]:
        """Return what is new, or all, in the API's words."""
        text, self._echo = self._echo + (new.text or ""), ""
        reason = REASONS[new.reason]
        if self._calls is not None:
            written = {part: self._write_calls(self._calls, new, part)}
            if reason == "stop" and self._calls.has_called:
                reason = "tool_calls"
        elif self._is_chat:
            written = {part: {"role": "assistant", "content": text}}
        else:
            written = {"text": text}
        return {
            **written,
            "logprobs": self._write_logprobs(new),
            "finish_reason": reason,
        }

    def _write_calls(
        self, calls: CallReader, new: Completion | Event, part: str
    ) -> dict[str, Any]:
        """Return the message, or what is new of it: free text, and calls of tools."""
        is_last = new.reason != FinishReason.RUNNING
        told = calls.advance(new.text or "", is_last=is_last)
        written: dict[str, Any] = {"role": "assistant", "content": told.content}
        if told.calls:
            whole = join_parts(told.calls)
            if part == "message":
                whole = [
                    {k: v for k, v in one.items() if k != "index"} for one in whole
                ]
            written |= {"content": told.content or None, "tool_calls": whole}
        return written

    def _write_logprobs(self, new: Completion | Event) -> dict[str, Any] | None:
        """Return each token's own logprob; the texts of all tokens are the text."""
        if self._tokens is None:
            return None
        starts, texts = [], []
        for token in new.tokens:
            starts.append(len(self._tokens.text))
            self._tokens.advance([token])
            texts.append(self._tokens.text[starts[-1] :])
        logprobs = [max(logprob, LEAST_LOGPROB) for logprob in new.logprobs]
        if not self._is_chat:
            return {
                "tokens": texts,
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": starts,
            }
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def join_parts(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    """Return what parts say of each call, in the API's words."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part.index, {"index": part.index, "function": {}})
        function = call["function"]
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            function["name"] = part.name
        function["arguments"] = function.get("arguments", "") + part.arguments
    return list(calls.values())


def check_reason(reason: FinishReason) -> None:
    """Refuse to tell of a text that was not ended by its model or its limit.

    Raises:
        Refused: with what ended it.
    """
    if reason in REASONS:
        return
    if reason == FinishReason.NAN_LOGITS:
        raise Refused(
            "the model's logits were not numbers (NaN): the text cannot go on",
            status=500,
            code="nan_logits",
        )
    if reason == FinishReason.CANCELLED:
        raise Refused("the server is going down", status=503)
    if reason == FinishReason.DEADLINE:
        raise Refused(
            "the text was not done within its timeout",
            status=504,
            code="deadline",
            # Else OpenAI's client would ask again.
            headers={"x-should-retry": "false"},
        )
    if reason == FinishReason.NOTHING_ALLOWED:
        raise Refused(
            "what the request asks for left its text no token: a language, min_tokens, "
            "bad_words and allowed_token_ids together allow nothing",
            code="nothing_allowed",
        )
    name = reason.name.lower()
    raise Refused(f"the text ended: {name}", status=500, code=name)
