"""State of a request in an engine: the progress of its sequences.

Symbols: n sequences of the request.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jkv.decoding.texts.results import FinishReason
from jkv.serving.request.request import CheckedRequest
from jkv.serving.request.texts import TextStream


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

    def text_of(self, sample: Sample) -> np.ndarray[Any, Any]:
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
