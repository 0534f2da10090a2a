"""A request under way: what has come of each of its sequences, and in which state."""

import dataclasses
import enum
from collections.abc import Callable
from typing import NamedTuple

from jkv.decoding.texts.results import FinishReason
from jkv.serving.submission import Request
from jkv.serving.texts import TextStream


class RequestState(enum.Enum):
    """Where a request is. It ends in one of the last three.

    Example:
      >>> from jkv.serving import RequestState
      >>> RequestState("preempted").name
      'PREEMPTED'
    """

    WAITING = "waiting"  # none of its sequences has begun, or the others have ended
    RUNNING = "running"  # one of them has a place
    PREEMPTED = "preempted"  # they gave their blocks back, and go on later
    FINISHED = "finished"  # each one came to its end
    CANCELLED = "cancelled"  # by the user, a consumer that left, or its deadline
    FAILED = "failed"  # an exception


class EngineError(RuntimeError):
    """A request failed, or the engine cannot go on; the cause is attached."""


class QueueFull(RuntimeError):
    """As many requests wait as may; submit again later."""


class Completion(NamedTuple):
    """What came of one sequence of a request."""

    request_id: int  # from `submit`
    sample: int  # which of the request's n sequences
    tokens: list[int]  # new ones, those of a stop token or stop string included
    logprobs: list[float]  # of each token under the model
    reason: FinishReason  # RUNNING until it ends
    text: str | None  # of the tokens, without a stop string; None without detokenize


class Event(NamedTuple):
    """What is new of one sequence since the last event."""

    request_id: int  # from `submit`
    sample: int  # which of the request's n sequences
    tokens: list[int]  # new ones
    logprobs: list[float]  # theirs
    text: str  # what can be shown by now; empty without detokenize
    reason: FinishReason  # RUNNING unless this is the last event


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sequence of a request."""

    stream: TextStream | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: FinishReason = FinishReason.RUNNING
    stage: RequestState = RequestState.WAITING  # one of the first three
    newest: float | None = None  # when its newest tokens were read

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.reason != FinishReason.RUNNING

    def extend(
        self, tokens: list[int], logprobs: list[float], reason: FinishReason
    ) -> FinishReason:
        """Take what the device computed, up to a stop string.

        Args:
          tokens: new ones.
          logprobs: theirs.
          reason: why it ended there, RUNNING if it did not.

        Returns:
          Why it ends now; the caller sets it.
        """
        self.tokens += tokens
        self.logprobs += logprobs
        if self.stream is None:
            return reason
        has_ended = reason != FinishReason.RUNNING
        kept = self.stream.advance(tokens, has_ended=has_ended)
        if kept is None:
            return reason
        del self.tokens[kept:], self.logprobs[kept:]
        return FinishReason.STOP


class Record:
    """A request, its samples, and when what happened (seconds of the engine's clock).

    Attributes:
      request_id: the number that `submit` returned.
      request: what was asked.
      samples: its n sequences.
      submitted: when.
      first_token: when its first token was read, None until then.
      error: what made it fail, if it did.
      listeners: called when there is something new; each from the engine's thread.
    """

    def __init__(
        self, request_id: int, request: Request, samples: list[Sample], now: float
    ):
        self.request_id, self.request, self.samples = request_id, request, samples
        self.submitted = now
        self.first_token: float | None = None
        self.error: BaseException | None = None
        self.listeners: list[Callable[[], None]] = []

    @property
    def has_ended(self) -> bool:
        """Whether all of its sequences have."""
        return all(sample.has_ended for sample in self.samples)

    @property
    def state(self) -> RequestState:
        """Where it is."""
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

    def completions(self) -> list[Completion]:
        """Return what there is of each sequence."""
        return [
            Completion(
                self.request_id,
                i,
                list(sample.tokens),
                list(sample.logprobs),
                sample.reason,
                None if sample.stream is None else sample.stream.text,
            )
            for i, sample in enumerate(self.samples)
        ]

    def raise_error(self) -> None:
        """Raise what made the request fail, if it did."""
        if self.error is not None:
            raise EngineError(
                f"request {self.request_id} failed: {self.error!r}"
            ) from self.error


class Cursor:
    """How far one consumer has read a request: what it missed is given at once."""

    def __init__(self, record: Record):
        self._record = record
        self._tokens = [0] * len(record.samples)
        self._shown = [0] * len(record.samples)
        self._is_over = [False] * len(record.samples)

    @property
    def is_over(self) -> bool:
        """Whether everything was read to the end."""
        return all(self._is_over)

    def read(self) -> list[Event]:
        """Return what is new, an event for each sequence that has something."""
        events = []
        for i, sample in enumerate(self._record.samples):
            if self._is_over[i]:
                continue
            text = "" if sample.stream is None else sample.stream.text
            start = self._tokens[i]
            if len(sample.tokens) == start and not sample.has_ended:
                continue
            self._tokens[i], self._is_over[i] = len(sample.tokens), sample.has_ended
            fresh, self._shown[i] = text[self._shown[i] :], len(text)
            events.append(
                Event(
                    self._record.request_id,
                    i,
                    sample.tokens[start:],
                    sample.logprobs[start:],
                    fresh,
                    sample.reason,
                )
            )
        return events
