"""What a reader gets of a request: the whole at the end, or events on the way."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jkv.decoding.texts.results import FinishReason
from jkv.serving.request.request import Request


class Completion(NamedTuple):
    """What came of one sequence of a request."""

    request_id: int  # from `submit`
    sample: int  # which of the request's n sequences
    tokens: list[int]  # new ones, those of a stop token or stop string included
    logprobs: list[float]  # of each token under the model
    reason: FinishReason  # RUNNING until it ends
    text: str | None  # of the tokens, without a stop string; None without detokenize
    # Of the weights that chose each token, as `Engine.update_params` counts them.
    versions: Sequence[int] = ()
    # No key or value that each token attended to is of older weights than these.
    context_versions: Sequence[int] = ()
    # Of the prompt, those that were not computed for it: the prefix index had them.
    cached_tokens: int = 0


class Event(NamedTuple):
    """What is new of one sequence since the last event."""

    request_id: int  # from `submit`
    sample: int  # which of the request's n sequences
    tokens: list[int]  # new ones
    logprobs: list[float]  # theirs
    text: str  # what can be shown by now; empty without detokenize
    reason: FinishReason  # RUNNING unless this is the last event
    cached_tokens: int = 0  # as of a `Completion`


def read_completions(request: Request) -> list[Completion]:
    return [
        Completion(
            request.request_id,
            sample.index,
            list(sample.tokens),
            list(sample.logprobs),
            sample.reason,
            sample.text,
            list(sample.versions),
            list(sample.context_versions),
            sample.cached_tokens,
        )
        for sample in request.samples
    ]


class Cursor:
    """How far one consumer has read a request: what it missed is given at once."""

    def __init__(self, request: Request):
        self._request = request
        self._tokens = [0] * len(request.samples)
        self._shown = [0] * len(request.samples)
        self._is_over = [False] * len(request.samples)

    @property
    def is_over(self) -> bool:
        return all(self._is_over)

    def read(self) -> list[Event]:
        """Return what is new, an event for each sequence that has something."""
        events = []
        for i, sample in enumerate(self._request.samples):
            if self._is_over[i]:
                continue
            text, start = sample.text or "", self._tokens[i]
            if len(sample.tokens) == start and not sample.has_ended:
                continue
            self._tokens[i], self._is_over[i] = len(sample.tokens), sample.has_ended
            fresh, self._shown[i] = text[self._shown[i] :], len(text)
            events.append(
                Event(
                    self._request.request_id,
                    i,
                    sample.tokens[start:],
                    sample.logprobs[start:],
                    fresh,
                    sample.reason,
                    sample.cached_tokens,
                )
            )
        return events


class Results:
    """Requests that have ended: so many at most, for so long, the oldest gone first."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]):
        if most < 0 or not seconds >= 0:
            raise ValueError(
                f"a store keeps 0 or more results for 0 or more seconds, got {most} "
                f"and {seconds}"
            )
        self._most, self._seconds, self._clock = most, seconds, clock
        self._entries: OrderedDict[int, tuple[float, Request]] = OrderedDict()

    def put(self, request: Request) -> None:
        over = self._clock() + self._seconds
        self._entries[request.request_id] = over, request
        self._forget_old()

    def find(self, request_id: int) -> Request | None:
        self._forget_old()
        entry = self._entries.get(request_id)
        return None if entry is None else entry[1]

    def _forget_old(self) -> None:
        now, entries = self._clock(), self._entries
        while entries and (
            len(entries) > self._most or next(iter(entries.values()))[0] <= now
        ):
            entries.popitem(last=False)


class News:
    """Requests that have changed since the last step told of them."""

    def __init__(self) -> None:
        self._changed: dict[int, Request] = {}
        self._cursors: dict[int, Cursor] = {}  # what was told of each that goes on

    def __bool__(self) -> bool:
        return bool(self._changed)

    def follow(self, request: Request) -> None:
        self._cursors[request.request_id] = Cursor(request)

    def note(self, request: Request) -> None:
        self._changed[request.request_id] = request

    def tell(self, left: Callable[[Request], None]) -> list[Event]:
        """Return what is new, and wake consumers; `left` as for `wake`."""
        events = []
        changed, self._changed = self._changed, {}
        for request in changed.values():
            events += self._cursors[request.request_id].read()
            if request.has_ended:
                del self._cursors[request.request_id]
            wake(request, left)
        return events


def wake(request: Request, left: Callable[[Request], None]) -> None:
    """Wake the consumers of a request; `left` is called if one of them is gone."""
    for listener in list(request.listeners):
        try:
            listener()
        except RuntimeError:  # its event loop is closed
            request.listeners.remove(listener)
            left(request)
