"""From what is asked of an engine to requests, in numpy.

Symbols: n sequences of a request, B prompts of a batch.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jkv.decoding.sampling.options import (
    SAMPLING_DTYPES,
    Sampling,
    check_sampling,
    spread_seeds,
)
from jkv.metadata.requests import I32, Integers, Texts, as_domains
from jkv.serving.request.ask import Ask, Client, OfAsk
from jkv.serving.request.limits import Limits, RequestRefused
from jkv.serving.request.request import Request


def read_request(limits: Limits, ask: Ask) -> Request:
    """Return the request that was asked for, if it is one that the limits allow."""
    given = dict(vars(ask))
    for name in ("max_new_tokens", "stop_tokens"):
        given[name] = getattr(limits, name) if given[name] is None else given[name]
    for name in ("n", "max_new_tokens", "salt", "priority", "variant", "keep"):
        if not isinstance(given[name], int | np.integer):
            raise RequestRefused(f"{name} must be an int, got {given[name]!r:.60}")
        given[name] = int(given[name])
    for name in ("timeout", "keep_seconds"):
        seconds = given[name]
        if not isinstance(seconds, int | float | np.number | None):
            raise RequestRefused(f"{name} must be seconds or None, got {seconds!r:.60}")
    if isinstance(ask.stop_strings, str):
        given["stop_strings"] = (ask.stop_strings,)
    for name in ("stop_sequences", "stop_strings"):
        if not isinstance(given[name], Iterable):
            raise RequestRefused(f"{name} must be a list, got {given[name]!r:.60}")
    strings = tuple(given["stop_strings"])
    if not all(isinstance(each, str) for each in strings):
        raise RequestRefused(f"stop_strings must be texts, got {strings!r:.60}")
    read = dict(
        tokens=as_token_ids("the prompt", ask.tokens),
        sampling=_spread_sampling(ask.sampling, ask.n),
        stop_tokens=tuple(as_token_ids("stop_tokens", given["stop_tokens"]).tolist()),
        stop_sequences=tuple(
            tuple(as_token_ids("a stop sequence", sequence).tolist())
            for sequence in ask.stop_sequences
        ),
        stop_strings=strings,
        salt=int(np.asarray(as_domains("salt", ask.salt))),
        client=_read_client(ask.client),
    )
    request = Request(**given | read)
    limits.check(request)
    return request


def split_batch(
    prompts: Texts,  # i32[B, P], -1 after each one's end, or a list of lists
    limits: Integers | None,  # i32[B], None is no limit
    salts: Integers,  # i32[B] or int
    asked: OfAsk,  # what holds for all; each field of sampling one number or B * n
) -> Iterator[Ask]:
    """Return what is asked for each prompt of a batch."""
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    rows = [np.asarray(row, np.int64).reshape(-1) for row in prompts]
    one = Ask((), **asked)
    n, fields = one.n, _spread_sampling(one.sampling, len(rows) * one.n)
    bound = I32.max if one.max_new_tokens is None else one.max_new_tokens
    most = np.broadcast_to(bound if limits is None else np.asarray(limits), len(rows))
    domains = np.broadcast_to(np.asarray(as_domains("salts", salts)), len(rows))
    for i, row in enumerate(rows):
        own = {name: values[i * n : (i + 1) * n] for name, values in fields.items()}
        yield dataclasses.replace(
            one,
            tokens=row[: np.argmax(np.append(row, -1) < 0)],
            max_new_tokens=min(int(most[i]), bound),
            sampling=Sampling(**own),
            salt=int(domains[i]),
        )


def as_token_ids(name: str, tokens: Integers) -> np.ndarray[Any, Any]:
    """Return token ids, in a list or an array, as i32[...]; refuse anything else."""
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


def _read_client(client: Client) -> Client:
    """Return who asks, a number of numpy as Python's; refuse what is no name."""
    if client is None or isinstance(client, str):
        return client
    if isinstance(client, int | np.integer):
        return int(client)
    raise RequestRefused(f"client must be a str, an int or None, got {client!r:.60}")


def _spread_sampling(sampling: Sampling, count: int) -> dict[str, Any]:
    """Return each field of `Sampling`, one number or so many, for each sequence."""
    try:
        check_sampling(sampling)
        values = {name: getattr(sampling, name) for name in SAMPLING_DTYPES}
        if any(isinstance(value, jax.Array) for value in values.values()):
            # What JAX's arrays hold was not looked at when they were given.
            values = {name: np.asarray(value) for name, value in values.items()}
            Sampling(**values)
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    fields = {}
    for name, dtype in SAMPLING_DTYPES.items():
        value = np.asarray(values[name])
        if value.shape not in ((), (count,)):
            raise RequestRefused(
                f"Sampling.{name} is one number or one for each of {count} sequences, "
                f"got shape {value.shape}"
            )
        if name == "seeds" and value.ndim == 0:
            value = spread_seeds(value, count)
        fields[name] = np.broadcast_to(value.astype(dtype), (count,))
    return fields
