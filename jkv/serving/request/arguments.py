"""From the arguments of `Engine.submit` and `Engine.generate` to requests, in numpy.

Symbols: n sequences of a request, B prompts of a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jkv.decoding.sampling.options import (
    GREEDY,
    SAMPLING_DTYPES,
    Sampling,
    check_sampling,
    spread_seeds,
)
from jkv.metadata.requests import I32, Integers, Texts, as_domains
from jkv.serving.request.limits import NOT_STEERED, Limits, RequestRefused
from jkv.serving.request.request import Client, Request


def read_request(
    limits: Limits,
    tokens: Integers,
    *,
    n: int = 1,
    max_new_tokens: int | None = None,
    sampling: Sampling = GREEDY,
    stop_tokens: Integers | None = None,
    stop_sequences: Sequence[Integers] = (),
    stop_strings: Sequence[str] | str = (),
    salt: int = 0,
    priority: int = 0,
    client: Client = None,
    variant: int = NOT_STEERED,
    timeout: float | None = None,
) -> Request:
    """Return the request that was asked for; the arguments are those of `submit`.

    Raises:
      RequestRefused: for what is no request, or what the limits do not allow.
    """
    most = limits.max_new_tokens if max_new_tokens is None else max_new_tokens
    counts = {
        "n": n,
        "max_new_tokens": most,
        "salt": salt,
        "priority": priority,
        "variant": variant,
    }
    for name, count in counts.items():
        if not isinstance(count, int | np.integer):
            raise RequestRefused(f"{name} must be an int, got {count!r:.60}")
    if not isinstance(timeout, int | float | np.number | None):
        raise RequestRefused(f"timeout must be seconds or None, got {timeout!r:.60}")
    stops = limits.stop_tokens if stop_tokens is None else stop_tokens
    if isinstance(stop_strings, str):
        stop_strings = (stop_strings,)
    for name, values in (
        ("stop_sequences", stop_sequences),
        ("stop_strings", stop_strings),
    ):
        if not isinstance(values, Iterable):
            raise RequestRefused(f"{name} must be a list, got {values!r:.60}")
    stop_strings = tuple(stop_strings)
    if not all(isinstance(each, str) for each in stop_strings):
        raise RequestRefused(f"stop_strings must be texts, got {stop_strings!r:.60}")
    request = Request(
        tokens=as_token_ids("the prompt", tokens),
        n=n,
        max_new_tokens=int(most),
        sampling=_spread_sampling(sampling, n),
        stop_tokens=tuple(as_token_ids("stop_tokens", stops).tolist()),
        stop_sequences=tuple(
            tuple(as_token_ids("a stop sequence", sequence).tolist())
            for sequence in stop_sequences
        ),
        stop_strings=stop_strings,
        salt=int(np.asarray(as_domains("salt", salt))),
        priority=priority,
        client=_read_client(client),
        variant=int(variant),
        timeout=timeout,
    )
    limits.check(request)
    return request


def split_batch(
    prompts: Texts,
    n: int,
    sampling: Sampling,
    limits: Integers | None,
    salts: Integers,
) -> Iterator[tuple[np.ndarray[Any, Any], Sampling, int, int]]:
    """Return the arguments of `submit` for each prompt of a batch.

    Args:
      prompts: i32[B, P], -1 after each one's end, or a list of lists.
      n: sequences of each prompt.
      sampling: each field one number or B * n.
      limits: i32[B], None is no limit.
      salts: i32[B] or int.

    Returns:
      The tokens, sampling, limit and salt of each prompt.

    Raises:
      RequestRefused: for a field of `sampling` of another length.
    """
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    rows = [np.asarray(row, np.int64).reshape(-1) for row in prompts]
    tokens = [row[: np.argmax(np.append(row, -1) < 0)] for row in rows]
    fields = _spread_sampling(sampling, len(rows) * n)
    of_prompts = [
        Sampling(**{k: v[i * n : (i + 1) * n] for k, v in fields.items()})
        for i in range(len(rows))
    ]
    most = np.broadcast_to(I32.max if limits is None else np.asarray(limits), len(rows))
    domains = np.broadcast_to(np.asarray(as_domains("salts", salts)), len(rows))
    return zip(tokens, of_prompts, map(int, most), map(int, domains), strict=True)


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


def _read_client(client: Client) -> Client:
    """Return who asks; a number of numpy as Python's.

    Raises:
      RequestRefused: for what is no name.
    """
    if client is None or isinstance(client, str):
        return client
    if isinstance(client, int | np.integer):
        return int(client)
    raise RequestRefused(f"client must be a str, an int or None, got {client!r:.60}")


def _spread_sampling(sampling: Sampling, count: int) -> dict[str, Any]:
    """Return the fields of `Sampling` with a value for each sequence.

    Args:
      sampling: each field one number or `count`; of one seed each sequence has its own.
      count: how many sequences there are.

    Raises:
      RequestRefused: for a field of another length, or out of its range.
    """
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
