"""Validation of requests against the limits of an engine.

Symbols: n sequences of a request, B prompts of a batch.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jkv.arguments import I32
from jkv.decoding import DecodingOptions, FinishReason, Sampling, spread_seeds
from jkv.metadata.requests import (
    IntegerRows,
    Integers,
    as_salts,
    broadcast,
    read_prompts,
)
from jkv.serving.request.request import (
    NO_VARIANT,
    CheckedRequest,
    Client,
    Request,
    RequestFields,
    SaltNumbers,
)
from jkv.status import UsageError

# Cache salts of a batch: of all prompts, or one for each.
Salts: TypeAlias = Integers | str | Sequence[int | str]


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
    limits: Limits,
    request: Request,
    numbers: SaltNumbers,
    inherited: int | None = None,  # the number of a parked sequence's salt
) -> CheckedRequest:
    """Return a request after validation and conversion; raise `RequestRefused`.

    Its salt is numbered last: a refused request changes nothing.
    """
    given = dict(vars(request))
    for name in ("max_new_tokens", "stop_tokens"):
        given[name] = getattr(limits, name) if given[name] is None else given[name]
    given["n"] = _read_count(request.n)
    for name in ("max_new_tokens", "priority", "variant", "keep"):
        given[name] = _read_int(name, given[name])
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
        sampling=Sampling(**_spread_sampling(request.sampling, given["n"])),
        stop_tokens=tuple(as_token_ids("stop_tokens", given["stop_tokens"]).tolist()),
        stop_sequences=tuple(
            tuple(as_token_ids("a stop sequence", sequence).tolist())
            for sequence in request.stop_sequences
        ),
        stop_strings=strings,
        spans=None if request.spans is None else _read_spans(request.spans),
        salt=_read_salt(request.salt),
        client=_read_client(request.client),
    )
    checked = CheckedRequest(**given | read)
    limits.check(checked)
    if inherited is not None:
        return dataclasses.replace(checked, salt=inherited)
    try:
        return dataclasses.replace(checked, salt=numbers.number(checked.salt))
    except ValueError as error:
        raise RequestRefused(str(error)) from error


def split_batch(
    prompts: IntegerRows,  # i32[B, P], padded with -1, or a list of lists
    limits: Integers | None,  # i32[B]; None is no limit
    salts: Salts,  # of all prompts, or [B]
    fields: RequestFields,  # common options; each field of sampling one number or B * n
) -> Iterator[Request]:
    """Yield the options of each prompt of a batch."""
    for name, batch in (("salt", "salts"), ("tokens", "prompts")):
        if name in fields:
            raise UsageError(f"{name} is a field of one request; pass {batch}=")
    rows = _read_rows(prompts)
    one = Request.of((), fields)
    n = _read_count(one.n)
    spread = _spread_sampling(one.sampling, len(rows) * n)
    bound = I32.max
    if one.max_new_tokens is not None:
        bound = _read_int("max_new_tokens", one.max_new_tokens)
    most = broadcast(len(rows), limits=bound if limits is None else limits)[0]
    own_salts = _spread_salts(salts, len(rows))
    for i, row in enumerate(rows):
        own = {name: values[i * n : (i + 1) * n] for name, values in spread.items()}
        yield dataclasses.replace(
            one,
            tokens=row,
            max_new_tokens=min(int(most[i]), bound),
            sampling=Sampling(**own),
            salt=own_salts[i],
        )


def _read_rows(prompts: IntegerRows) -> list[np.ndarray[Any, Any]]:
    """Return the token ids of each prompt, without the padding."""
    rows = np.asarray(read_prompts(prompts, "prompts"))
    is_token = np.logical_and.accumulate(rows >= 0, axis=1)
    for row, column in np.argwhere(~is_token & (rows != -1)):
        raise RequestRefused(
            f"prompts must have token ids of 0 or more, and -1 only past the end of a "
            f"row, got {rows[row, column]} at position {column} of prompt {row}"
        )
    return [row[: is_token[i].sum()] for i, row in enumerate(rows)]


def _spread_salts(salts: Salts, num_prompts: int) -> list[int | str]:
    """Return the salt of each prompt."""
    if isinstance(salts, str):
        return [salts] * num_prompts
    if isinstance(salts, Sequence) and any(isinstance(salt, str) for salt in salts):
        if len(salts) != num_prompts:
            raise RequestRefused(
                f"salts must have one entry for each of {num_prompts} prompts, got "
                f"{len(salts)}"
            )
        return [*salts]
    given: Any = salts  # not strings
    (numbers,) = broadcast(num_prompts, salts=as_salts("salts", given))
    spread: list[int | str] = np.asarray(numbers).tolist()
    return spread


def _read_int(name: str, number: Any) -> int:
    """Return an int; raise for other types."""
    if not isinstance(number, int | np.integer) or isinstance(number, bool):
        raise RequestRefused(f"{name} must be an int, got {number!r:.60}")
    return int(number)


def _read_count(n: Any) -> int:
    """Return the number of sequences of a request; raise for an invalid one."""
    if (count := _read_int("n", n)) < 1:
        raise RequestRefused(f"n must be at least 1, got {count}")
    return count


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


def _read_salt(salt: Any) -> int | str:
    """Return a salt, an int as i32; raise for other types."""
    if isinstance(salt, str):
        return salt
    if not isinstance(salt, int | np.integer) or isinstance(salt, bool):
        raise RequestRefused(f"salt must be an int or a str, got {salt!r:.60}")
    try:
        return int(np.asarray(as_salts("salt", salt)))
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
