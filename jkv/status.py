"""Status codes of requests in jit, and their exceptions outside.

Functions cannot raise inside jit, so every verb returns a `Status` for each request. On
the host `raise_for_status` raises the exception of the first refused request.
"""

import enum
from typing import Any, Protocol, TypeVar

import jax
import numpy as np


class Status(enum.IntEnum):
    """Outcome of one request.

    If several causes apply, the first in this order is reported: INVALID_SEQUENCE,
    INVALID_ARGUMENT, CONTEXT_FULL, BATCH_FULL, OUT_OF_SEQUENCES, OUT_OF_BLOCKS.

    Example:
      >>> import jkv
      >>> jkv.Status(1).name
      'OUT_OF_BLOCKS'
    """

    OK = 0
    OUT_OF_BLOCKS = 1
    OUT_OF_SEQUENCES = 2
    CONTEXT_FULL = 3
    BATCH_FULL = 4
    INVALID_SEQUENCE = 5
    INVALID_ARGUMENT = 6


class Counter(enum.IntEnum):
    """Rows of `Sequences.counters` after the counts of refusals by `Status`."""

    CLOCK = len(Status)  # calls that served a request
    SEQUENCES_EVICTED = enum.auto()  # closed by `evict`
    PREFIX_QUERIES = enum.auto()  # prompts looked up by `allocate`
    PREFIX_TOKENS = enum.auto()  # tokens of these prompts
    PREFIX_HITS = enum.auto()  # cached tokens among them
    COMPACTIONS = enum.auto()
    LAST_COMPACTION = enum.auto()  # value of CLOCK at the last compaction


NUM_COUNTERS = len(Status) + len(Counter)


class CacheError(Exception):
    """Base class of all errors of the cache.

    Attributes:
      status: the `Status` of the request, or `None`.
      index: index of the first refused request in its call, or `None`.
      num_refused: requests of the call refused for any cause.

    Example:
      >>> import jkv
      >>> issubclass(jkv.OutOfBlocks, jkv.CacheError)
      True
    """

    status: Status | None = None

    def __init__(
        self, message: str, *, index: int | None = None, num_refused: int = 0
    ) -> None:
        """Store the message and the numbers."""
        super().__init__(message)
        self.index = index
        self.num_refused = num_refused


class UsageError(TypeError, ValueError):
    """An invalid argument; the message says how to fix it.

    Raised immediately, eagerly or during tracing. It is both a TypeError and a
    ValueError, as it covers wrong types and wrong values. Errors that depend on values
    on the device are reported as a `Status` instead, and raised as a `CacheError` by
    `raise_for_status`.

    Example:
      >>> import jkv
      >>> try:
      ...     jkv.CacheConfig.for_memory("4GB", page_size=16)
      ... except jkv.UsageError as error:
      ...     print(str(error).partition(" (")[0])
      for_memory has no field 'page_size'; the nearest is 'block_size'
    """


class InvariantError(CacheError):
    """`check` found a broken invariant; the message begins with its name."""


class OutOfBlocks(CacheError):
    """The pool had too few free blocks; free or truncate sequences, then try again."""

    status = Status.OUT_OF_BLOCKS


class OutOfSequences(CacheError):
    """All `max_sequences` rows are open; free one, or configure more."""

    status = Status.OUT_OF_SEQUENCES


class ContextFull(CacheError):
    """The sequence would exceed `max_context_length`."""

    status = Status.CONTEXT_FULL


class BatchFull(CacheError):
    """The call's rows do not hold the tokens: `append` has one row for each request
    unless `capacity=` names another number; pass a larger one, or append fewer."""

    status = Status.BATCH_FULL


class InvalidSequence(CacheError):
    """The sequence id is not open, or was already named in the same call."""

    status = Status.INVALID_SEQUENCE


class InvalidArgument(CacheError):
    """A count or length is negative, or out of range for the sequence."""

    status = Status.INVALID_ARGUMENT


EXCEPTIONS: dict[Status, type[CacheError]] = {
    error.status: error for error in CacheError.__subclasses__() if error.status
}


class Occupied(Protocol):
    """An object with a one-line summary of its occupancy, such as a `Cache`."""

    def occupancy(self) -> str:
        """Return the summary."""


Answer = TypeVar("Answer")


def raise_for_status(status: Answer, cache: Occupied | None = None) -> Answer:
    """Raise the exception of the first refused request, else return the argument.

    Runs on the host, outside jit. It can wrap a verb:
    `cache, opened = jkv.raise_for_status(jkv.allocate(cache, 5))`.

    Args:
      status: i32[B] of `Status` values, a result with a `status` of that shape (from
        `allocate`, `append` or `fork`), or a verb's pair of a cache and either.
      cache: the cache after the call, to include its occupancy in the message.

    Returns:
      `status`, unchanged.

    Raises:
      CacheError: the subclass of the status, with `index` and `num_refused`.
      UsageError: inside jit, or for an argument without a status.
    Example:
      >>> import jkv
      >>> jkv.raise_for_status([0, 0])
      [0, 0]
      >>> jkv.raise_for_status([0, 5, 1])
      Traceback (most recent call last):
      ...
      jkv.status.InvalidSequence: request 1 of 3 was refused, INVALID_SEQUENCE: The \
sequence id is not open, or was already named in the same call. (2 refused in all)
    """
    result: Any = status
    if isinstance(status, tuple) and status and hasattr(status[0], "occupancy"):
        cache, result = status
    codes = _codes(getattr(result, "status", result))
    refused = np.flatnonzero(codes != Status.OK)
    if refused.size == 0:
        return status
    index = int(refused[0])
    error = EXCEPTIONS[Status(int(codes[index]))]
    assert error.status is not None
    message = (
        f"request {index} of {codes.size} was refused, {error.status.name}: "
        f"{' '.join(str(error.__doc__).split())} ({refused.size} refused in all"
    )
    if hasattr(result, "seq_ids"):
        message += f"; sequence id {int(np.atleast_1d(result.seq_ids)[index])}"
    if cache is not None:
        message += f"; now {cache.occupancy()}"
    raise error(message + ")", index=index, num_refused=int(refused.size))


def _codes(status: Any) -> np.ndarray:
    """Return status codes on the host, integers [B]."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(status)):
        raise UsageError(
            "raise_for_status needs values on the host, got a tracer; call it outside "
            "jit; inside, compare batch.status, as in `batch.status == jkv.Status.OK`"
        )
    try:
        codes = np.asarray(status) if np.ndim(status) else np.asarray([status])
    except ValueError:  # a tuple of arrays
        codes = np.asarray([status], object)
    if codes.size and not np.issubdtype(codes.dtype, np.integer):
        advice = ""
        if hasattr(status, "reasons"):
            advice = "; a generation has reasons (jkv.FinishReason), nothing to raise"
        raise UsageError(
            f"status must be i32[B], a result with a status, or a verb's pair, got "
            f"{type(status).__name__}{advice}"
        )
    return codes.ravel()
