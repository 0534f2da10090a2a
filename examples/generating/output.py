"""Detokenization and output: streamed, as JSON, and the closing line of statistics."""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from tokenizers import Tokenizer

import jkv
from jkv.serving import Completion, EngineStats, Event

SEPARATOR = "\n\n---\n\n"

# Replacement character of a decoder for invalid or incomplete UTF-8.
BROKEN = "\ufffd"

# A character has at most four bytes, so an incomplete one has at most three.
MOST_LEFT_OVER = 3


class TextStream:
    """Incremental detokenizer of one sequence; printed text never changes.

    A token may be part of a character and waits for the rest. With single-byte tokens
    (ByteFallback), a run of bytes is decoded as a whole: one invalid byte replaces all
    of its characters. So a run waits until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, is_chat: bool):
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        # In a chat, only the answer is shown.
        self._shown = self._decode(self._prompt) if is_chat else ""

    def advance(self, tokens: Sequence[int], *, has_ended: bool = False) -> str:
        """Return the new part of the text, given all new tokens so far."""
        ids = [*self._prompt, *tokens]
        num_waiting = self._count_bytes(ids)
        if has_ended:
            # No more tokens follow: omit only an incomplete last character.
            choices = range(min(num_waiting, MOST_LEFT_OVER) + 1)
            whole = (n for n in choices if not self._is_broken(ids[: len(ids) - n]))
            num_waiting = next(whole, 0)
        text = self._decode(ids[: len(ids) - num_waiting])
        fresh = text[len(self._shown) :]
        self._shown += fresh
        return fresh

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids)).rstrip(BROKEN)

    def _is_broken(self, ids: Sequence[int]) -> bool:
        return self._tokenizer.decode(list(ids)).endswith(BROKEN)

    def _count_bytes(self, ids: Sequence[int]) -> int:
        """Return the number of single-byte tokens at the end."""
        for count, token in enumerate(reversed(ids)):
            name = self._tokenizer.id_to_token(token) or ""
            if not re.fullmatch("<0x[0-9A-F]{2}>", name):
                return count
        return len(ids)


class Shown:
    """Printer of completions: one is streamed, several are printed when they finish."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        options: argparse.Namespace,
    ):
        self._tokenizer, self._prompts, self._options = tokenizer, prompts, options
        self._streams = [self._open(prompt) for prompt in prompts]
        self._tokens: list[int] = []
        self._num_shown = 0

    def advance(self, event: Event) -> None:
        """Print the new part of a streamed completion."""
        stream = self._streams[0]
        if not self._num_shown and not self._options.chat:
            print(stream.advance([]), end="")
        self._num_shown += 1
        self._tokens += event.tokens
        fresh = event.text
        if not self._options.stop:
            fresh = stream.advance(self._tokens, has_ended=bool(event.reason))
        print(fresh, end="", flush=True)

    def show(self, prompt: int, completion: Completion) -> None:
        """Print a finished completion."""
        each = self.describe(prompt, completion)
        if self._options.json:
            line = f"{json.dumps(each, ensure_ascii=False)}\n"
        else:
            separator = SEPARATOR if self._num_shown else ""
            line = f"{separator}{each['prompt']}{each['text']}"
        self._num_shown += 1
        sys.stdout.write(line)
        sys.stdout.flush()

    def describe(self, prompt: int, completion: Completion) -> dict[str, object]:
        """Return a completion as a JSON object, without the prompt's text in "text".

        With --stop the text is the engine's, which ends before the stop string.
        """
        stream = self._open(self._prompts[prompt])
        opening = "" if self._options.chat else stream.advance([])
        text = completion.text
        if not self._options.stop:
            text = stream.advance(completion.tokens, has_ended=True)
        return {
            "prompt": opening,
            "sample": completion.sample,
            "text": text,
            "tokens": completion.tokens,
            "logprob": round(sum(completion.logprobs), 4),
            "finish_reason": completion.reason.name,
        }

    def _open(self, prompt: Sequence[int]) -> TextStream:
        return TextStream(self._tokenizer, prompt, is_chat=self._options.chat)


def show_closing_line(
    stats: EngineStats,
    block_size: int,
    reasons: Sequence[jkv.FinishReason],
    *,
    seconds_before: float,
    seconds: float,
) -> None:
    """Print counts and times on standard error."""
    empty = stats.empty_slots / max(1, stats.peak_blocks * block_size)
    print(
        f"\n\n{stats.generated_tokens} tokens, "
        f"{stats.generated_tokens / seconds:.0f} tokens/s "
        f"after {seconds_before:.1f} s; {stats.num_blocks - stats.free_blocks} of "
        f"{stats.num_blocks} blocks in use, {stats.peak_blocks} at the peak, "
        f"{empty:.0%} of their slots empty when it was reached; ended by "
        f"{', '.join(reason.name for reason in reasons)}",
        file=sys.stderr,
    )
