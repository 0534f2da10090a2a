"""A request: what was asked, and what has come of each of its sequences.

Symbols: P tokens of the prompt, n sequences of the request.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jkv.decoding.texts.results import FinishReason
from jkv.serving.request.ask import Client
from jkv.serving.request.texts import TextStream


class RequestState(enum.Enum):
    """Where a request is. It ends in one of the last three.

    Example:
      >>> from jkv.serving import RequestState
      >>> RequestState("preempted").name
      'PREEMPTED'
    """

    WAITING = "waiting"  # none of its sequences has begun, or the others have ended
    RUNNING = "running"  # one of them runs
    PREEMPTED = "preempted"  # they gave their blocks back, and go on later
    FINISHED = "finished"  # each one came to its end
    CANCELLED = "cancelled"  # by the user, a consumer that left, or its deadline
    FAILED = "failed"  # an exception


class EngineError(RuntimeError):
    """A request failed, or the engine cannot go on; the cause is attached."""


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sequence of a request.

    It knows its request by number: a reference would be a circle, and what has ended
    would stay in memory until the garbage collector finds it.
    """

    request_id: int
    index: int  # which of the request's n sequences
    stream: TextStream | None  # None without a detokenizer
    sequence: int = -1  # in the device's generation; -1 until it is there
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights
    context_versions: list[int] = dataclasses.field(default_factory=list)
    oldest_version: int = 0  # that any key or value in its context can be of now
    reason: FinishReason = FinishReason.RUNNING
    stage: RequestState = RequestState.WAITING  # one of the first three
    newest: float | None = None  # when its newest tokens were read
    cached_tokens: int = 0  # of its prompt, that the prefix index had

    @property
    def has_ended(self) -> bool:
        return self.reason != FinishReason.RUNNING

    @property
    def text(self) -> str | None:
        """What can be shown so far; None without a detokenizer."""
        return None if self.stream is None else self.stream.text

    def read(self, news: "SequenceNews") -> "Extension":
        """Return what is taken of a window, up to a stop string; change nothing."""
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
        stream: TextStream | None,  # the text with the new tokens
        version: int,  # of the weights that chose them
    ) -> None:
        self.tokens += news.tokens
        self.versions += [version] * len(news.tokens)
        self.context_versions += [self.oldest_version] * len(news.tokens)
        self.logprobs += news.logprobs
        self.stream = stream


class SequenceNews(NamedTuple):
    """What a window brought for one sequence of the generation."""

    sequence: int
    tokens: list[int]  # new ones
    logprobs: list[float]  # theirs
    reason: FinishReason  # why it ended, RUNNING if it did not
    stage: RequestState
    cached_tokens: int  # of its prompt


# What a sample takes of a window, and its text then.
Extension: TypeAlias = tuple[SequenceNews, TextStream | None]


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What was asked, which does not change, and what has come of it.

    Times are seconds of the engine's clock.
    """

    # What was asked, read from an `Ask`.
    tokens: np.ndarray[Any, Any]  # i32[P], the prompt
    n: int
    max_new_tokens: int
    sampling: dict[str, np.ndarray[Any, Any]]  # fields of `Sampling`, [n]
    stop_tokens: tuple[int, ...]
    stop_sequences: tuple[tuple[int, ...], ...]
    stop_strings: tuple[str, ...]
    salt: int
    priority: int
    client: Client  # who asks, for the order in which requests begin
    variant: int  # how it is steered, -1 not at all
    timeout: float | None  # seconds
    keep: int  # the class of what stays cached of it
    keep_seconds: float | None  # for how long; None: until it is handed out

    # What has come of it, since `begin`.
    request_id: int = -1  # the number that `submit` returns
    samples: list[Sample] = dataclasses.field(default_factory=list)  # n
    submitted: float = 0.0
    first_token: float | None = None  # when its first token was read
    error: BaseException | None = None  # what made it fail
    is_parked: bool = False  # whether its texts are kept when they end
    # Called when there is something new; each from the thread that does the steps.
    listeners: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def begin(self, request_id: int, now: float, stream: TextStream | None) -> None:
        """Take a number, and a sample for each of the n sequences."""
        self.request_id, self.submitted = request_id, now
        # A sample reads on a copy of its stream, so they can share the first.
        self.samples += [Sample(request_id, index, stream) for index in range(self.n)]

    def text_of(self, sample: Sample) -> np.ndarray[Any, Any]:
        """Return the prompt and what a sample has, i32[...]."""
        return np.concatenate([self.tokens, np.array(sample.tokens, np.int32)])

    @property
    def has_ended(self) -> bool:
        return all(sample.has_ended for sample in self.samples)

    @property
    def state(self) -> RequestState:
        if not self.has_ended:
            stages = {s.stage for s in self.samples if not s.has_ended}
            for stage in (RequestState.RUNNING, RequestState.PREEMPTED):
                if stage in stages:
                    return stage
            return RequestState.WAITING
        reasons = {sample.reason for sample in self.samples}
        if FinishReason.FAILED in reasons:
            return RequestState.FAILED
        if reasons & {FinishReason.CANCELLED, FinishReason.DEADLINE}:
            return RequestState.CANCELLED
        return RequestState.FINISHED

    def raise_error(self) -> None:
        if self.error is not None:
            raise EngineError(
                f"request {self.request_id} failed: {self.error!r}"
            ) from self.error
