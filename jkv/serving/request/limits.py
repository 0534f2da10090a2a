"""Validation of requests against the limits of an engine.

Symbols: n sequences of a request, B prompts of a batch.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.arguments import I32
from jkv.decoding import DecodingOptions, FinishReason, Sampling, spread_seeds
from jkv.metadata.requests import IntegerRows, Integers, as_salts
from jkv.serving.request.request import (
    NO_VARIANT,
    CheckedRequest,
    Client,
    Request,
    RequestFields,
    SaltNumbers,
)


class RequestRefused(ValueError):
    """A request that the engine can never serve; the message has the fix.

    Attributes:
      reason: finish reason of the prompt in `jkv.generate`; None if that could admit
        it.
    """

    def __init__(self, text: str, reason: FinishReason | None = None):
        super().__init__(text)
        self.reason = reason


class StopSizes(NamedTuple):
    """Largest number of stop conditions per request that are checked on the device."""

    tokens: int = 8  # stop tokens
    sequences: int = 4  # stop sequences
    length: int = 8  # tokens of one sequence


class Limits(NamedTuple):
    """Limits of an engine's requests, and default values of their options."""

    max_prompt_tokens: int
    max_new_tokens: int  # also the default
    max_context_length: int
    num_blocks: tuple[int, ...]  # available to one sequence in each group of layers
    block_size: int  # tokens of a block
    # Most blocks of a sequence at one time, per group; None without a window.
    most_blocks: tuple[int | None, ...]
    vocabulary: int  # number of tokens
    stops: StopSizes
    stop_tokens: np.ndarray[Any, Any]  # i32[E], the default
    has_detokenizer: bool
    num_variants: int  # variants of the logits processor
    num_classes: int  # retention classes
    max_span: int  # tokens of a span, at most the rows of the largest step; 0: no spans
    rolls: bool = False  # full contexts drop tokens and go on

    def check(self, request: CheckedRequest) -> None:
        self._check_prompt(request.tokens)
        if request.spans is not None:
            self._check_spans(request.spans, len(request.tokens))
        if request.n < 1:
            raise RequestRefused(f"n must be at least 1, got {request.n}")
        if request.max_new_tokens < 1:
            raise RequestRefused(
                f"max_new_tokens must be at least 1, got {request.max_new_tokens}",
                FinishReason.LENGTH,
            )
        if request.max_new_tokens > self.max_new_tokens:
            raise RequestRefused(
                f"max_new_tokens must be at most {self.max_new_tokens}, got "
                f"{request.max_new_tokens}; increase Engine(max_new_tokens=...)"
            )
        for name in ("timeout", "keep_seconds"):
            seconds = getattr(request, name)
            if seconds is not None and not seconds > 0:
                raise RequestRefused(f"{name} must be > 0 seconds, got {seconds}")
        if not 0 <= request.keep < self.num_classes:
            raise RequestRefused(
                f"keep must be from 0 to {self.num_classes - 1}, got {request.keep}; "
                f"increase CacheConfig(keep_classes=...) (on a mesh of several "
                f"processes keep must be 0)"
            )
        if not I32.min < request.priority < I32.max:
            raise RequestRefused(
                f"priority must fit in 32 bits, got {request.priority}"
            )
        if not NO_VARIANT <= request.variant < self.num_variants:
            raise RequestRefused(
                f"variant must be -1 (none) or below {self.num_variants}, the number "
                f"of variants of this engine's logits processor "
                f"(Engine(logits_processor=...)), got {request.variant}"
            )
        self._check_stops(request)

    def _check_prompt(self, tokens: np.ndarray[Any, Any]) -> None:
        length = len(tokens)
        if length == 0:
            raise RequestRefused("the prompt is empty", FinishReason.EMPTY_PROMPT)
        if tokens.max() >= self.vocabulary:
            raise RequestRefused(
                f"the prompt must have token ids below {self.vocabulary}, the model's "
                f"vocabulary, got {tokens.max()}"
            )
        if length > self.max_context_length and not self.rolls:
            raise RequestRefused(
                f"the prompt must have at most {self.max_context_length} tokens, got "
                f"{length}; increase CacheConfig(max_context_length=...)",
                FinishReason.CONTEXT_FULL,
            )
        columns = -(-min(length, self.max_context_length) // self.block_size)
        for most, num_blocks in zip(self.most_blocks, self.num_blocks, strict=True):
            needed = columns if most is None else min(columns, most)
            if needed > num_blocks:
                raise RequestRefused(
                    f"the prompt must fit in {num_blocks} blocks of {self.block_size} "
                    f"tokens, got {length} tokens, which need {needed}; increase "
                    f"CacheConfig(num_blocks=...)",
                    FinishReason.OUT_OF_BLOCKS,
                )
        if length > self.max_prompt_tokens:
            raise RequestRefused(
                f"the prompt must have at most {self.max_prompt_tokens} tokens, got "
                f"{length}; increase Engine(max_prompt_tokens=...)"
            )

    def _check_spans(self, ends: np.ndarray[Any, Any], num_tokens: int) -> None:
        if not self.max_span:
            raise RequestRefused(
                "spans must be None, as this engine serves causal prompts only; pass "
                "Engine(max_span=...), the most tokens of a span"
            )
        if len(ends) != num_tokens or ends.max() >= num_tokens:
            raise RequestRefused(
                f"spans must have an end below {num_tokens}, or -1, for each of "
                f"{num_tokens} tokens, got {len(ends)} ends up to {ends.max()}"
            )
        longest = _find_longest(ends)
        if longest > self.max_span:
            raise RequestRefused(
                f"spans must have at most {self.max_span} tokens, got {longest} in one "
                f"step; increase Engine(max_span=...), and row_counts with it",
                FinishReason.SPAN_TOO_LONG,
            )

    def _check_stops(self, request: CheckedRequest) -> None:
        sequences = request.stop_sequences
        longest = max(map(len, sequences), default=0)
        found = StopSizes(len(request.stop_tokens), len(sequences), longest)
        if any(count > bound for count, bound in zip(found, self.stops, strict=True)):
            raise RequestRefused(
                f"stop_tokens and stop_sequences must fit in {self.stops}, got "
                f"{found}; increase Engine(stop_sizes=...)"
            )
        if not all(sequences) or not all(request.stop_strings):
            raise RequestRefused(
                "stop_sequences and stop_strings must not be empty, got an empty one; "
                "remove it"
            )
        if request.stop_strings and not self.has_detokenizer:
            raise RequestRefused(
                "stop_strings require Engine(detokenize=...), got None; pass a "
                "tokenizer's decode"
            )


def check_request(
    limits: Limits, request: Request, numbers: SaltNumbers
) -> CheckedRequest:
    """Return a request after validation and conversion; raise `RequestRefused`."""
    given = dict(vars(request))
    for name in ("max_new_tokens", "stop_tokens"):
        given[name] = getattr(limits, name) if given[name] is None else given[name]
    for name in ("n", "max_new_tokens", "priority", "variant", "keep"):
        if not isinstance(given[name], int | np.integer) or isinstance(
            given[name], bool
        ):
            raise RequestRefused(f"{name} must be an int, got {given[name]!r:.60}")
        given[name] = int(given[name])
    for name in ("timeout", "keep_seconds"):
        seconds = given[name]
        is_number = isinstance(seconds, int | float | np.number | None)
        if not is_number or isinstance(seconds, bool) or seconds != seconds:
            raise RequestRefused(f"{name} must be seconds or None, got {seconds!r:.60}")
    if isinstance(request.stop_strings, str):
        given["stop_strings"] = (request.stop_strings,)
    for name in ("stop_sequences", "stop_strings"):
        if not isinstance(given[name], Iterable):
            raise RequestRefused(f"{name} must be a list, got {given[name]!r:.60}")
    strings = tuple(given["stop_strings"])
    if not all(isinstance(each, str) for each in strings):
        raise RequestRefused(f"stop_strings must be str, got {strings!r:.60}")
    read = dict(
        tokens=as_token_ids("the prompt", request.tokens),
        sampling=Sampling(**_spread_sampling(request.sampling, request.n)),
        stop_tokens=tuple(as_token_ids("stop_tokens", given["stop_tokens"]).tolist()),
        stop_sequences=tuple(
            tuple(as_token_ids("a stop sequence", sequence).tolist())
            for sequence in request.stop_sequences
        ),
        stop_strings=strings,
        spans=None if request.spans is None else _read_spans(request.spans),
        salt=_read_salt(request.salt, numbers),
        client=_read_client(request.client),
    )
    checked = CheckedRequest(**given | read)
    limits.check(checked)
    return checked


def split_batch(
    prompts: IntegerRows,  # i32[B, P], padded with -1, or a list of lists
    limits: Integers | None,  # i32[B]; None is no limit
    salts: Integers,  # i32[B] or int
    fields: RequestFields,  # common options; each field of sampling one number or B * n
) -> Iterator[Request]:
    """Yield the options of each prompt of a batch."""
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    rows = [np.asarray(row, np.int64).reshape(-1) for row in prompts]
    one = Request((), **fields)
    n, spread = one.n, _spread_sampling(one.sampling, len(rows) * one.n)
    bound = I32.max if one.max_new_tokens is None else one.max_new_tokens
    most = np.broadcast_to(bound if limits is None else np.asarray(limits), len(rows))
    own_salts = np.broadcast_to(np.asarray(as_salts("salts", salts)), len(rows))
    for i, row in enumerate(rows):
        own = {name: values[i * n : (i + 1) * n] for name, values in spread.items()}
        yield dataclasses.replace(
            one,
            tokens=row[: np.argmax(np.append(row, -1) < 0)],
            max_new_tokens=min(int(most[i]), bound),
            sampling=Sampling(**own),
            salt=int(own_salts[i]),
        )


def as_token_ids(name: str, tokens: Integers) -> np.ndarray[Any, Any]:
    """Convert a list or array of token ids to i32[...]; raise for anything else."""
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros((0,), np.int32)
    is_integer = np.issubdtype(ids.dtype, np.integer)
    if ids.ndim != 1 or not is_integer or ids.min() < 0 or ids.max() > I32.max:
        raise RequestRefused(
            f"{name} must be a list of token ids, integers of 0 or more, got "
            f"{str(tokens)[:60]}"
        )
    return ids.astype(np.int32)


def _read_spans(spans: Integers) -> np.ndarray[Any, Any]:
    """Convert the ends of spans to i32[P]; raise for anything else."""
    ends = np.asarray(spans)
    if ends.ndim != 1 or not ends.size or not np.issubdtype(ends.dtype, np.integer):
        raise RequestRefused(
            f"spans must be a list of ends, integers of -1 or more, one for each token "
            f"of the prompt, got {str(spans)[:60]}"
        )
    return np.clip(ends, -1, I32.max).astype(np.int32)


def _find_longest(ends: np.ndarray[Any, Any]) -> int:
    """Return the most tokens between borders of one prompt, i32[P]."""
    position = np.arange(len(ends))
    reach = np.maximum.accumulate(np.maximum(ends, position))
    borders = np.concatenate([[0], np.flatnonzero(reach == position) + 1])
    return int(np.diff(borders).max(initial=1))


def _read_salt(salt: Any, numbers: SaltNumbers) -> int:
    """Return the number of a salt; raise for other types."""
    if isinstance(salt, int | np.integer):
        salt = int(np.asarray(as_salts("salt", salt)))
    elif not isinstance(salt, str):
        raise RequestRefused(f"salt must be an int or a str, got {salt!r:.60}")
    try:
        return numbers.number(salt)
    except ValueError as error:
        raise RequestRefused(str(error)) from error


def _read_client(client: Client) -> Client:
    """Return a client, with numpy integers as int; raise for other types."""
    if client is None or isinstance(client, str):
        return client
    if isinstance(client, int | np.integer):
        return int(client)
    raise RequestRefused(f"client must be a str, an int or None, got {client!r:.60}")


def _spread_sampling(sampling: Sampling, count: int) -> dict[str, Any]:
    """Return each field of `Sampling`, one number or `count`, broadcast to [count]."""
    try:
        DecodingOptions(sampling).check()
        values = {name: getattr(sampling, name) for name in Sampling.dtypes}
        if any(isinstance(value, jax.Array) for value in values.values()):
            # `Sampling` validates numpy arrays, not JAX arrays, when it is created.
            values = {name: np.asarray(value) for name, value in values.items()}
            Sampling(**values)
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    fields = {}
    for name, dtype in Sampling.dtypes.items():
        value = np.asarray(values[name])
        if value.shape not in ((), (count,)):
            raise RequestRefused(
                f"Sampling.{name} must have shape () or ({count},), one value for each "
                f"sequence, got {value.shape}"
            )
        if name == "seeds" and value.ndim == 0:
            value = spread_seeds(value, count)
        fields[name] = np.broadcast_to(value.astype(dtype), (count,))
    return fields
