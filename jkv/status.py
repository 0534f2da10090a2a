"""Status: why a request was served or refused, as data in jit, as exceptions outside.

Nothing can be raised inside jit, so every verb answers each request with a `Status`;
on the host `raise_for_status` turns the first refusal into the exception of its name.
"""

import enum
from typing import Any, Protocol, TypeVar

import jax
import numpy as np


class Status(enum.IntEnum):
    """Outcome of one request.

    Where several causes apply, the first of this order is reported: INVALID_SEQUENCE,
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
    """Rows of `Sequences.counters` behind those of `Status`, which count refusals."""

    CLOCK = len(Status)  # calls that served a request
    SEQUENCES_EVICTED = enum.auto()  # closed by `evict`
    PREFIX_QUERIES = enum.auto()  # prompts looked up by `allocate`
    PREFIX_TOKENS = enum.auto()  # tokens of these prompts
    PREFIX_HITS = enum.auto()  # of these tokens, those found
    COMPACTIONS = enum.auto()
    LAST_COMPACTION = enum.auto()  # the clock at the time; not a count


NUM_COUNTERS = len(Status) + len(Counter)


class CacheError(Exception):
    """Base of all errors of the cache.

    Attributes:
      status: the `Status` of the request, or `None`.
      index: position of the first refused request in its call, or `None`.
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
        """Keep the numbers beside the message."""
        super().__init__(message)
        self.index = index
        self.num_refused = num_refused


class UsageError(TypeError, ValueError):
    """A function was given what it cannot take; the message says what to give.

    It is raised at once, eagerly and while jit traces, and is both kinds of error that
    Python has for this: of a wrong type, and of a value that does not fit. A mistake in
    a call is a `ValueError`, this one or a plain one; what only values on the device
    show is a `Status`, and a `CacheError` when the host asks for it.

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
    """A count or length is negative, or above or below what the sequence holds."""

    status = Status.INVALID_ARGUMENT


EXCEPTIONS: dict[Status, type[CacheError]] = {
    error.status: error for error in CacheError.__subclasses__() if error.status
}


class Occupied(Protocol):
    """What can say in a line how full it is: a `Cache`."""

    def occupancy(self) -> str:
        """Return that line."""


Answer = TypeVar("Answer")


def raise_for_status(status: Answer, cache: Occupied | None = None) -> Answer:
    """Raise the exception of the first refused request; return what was given if none.

    Runs on the host: call it outside jit. As it returns what it was given, it can stand
    around a verb: `cache, opened = jkv.raise_for_status(jkv.allocate(cache, 5))`.

    Args:
      status: i32[B] of `Status` values, or a result that has a `status` of that shape
        (what `allocate`, `append` or `fork` returned), or a verb's whole answer, the
        pair of a cache and either of these.
      cache: the cache after the call; with it the message tells how full it is.

    Returns:
      What was given as `status`.

    Raises:
      CacheError: the subclass named like the status, with `index` and `num_refused`.
      UsageError: inside jit, or for what holds no status.

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
    """Return statuses as integers on the host, [B]."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(status)):
        raise UsageError(
            "raise_for_status looks at values on the host: call it outside jit; "
            "inside, compare batch.status, as in `batch.status == jkv.Status.OK`"
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
            f"raise_for_status takes a status, a result that has one, or the pair that "
            f"a verb returns, got {type(status).__name__}{advice}"
        )
    return codes.ravel()
