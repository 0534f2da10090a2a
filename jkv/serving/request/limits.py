"""What a request may ask of an engine; one that asks for more is refused."""

from typing import Any, NamedTuple

import numpy as np

from jkv.decoding.texts.blocks import BlockSize
from jkv.decoding.texts.results import FinishReason
from jkv.metadata.requests import I32
from jkv.serving.request.ask import NOT_STEERED
from jkv.serving.request.request import Request
from jkv.status import UsageError


class RequestRefused(ValueError):
    """A request that can never be served: the text says what to change.

    Attributes:
      reason: why `jkv.generate` would not begin it either; None if that could.
    """

    def __init__(self, text: str, reason: FinishReason | None = None):
        super().__init__(text)
        self.reason = reason


class StopSizes(NamedTuple):
    """Most stops that one request can have, of those that are looked for in the jit."""

    tokens: int = 8  # stop tokens
    sequences: int = 4  # stop sequences
    length: int = 8  # tokens of one sequence


class Limits(NamedTuple):
    """What fits into an engine, and what holds where a request does not say."""

    max_prompt_tokens: int
    max_new_tokens: int  # also of a request that does not say
    max_context_length: int
    num_blocks: tuple[int, ...]  # that one sequence can find in each group of layers
    block_size: BlockSize
    vocabulary: int  # tokens that the model knows
    stops: StopSizes
    stop_tokens: np.ndarray[Any, Any]  # i32[E], of a request that does not say
    has_detokenizer: bool
    num_variants: int  # ways in which a request can be steered
    num_classes: int  # of what stays cached

    def check(self, request: Request) -> None:
        self._check_prompt(request.tokens)
        if request.n < 1:
            raise RequestRefused(f"n must be at least 1, got {request.n}")
        if request.max_new_tokens < 1:
            raise RequestRefused(
                f"max_new_tokens must be at least 1, got {request.max_new_tokens}",
                FinishReason.LENGTH,
            )
        if request.max_new_tokens > self.max_new_tokens:
            raise RequestRefused(
                f"max_new_tokens is {request.max_new_tokens}, and this engine makes "
                f"room for {self.max_new_tokens} (Engine(max_new_tokens=...))"
            )
        for name in ("timeout", "keep_seconds"):
            seconds = getattr(request, name)
            if seconds is not None and not seconds > 0:
                raise RequestRefused(f"{name} must be above 0 seconds, got {seconds}")
        if not 0 <= request.keep < self.num_classes:
            raise RequestRefused(
                f"keep {request.keep} is no class of this engine's cache, which has "
                f"{self.num_classes}, counted from 0 (CacheConfig(keep_classes=...); "
                f"on a mesh of several processes there is one)"
            )
        if not I32.min < request.priority < I32.max:
            raise RequestRefused(
                f"priority must fit in 32 bits, got {request.priority}"
            )
        if not NOT_STEERED <= request.variant < self.num_variants:
            raise RequestRefused(
                f"variant {request.variant} is not there: this engine steers in "
                f"{self.num_variants} ways, counted from 0 (Engine(steering=...)); -1 "
                f"is for a request that is not steered"
            )
        self._check_stops(request)

    def check_own(self) -> None:
        if len(self.stop_tokens) > self.stops.tokens:
            raise UsageError(
                f"{len(self.stop_tokens)} stop tokens are more than this engine looks "
                f"for: give it stop_sizes=StopSizes(tokens={len(self.stop_tokens)})"
            )

    def _check_prompt(self, tokens: np.ndarray[Any, Any]) -> None:
        length = len(tokens)
        if length == 0:
            raise RequestRefused("the prompt is empty", FinishReason.EMPTY_PROMPT)
        if tokens.max() >= self.vocabulary:
            raise RequestRefused(
                f"the prompt has token {tokens.max()}, and the model knows "
                f"{self.vocabulary} of them"
            )
        if length > self.max_context_length:
            raise RequestRefused(
                f"the prompt has {length} tokens, and the cache takes "
                f"{self.max_context_length} a sequence (max_context_length)",
                FinishReason.CONTEXT_FULL,
            )
        size = self.block_size
        columns = -(-length // size.tokens)
        for most, num_blocks in zip(size.most, self.num_blocks, strict=True):
            needed = columns if most is None else min(columns, most)
            if needed > num_blocks:
                raise RequestRefused(
                    f"the prompt has {length} tokens and needs {needed} blocks of "
                    f"{size.tokens}; the cache has {num_blocks}",
                    FinishReason.OUT_OF_BLOCKS,
                )
        if length > self.max_prompt_tokens:
            raise RequestRefused(
                f"the prompt has {length} tokens, and this engine makes room for "
                f"{self.max_prompt_tokens} (Engine(max_prompt_tokens=...))"
            )

    def _check_stops(self, request: Request) -> None:
        sequences = request.stop_sequences
        longest = max(map(len, sequences), default=0)
        found = StopSizes(len(request.stop_tokens), len(sequences), longest)
        if any(count > bound for count, bound in zip(found, self.stops, strict=True)):
            raise RequestRefused(
                f"{found.tokens} stop tokens and {found.sequences} stop sequences of "
                f"up to {found.length} tokens are more than this engine looks for: "
                f"{self.stops} (Engine(stop_sizes=...))"
            )
        if not all(sequences) or not all(request.stop_strings):
            raise RequestRefused("a stop sequence and a stop string cannot be empty")
        if request.stop_strings and not self.has_detokenizer:
            raise RequestRefused(
                "stop_strings need a text: give the engine detokenize=, such as a "
                "tokenizer's decode"
            )
