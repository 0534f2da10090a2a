"""Tokens become text: while they come, at the end, as JSON, and in a closing line."""

import json
import re
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

import jkv

SEPARATOR = "\n\n---\n\n"

# What a decoder makes of bytes that are no character, or only a part of one.
BROKEN = "\ufffd"

# A character has at most four bytes, so at most three of them can be left over.
MOST_LEFT_OVER = 3


class TextStream:
    """The text of one sequence as its tokens come, in pieces that never repeat.

    A token may be a part of a character: it waits for the rest. A vocabulary with
    tokens for single bytes (ByteFallback) judges a run of them as a whole, and one
    that does not fit turns all of the run into broken characters. So a run waits, too.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, is_chat: bool):
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        # Of a chat the answer alone is shown.
        self._shown = self._decode(self._prompt) if is_chat else ""

    def advance(self, tokens: Sequence[int], *, has_ended: bool = False) -> str:
        """Return what is new of the text, given all new tokens so far."""
        ids = [*self._prompt, *tokens]
        num_waiting = self._count_bytes(ids)
        if has_ended:
            # The rest cannot come any more: leave out the half character alone.
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
        """Count the tokens at the end that stand for single bytes."""
        for count, token in enumerate(reversed(ids)):
            name = self._tokenizer.id_to_token(token) or ""
            if not re.fullmatch("<0x[0-9A-F]{2}>", name):
                return count
        return len(ids)


def describe(
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    result: jkv.Generation,
    *,
    is_chat: bool,
) -> Iterator[dict[str, object]]:
    """Yield what became of each sequence, ready for JSON; the text is the new part."""
    num_samples = len(result.tokens) // len(prompts)
    for i, row in enumerate(np.asarray(result.tokens)):
        prompt, tokens = prompts[i // num_samples], row[row >= 0].tolist()
        stream = TextStream(tokenizer, prompt, is_chat=is_chat)
        opening = "" if is_chat else stream.advance([])
        yield {
            "prompt": opening,
            "sample": i % num_samples,
            "text": stream.advance(tokens, has_ended=True),
            "tokens": tokens,
            "logprob": round(float(np.sum(np.asarray(result.logprobs[i]))), 4),
            "finish_reason": jkv.FinishReason(int(result.reasons[i])).name,
        }


def show_all(described: Iterator[dict[str, object]], *, as_json: bool) -> None:
    """Print every sequence."""
    for i, each in enumerate(described):
        if as_json:
            print(json.dumps(each, ensure_ascii=False))
        else:
            print(SEPARATOR if i else "", each["prompt"], each["text"], sep="", end="")


def show_closing_line(
    cache: jkv.Cache,
    result: jkv.Generation,
    *,
    seconds_before: float,
    tokens_per_second: float,
) -> None:
    """Say on standard error what it took."""
    statistics = result.statistics
    empty = statistics.internal_fragmentation(cache.block_size)
    reasons = [jkv.FinishReason(int(reason)).name for reason in result.reasons]
    num_used = cache.num_blocks - jkv.num_free_blocks(cache)
    print(
        f"\n\n{int(result.lengths.sum())} tokens, {tokens_per_second:.0f} tokens/s "
        f"after {seconds_before:.1f} s; {num_used} of {cache.num_blocks} blocks in "
        f"use, {statistics.peak_blocks} at the peak, {empty:.0%} of their slots empty "
        f"when it was reached; ended by {', '.join(reasons)}",
        file=sys.stderr,
    )
