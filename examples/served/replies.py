"""Replies in the words of OpenAI's API: texts, chats, pieces of both, and mistakes."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jkv import FinishReason
from jkv.serving import Completion, Event


class Reply(NamedTuple):
    """What all parts of one reply have in common."""

    name: str  # of the reply
    model: str
    is_chat: bool
    created: int  # seconds

    @classmethod
    def begin(cls, number: int, model: str, *, is_chat: bool) -> "Reply":
        """Begin the reply to the first request of a body."""
        kind = "chatcmpl" if is_chat else "cmpl"
        return cls(f"{kind}-{number}", model, is_chat, int(time.time()))

    def whole(self, found: Sequence[Completion], num_prompt: int) -> dict[str, Any]:
        """Return the whole reply.

        Args:
            found: of all prompts, in order.
            num_prompt: tokens of all prompts.
        """
        choices = [
            self._choice(i, each.text or "", each.reason, "message")
            for i, each in enumerate(found)
        ]
        num_new = sum(len(each.tokens) for each in found)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": usage(num_prompt, num_new)}

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        """Return a part of choice `index`."""
        choice = self._choice(index, event.text, event.reason, "delta")
        return self._frame(self._piece_kind, [choice])

    def closing(self, num_prompt: int, num_new: int) -> dict[str, Any]:
        """Return the part that says what it took."""
        return self._frame(self._piece_kind, []) | {"usage": usage(num_prompt, num_new)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _choice(
        self, index: int, text: str, reason: FinishReason, part: str
    ) -> dict[str, Any]:
        written = {part: {"role": "assistant", "content": text}}
        return {
            "index": index,
            **(written if self.is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": find_reason(reason),
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def find_reason(reason: FinishReason) -> str | None:
    """Return why a choice ended in the API's words, which has few."""
    if reason == FinishReason.RUNNING:
        return None
    return "stop" if reason == FinishReason.STOP else "length"


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the tokens that a reply took."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def mistake(text: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return what the API says of a request that it does not answer."""
    error = {"message": text, "type": kind, "param": None, "code": None}
    return {"error": error}
