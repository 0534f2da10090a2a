"""Log-probabilities in the API's formats for completions and chats."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from jkv import FinishReason
from jkv.serving import Completion, Event, TextStream

from ..loading import Served
from .scoring import Scored

LEAST_LOGPROB = -9999.0  # the API's minimum


class TokenLogprob(NamedTuple):
    """The log-probabilities of one token."""

    token: int
    text: str  # of all tokens, concatenated, is the completion
    start: int  # offset in characters
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[int, float]]  # most likely tokens at this position


class TokenTeller:
    """Writes the log-probabilities of one completion's tokens in order."""

    def __init__(self, served: Served, prompt: Sequence[int], num_top: int) -> None:
        """Start after a prompt.

        Args:
            served: the model.
            prompt: token ids.
            num_top: top logprobs per token.
        """
        self._served, self._prompt, self._num_top = served, list(prompt), num_top
        self._stream = TextStream(served.tokenizer.decode, prompt, ())
        self._offset = 0  # characters of the prompt if it is shown
        self._num_new = 0

    def read_prompt(self, scored: Scored, echo: str) -> list[TokenLogprob]:
        """Return the logprobs of the prompt, shown before the completion.

        A special token is spelled by its name if `echo` contains the name.
        """
        read = codecs.getincrementaldecoder("utf-8")("replace").decode
        found, start = list[TokenLogprob](), 0
        for place, token in enumerate(self._prompt):
            is_last = place == len(self._prompt) - 1
            spelled = self._served.spelling.find_bytes(token)
            name = self._served.tokenizer.id_to_token(token) or ""
            if not spelled and echo.startswith(name, start):
                spelled = name.encode()
            text = read(spelled, is_last)
            top = scored.list_top(place, self._num_top) if place else []
            logprob = scored.logprobs[place] if place else None
            found.append(TokenLogprob(token, text, start, logprob, top))
            start += len(text)
        self._offset = start
        return found

    def read(
        self, new: Completion | Event, scored: Scored | None
    ) -> list[TokenLogprob]:
        """Return the logprobs of new tokens.

        The last token of a completion that ends inside a character has the rest of it.

        Args:
            new: the new tokens.
            scored: scores of all tokens but the last; None without top logprobs.
        """
        found = []
        num_left, has_ended = len(new.tokens), new.reason != FinishReason.RUNNING
        for token, logprob in zip(new.tokens, new.logprobs, strict=True):
            num_left -= 1
            start = len(self._stream.text)
            self._stream.advance([token], has_ended=has_ended and not num_left)
            place, top = len(self._prompt) + self._num_new, []
            if scored is not None:
                top = scored.list_top(place, self._num_top)
            text = self._stream.text[start:]
            found.append(TokenLogprob(token, text, self._offset + start, logprob, top))
            self._num_new += 1
        return found


def write_of_text(served: Served, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return logprobs in the format of completions."""
    has_top = any(each.top for each in found)
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [_bound(each.logprob) for each in found],
        "top_logprobs": [_name_top(served, each) for each in found]
        if has_top
        else None,
        "text_offset": [each.start for each in found],
    }


def write_of_chat(served: Served, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return logprobs in the format of chats."""
    content = [
        {
            "token": each.text,
            "logprob": _bound(each.logprob),
            "bytes": list(served.spelling.find_bytes(each.token)),
            "top_logprobs": [
                {
                    "token": served.spelling.find_text(token),
                    "logprob": _bound(logprob),
                    "bytes": list(served.spelling.find_bytes(token)),
                }
                for token, logprob in each.top
            ],
        }
        for each in found
    ]
    return {"content": content, "refusal": None}


def _name_top(served: Served, found: TokenLogprob) -> dict[str, float | None] | None:
    """Return the top logprobs by token text, including the chosen token."""
    if not found.top:
        return None
    named = {
        served.spelling.find_text(token): _bound(logprob)
        for token, logprob in found.top
    }
    named.setdefault(served.spelling.find_text(found.token), _bound(found.logprob))
    return named


def _bound(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
