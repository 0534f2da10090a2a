"""A request: its options, as a record or as keyword arguments, and its progress.

Symbols: P tokens of the prompt, n sequences of the request.
"""

import collections
import dataclasses
import enum
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np

from jkv.arguments import I32
from jkv.decoding import FinishReason, Sampling
from jkv.metadata.requests import Integers
from jkv.serving.request.texts import TextStream
from jkv.signatures import set_defaults
from jkv.status import UsageError

MOST_STRING_SALTS = 2**16  # remembered string salts; a forgotten one gets a new number

# Client of a request; None is the common client of requests without one.
Client = str | int | None

# Variant of a request without a logits processor.
NO_VARIANT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Options of a request.

    Attributes:
      tokens: i32[P] or a list, the prompt.
      n: number of sequences sampled from it.
      max_new_tokens: largest number of new tokens of each; None is the engine's.
      sampling: sampling options, each field one number or n. One seed is spread over
        the sequences (`jkv.decoding.spread_seeds`).
      stop_tokens: i32[E], tokens that finish a sequence, and are kept; None is the
        engine's.
      stop_sequences: i32[C] each, or lists of tokens, likewise.
      stop_strings: one string or several that finish a sequence when they occur in its
        text. The text is cut before the string; `tokens` includes its tokens. Checked
        between windows.
      salt: cache salt: prefixes are shared only between requests of one salt. An int of
        32 bits, or a string, such as a client's secret, which is the same salt in every
        process that shares a store's folder. Beside strings, ints must be 0 or more.
      priority: smaller values are scheduled first.
      client: for fair scheduling (`shares`). Among queued requests of one priority, the
        client with the least service per share is next; requests of one client are
        served in order of arrival. Service counts tokens as they are computed: the
        prompt, including prefix cache hits, once per `max_samples` sequences, and new
        tokens. An idle client accumulates no credit. None is the common client of all
        requests without one.
      variant: variant of the engine's logits processor, below
        `logits_processor.num_variants`; -1 for none.
      timeout: seconds from submission until the request finishes with its tokens so
        far.
      keep: retention class of its cached blocks after it has finished, below the
        cache's `keep_classes` (`jkv.free`).
      keep_seconds: time from finishing until the class expires for unreferenced blocks;
        None is until eviction.
      spans: i32[P] or a list, the last position that each token of the prompt attends
        to, -1 for a causal token (`jkv.decoding.Prompts`). Requires
        `Engine(max_span=...)`.

    Example:
      >>> from jkv.serving import Request
      >>> Request([5, 6], max_new_tokens=20, priority=-1).n
      1
    """

    tokens: Integers
    n: int = 1
    max_new_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop_tokens: Integers | None = None
    stop_sequences: Sequence[Integers] = ()
    stop_strings: Sequence[str] | str = ()
    salt: int | str = 0
    priority: int = 0
    client: Client = None
    variant: int = NO_VARIANT
    timeout: float | None = None
    keep: int = 0
    keep_seconds: float | None = None
    spans: Integers | None = None

    @classmethod
    def of(cls, tokens: "Request | Integers", fields: "RequestFields") -> "Request":
        """Return `tokens` if it is a `Request`, or create one from the fields."""
        known = [each.name for each in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise UsageError(
                    f"{name} must be a field of Request: {', '.join(known)}"
                )
        if not isinstance(tokens, Request):
            return cls(tokens, **fields)
        if fields:
            raise UsageError(
                f"got a Request and the keywords {', '.join(fields)}; set them on it"
            )
        return tokens


class RequestFields(TypedDict, total=False):
    """Fields of `Request` except the prompt, as keyword arguments."""

    n: int
    max_new_tokens: int | None
    sampling: Sampling
    stop_tokens: Integers | None
    stop_sequences: Sequence[Integers]
    stop_strings: Sequence[str] | str
    salt: int | str
    priority: int
    client: Client
    variant: int
    timeout: float | None
    keep: int
    keep_seconds: float | None
    spans: Integers | None


set_defaults(RequestFields, Request)


class CheckedRequest(Request):
    """A valid request, with the engine's defaults filled in.

    `sampling` has arrays [n], and `salt` is the number of a string.
    """

    tokens: np.ndarray[Any, Any]  # i32[P]
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    stop_sequences: tuple[tuple[int, ...], ...]
    stop_strings: tuple[str, ...]
    salt: int
    spans: np.ndarray[Any, Any] | None  # i32[P]


class SaltNumbers:
    """Numbers for string salts: negative, in the order of first use.

    A cache identifies a salt by 32 bits. The number of a string is valid in one
    process; stores, whose blocks outlive the process, use the string's hash.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = -1
        # Hashes by number, and numbers by hash, least recently used first.
        self._names: dict[int, str] = {}
        self._numbers: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._has_negative = False

    def number(self, salt: int | str) -> int:
        """Return the number of a salt, i32; an int is returned as it is.

        Raises:
          ValueError: for negative ints, as 32 bits, beside strings.
        """
        with self._lock:
            has_strings = bool(self._numbers) or isinstance(salt, str)
            has_negative = self._has_negative or (isinstance(salt, int) and salt < 0)
            if has_negative and has_strings:
                raise ValueError(
                    "salt must be a str or an int from 0 to 2**31 - 1 if any request "
                    f"has a str, got {salt!r:.60}"
                )
            if isinstance(salt, int):
                self._has_negative = has_negative
                return salt
            name = hashlib.blake2b(
                salt.encode(errors="surrogatepass"), digest_size=24
            ).hexdigest()
            if name not in self._numbers:
                if self._next < I32.min:
                    raise ValueError(
                        f"salt: at most {-I32.min} different strings are supported, "
                        f"got {salt!r:.60}; restart the process or reuse salts"
                    )
                self._numbers[name], self._names[self._next] = self._next, name
                self._next -= 1
                if len(self._numbers) > MOST_STRING_SALTS:
                    _, oldest = self._numbers.popitem(last=False)
                    del self._names[oldest]
            self._numbers.move_to_end(name)
            return self._numbers[name]

    def name(self, number: int) -> int | str | None:
        """Return the process-independent name of a salt; None if it was forgotten."""
        with self._lock:
            if number >= 0 or self._next == -1:
                return number
            return self._names.get(number)


class RequestStatus(enum.Enum):
    """Status of a request; the last three are final.

    Example:
      >>> from jkv.serving import RequestStatus
      >>> RequestStatus("preempted").name
      'PREEMPTED'
    """

    WAITING = "waiting"  # no unfinished sequence has been admitted
    RUNNING = "running"  # at least one sequence is running
    PREEMPTED = "preempted"  # the unfinished sequences have been preempted
    FINISHED = "finished"  # every sequence has finished
    CANCELLED = "cancelled"  # by the user, a closed iterator, or the timeout
    FAILED = "failed"  # by an exception


class EngineError(RuntimeError):
    """A request failed, or the engine cannot continue; the cause is attached."""


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sequence of a request.

    It refers to its request by number: a reference cycle would keep finished requests
    in memory until garbage collection.
    """

    request_id: int
    index: int  # of the request's n sequences
    stream: TextStream | None  # None without a detokenizer
    sequence: int = -1  # index in the device's generation, -1 before admission there
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # of each token
    context_versions: list[int] = dataclasses.field(default_factory=list)
    oldest_version: int = 0  # lower bound for the keys and values in its context
    reason: FinishReason = FinishReason.RUNNING
    stage: RequestStatus = RequestStatus.WAITING  # one of the first three
    newest: float | None = None  # time when its newest tokens were read
    cached_tokens: int = 0  # prompt tokens hit in the prefix cache
    row: int = -1  # cache row to continue, swapped in for a resumed request

    @property
    def has_ended(self) -> bool:
        return self.reason != FinishReason.RUNNING

    @property
    def text(self) -> str | None:
        """Detokenized text so far; None without a detokenizer."""
        return None if self.stream is None else self.stream.text

    def read(self, news: "SequenceNews") -> "Extension":
        """Return the accepted part of the news, up to a stop string; change nothing."""
        has_ended = news.reason != FinishReason.RUNNING
        if self.stream is None or not (news.tokens or has_ended):
            return news, self.stream
        stream = self.stream.copy()
        kept = stream.advance(news.tokens, has_ended=has_ended)
        if kept is None:
            return news, stream
        num_new = kept - len(self.tokens)
        tokens, logprobs = news.tokens[:num_new], news.logprobs[:num_new]
        reason = FinishReason.STOP
        return news._replace(tokens=tokens, logprobs=logprobs, reason=reason), stream

    def take(
        self,
        news: "SequenceNews",
        stream: TextStream | None,  # advanced by the new tokens
        version: int,  # of the weights that produced them
    ) -> None:
        self.tokens += news.tokens
        self.versions += [version] * len(news.tokens)
        self.context_versions += [self.oldest_version] * len(news.tokens)
        self.logprobs += news.logprobs
        self.stream = stream


class SequenceNews(NamedTuple):
    """Report of a window for one sequence of the generation."""

    sequence: int
    tokens: list[int]  # new tokens
    logprobs: list[float]  # their log-probabilities
    reason: FinishReason  # RUNNING while unfinished
    stage: RequestStatus
    cached_tokens: int  # of its prompt


# The part of the news that a sample accepts, and its advanced text stream.
Extension: TypeAlias = tuple[SequenceNews, TextStream | None]


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request and its progress. Times are seconds of the engine's clock."""

    request: CheckedRequest
    request_id: int = -1  # return value of `submit`
    samples: list[Sample] = dataclasses.field(default_factory=list)  # n
    submitted: float = 0.0
    first_token: float | None = None  # time when its first token was read
    error: BaseException | None = None  # cause of failure
    is_parked: bool = False  # True if its sequences are parked when they finish
    # Called after a change, from the thread that runs the steps.
    listeners: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def begin(self, request_id: int, now: float, stream: TextStream | None) -> None:
        """Assign the number, and create a sample for each of the n sequences."""
        self.request_id, self.submitted = request_id, now
        # A sample advances a copy of its stream, so that all can share the first.
        self.samples += [
            Sample(request_id, index, stream) for index in range(self.request.n)
        ]

    def tokens_of(self, sample: Sample) -> np.ndarray[Any, Any]:
        """Return the prompt and the new tokens of a sample, i32[...]."""
        return np.concatenate([self.request.tokens, np.array(sample.tokens, np.int32)])

    @property
    def has_ended(self) -> bool:
        return all(sample.has_ended for sample in self.samples)

    @property
    def status(self) -> RequestStatus:
        if not self.has_ended:
            stages = {s.stage for s in self.samples if not s.has_ended}
            for stage in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
                if stage in stages:
                    return stage
            return RequestStatus.WAITING
        reasons = {sample.reason for sample in self.samples}
        if FinishReason.FAILED in reasons:
            return RequestStatus.FAILED
        if reasons & {FinishReason.CANCELLED, FinishReason.DEADLINE}:
            return RequestStatus.CANCELLED
        return RequestStatus.FINISHED

    def raise_error(self) -> None:
        if self.error is not None:
            raise EngineError(
                f"request {self.request_id} failed: {self.error!r}"
            ) from self.error
