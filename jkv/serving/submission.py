"""A request as it was submitted: checked, and everything in it in numpy.

Symbols: n sequences of the request.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.decoding.sampling.options import SAMPLING_DTYPES, Sampling
from jkv.decoding.texts.blocks import BlockSize
from jkv.decoding.texts.results import FinishReason
from jkv.metadata.requests import I32, Integers, Texts, as_domains


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
    """What fits into an engine."""

    max_prompt_tokens: int
    max_new_tokens: int
    max_context_length: int
    num_blocks: tuple[int, ...]  # that one sequence can find in each group of layers
    block_size: BlockSize
    vocabulary: int
    stops: StopSizes
    has_detokenizer: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What was asked; its fields are the arguments of `Engine.submit`."""

    tokens: np.ndarray[Any, Any]  # i32[P]
    n: int
    max_new_tokens: int
    sampling: dict[str, np.ndarray[Any, Any]]  # fields of `Sampling`, [n]
    stop_tokens: tuple[int, ...]
    stop_sequences: tuple[tuple[int, ...], ...]
    stop_strings: tuple[str, ...]
    salt: int
    priority: int
    timeout: float | None  # seconds


def spread_sampling(sampling: Sampling, count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the fields of `Sampling` with a value for each of n sequences.

    Args:
      sampling: each field one number or n; one seed is the first of consecutive ones.
      count: n.

    Raises:
      RequestRefused: for a field of another length.
    """
    fields = {}
    for name, dtype in SAMPLING_DTYPES.items():
        value = np.asarray(getattr(sampling, name))
        if value.shape not in ((), (count,)):
            raise RequestRefused(
                f"Sampling.{name} is one number or one for each of {count} sequences, "
                f"got shape {value.shape}"
            )
        if name == "seeds" and value.ndim == 0:
            # Past 32 bits they begin again, as in the jit.
            value = value.astype(np.int64) + np.arange(count)
        fields[name] = np.broadcast_to(value.astype(dtype), (count,))
    return fields


def split_batch(
    prompts: Texts,
    count: int,
    sampling: Sampling,
    limits: Integers | None,
    salts: Integers,
) -> list[dict[str, Any]]:
    """Return what each prompt of a batch asks for, as `generate` would take it.

    Args:
      prompts: i32[B, P], -1 after each one's end, or a list of lists.
      count: n, sequences of each prompt.
      sampling: each field one number or B * n.
      limits: i32[B], None is no limit.
      salts: i32[B] or int.

    Returns:
      For each prompt `tokens`, `sampling` of its sequences, `limit` and `salt`.
    """
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    rows = [np.asarray(row, np.int64).reshape(-1) for row in prompts]
    fields = spread_sampling(sampling, len(rows) * count)
    most = np.broadcast_to(I32.max if limits is None else np.asarray(limits), len(rows))
    domains = np.broadcast_to(np.asarray(as_domains("salts", salts)), len(rows))
    return [
        dict(
            tokens=row[: np.argmax(np.append(row, -1) < 0)],
            sampling=_pick(fields, slice(i * count, (i + 1) * count)),
            limit=int(most[i]),
            salt=int(domains[i]),
        )
        for i, row in enumerate(rows)
    ]


def _pick(fields: dict[str, Any], sequences: slice) -> Sampling:
    return Sampling(**{name: values[sequences] for name, values in fields.items()})


def check_request(request: Request, limits: Limits) -> None:
    """Refuse what can never be served.

    Raises:
      RequestRefused: with the numbers.
    """
    _check_prompt(request.tokens, limits)
    if request.n < 1:
        raise RequestRefused(f"n must be at least 1, got {request.n}")
    if request.max_new_tokens < 1:
        raise RequestRefused(
            f"max_new_tokens must be at least 1, got {request.max_new_tokens}",
            FinishReason.LENGTH,
        )
    if request.max_new_tokens > limits.max_new_tokens:
        raise RequestRefused(
            f"max_new_tokens is {request.max_new_tokens}, and this engine makes room "
            f"for {limits.max_new_tokens} (Engine(max_new_tokens=...))"
        )
    if request.timeout is not None and not request.timeout > 0:
        raise RequestRefused(f"timeout must be above 0 seconds, got {request.timeout}")
    if not I32.min < request.priority < I32.max:
        raise RequestRefused(f"priority must fit in 32 bits, got {request.priority}")
    _check_stops(request, limits)


def as_token_ids(name: str, tokens: Integers) -> np.ndarray[Any, Any]:
    """Return token ids as i32[...]; a list of them, or an array.

    Raises:
      RequestRefused: for anything else.
    """
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


def as_salt(salt: int) -> int:
    """Return a domain of the prefix cache as 32 bits with a sign."""
    return int(np.asarray(as_domains("salt", salt)))


def _check_prompt(tokens: np.ndarray[Any, Any], limits: Limits) -> None:
    length = len(tokens)
    if length == 0:
        raise RequestRefused("the prompt is empty", FinishReason.EMPTY_PROMPT)
    if tokens.max() >= limits.vocabulary:
        raise RequestRefused(
            f"the prompt has token {tokens.max()}, and the model knows "
            f"{limits.vocabulary} of them"
        )
    if length > limits.max_context_length:
        raise RequestRefused(
            f"the prompt has {length} tokens, and the cache takes "
            f"{limits.max_context_length} a sequence (max_context_length)",
            FinishReason.CONTEXT_FULL,
        )
    size = limits.block_size
    columns = -(-length // size.tokens)
    for most, num_blocks in zip(size.most, limits.num_blocks, strict=True):
        needed = columns if most is None else min(columns, most)
        if needed > num_blocks:
            raise RequestRefused(
                f"the prompt has {length} tokens and needs {needed} blocks of "
                f"{size.tokens}; the cache has {num_blocks}",
                FinishReason.OUT_OF_BLOCKS,
            )
    if length > limits.max_prompt_tokens:
        raise RequestRefused(
            f"the prompt has {length} tokens, and this engine makes room for "
            f"{limits.max_prompt_tokens} (Engine(max_prompt_tokens=...))"
        )


def _check_stops(request: Request, limits: Limits) -> None:
    most = limits.stops
    longest = max(map(len, request.stop_sequences), default=0)
    found = StopSizes(len(request.stop_tokens), len(request.stop_sequences), longest)
    if any(count > bound for count, bound in zip(found, most, strict=True)):
        raise RequestRefused(
            f"{found.tokens} stop tokens and {found.sequences} stop sequences of up to "
            f"{found.length} tokens are more than this engine looks for: {most} "
            f"(Engine(stop_sizes=...))"
        )
    if not all(request.stop_sequences) or not all(request.stop_strings):
        raise RequestRefused("a stop sequence and a stop string cannot be empty")
    if request.stop_strings and not limits.has_detokenizer:
        raise RequestRefused(
            "stop_strings need a text: give the engine detokenize=, such as a "
            "tokenizer's decode"
        )


def as_stop_sequences(sequences: Sequence[Integers]) -> tuple[tuple[int, ...], ...]:
    """Return stop sequences as tuples of token ids."""
    found = [as_token_ids("a stop sequence", sequence) for sequence in sequences]
    return tuple(tuple(ids.tolist()) for ids in found)


def as_stop_strings(strings: Sequence[str] | str) -> tuple[str, ...]:
    """Return stop strings; one alone may stand without a list."""
    return (strings,) if isinstance(strings, str) else tuple(strings)
