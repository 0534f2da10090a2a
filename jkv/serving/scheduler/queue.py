"""Queue of unfinished requests, on the host and on the device.

The device's generation has Q prompts of `num_samples` sequences each. A request with
more sequences is split over several prompts. Every sequence finishes through
`Queue.end`, which cancels it on the device if needed; the prompt's index is reused once
all of its sequences have finished.

`Waiting` is fair: prompts wait by priority, then by client service, then by age. Within
a priority, the client with the least service per share is next. Service is counted in
tokens as they are computed, since completion lengths are unknown in advance: the
virtual token counter of Sheng et al. ("Fairness in serving large language models",
2024, https://arxiv.org/abs/2401.00588). A client that becomes active starts from the
least service of the waiting ones, so that idle clients accumulate no credit: the
virtual time of start-time fair queueing (Goyal, Vin and Cheng 1996,
https://doi.org/10.1145/248156.248171).

Symbols: Q prompts and N sequences of the generation.
"""

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.decoding import FinishReason
from jkv.serving.request.request import Client, RequestState, Sample


class Queue:
    """Unfinished requests, waiting on the host or enqueued on the device."""

    def __init__(
        self, num_prompts: int, num_samples: int, shares: Mapping[Client, float]
    ):
        self.requests: dict[int, RequestState] = {}  # by number
        self._num_samples = num_samples
        # Items are a request number and the index of the first sample of a prompt.
        self._waiting = Waiting(shares)
        self._free = deque(range(num_prompts))  # free indices in the generation
        # The unfinished sample of each sequence of the generation.
        self._computed: list[Sample | None] = [None] * (num_prompts * num_samples)
        self._cancelled = np.zeros(num_prompts * num_samples, bool)
        self._is_marked = False  # True if `is_parked` of a request has changed

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_waiting

    @property
    def has_changes(self) -> bool:
        """True if requests are to be enqueued, cancelled or marked on the device."""
        dispatches = self.num_waiting and self._free
        return bool(self._is_marked or self._cancelled.any() or dispatches)

    @property
    def has_work(self) -> bool:
        """True if the device has an unfinished sequence."""
        return len(self._free) * self._num_samples < len(self._computed)

    def add(self, state: RequestState) -> None:
        """Enqueue a request by priority, then by its client's share."""
        self.requests[state.request_id] = state
        for first in range(0, state.request.n, self._num_samples):
            prompt = state.request_id, first
            self._waiting.add(state.request.priority, state.request.client, prompt)

    def dispatch(self, most: int) -> list[tuple[RequestState, int]]:
        """Assign at most `most` free prompts of the generation to waiting requests.

        Returns requests, each with the index of the first sample that shares the
        prompt, and sets the sequence index of each sample.
        """
        dispatched: list[tuple[RequestState, int]] = []
        while self._free and len(dispatched) < most:
            prompt = self._waiting.pop()
            if prompt is None:
                break
            request_id, first = prompt
            state = self.requests[request_id]
            self.charge(state, len(state.request.tokens))
            sequence = self._free.popleft() * self._num_samples
            for sample in self.find_sharing(state, first):
                self._computed[sequence] = sample
                sample.sequence = sequence
                sequence += 1
            dispatched.append((state, first))
        return dispatched

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """Add computed tokens to the service of a request's client."""
        self._waiting.charge(state.request.priority, state.request.client, num_tokens)

    def take_cancelled(self) -> np.ndarray[Any, Any]:
        """Return the sequences to cancel on the device, bool[N], and reset them."""
        taken, self._cancelled = self._cancelled, np.zeros_like(self._cancelled)
        return taken

    def mark(self) -> None:
        """Note that requests are parked, or no longer."""
        self._is_marked = True

    def take_parked(self) -> np.ndarray[Any, Any]:
        """Return the sequences of requests to be parked, bool[N]."""
        self._is_marked = False
        samples = self._computed
        marks = [
            s is not None and self.requests[s.request_id].is_parked for s in samples
        ]
        return np.array(marks, bool)

    def find_begun(self) -> list[list[Sample]]:
        """Return the samples on the device, in groups that share a prompt."""
        on_device = [each for each in self._computed if each is not None]
        first = {
            (s.request_id, s.index - s.index % self._num_samples) for s in on_device
        }
        return [
            self.find_sharing(self.requests[request_id], index)
            for request_id, index in sorted(first)
        ]

    def find_computed(self) -> list[Sample | None]:
        """Return the sample of each of the N sequences, as a copy."""
        return list(self._computed)

    def end(self, sample: Sample, reason: FinishReason, *, is_computed: bool) -> bool:
        """Finish a sample, on the host or on the device.

        `is_computed` marks the sequence for cancellation on the device, which otherwise
        continues it. Returns True for the last sample of the request, which is then
        removed.
        """
        state = self.requests[sample.request_id]
        sample.reason = reason
        first = sample.index - sample.index % self._num_samples
        sharing = self.find_sharing(state, first)
        is_last_of_prompt = all(each.has_ended for each in sharing)
        if is_last_of_prompt:
            prompt = state.request_id, first
            self._waiting.end(state.request.priority, state.request.client, prompt)
        if sample.sequence >= 0:
            self._cancelled[sample.sequence] |= is_computed
            self._computed[sample.sequence] = None
            if is_last_of_prompt:
                self._free.append(sample.sequence // self._num_samples)
        if state.has_ended:
            del self.requests[state.request_id]
        return state.has_ended

    def count_states(self) -> dict[str, int]:
        """Return the number of waiting, running and preempted requests."""
        counts = dict.fromkeys(("waiting", "running", "preempted"), 0)
        for state in self.requests.values():
            counts[state.status.value] += 1
        return counts

    def find_sharing(self, state: RequestState, first: int) -> list[Sample]:
        """Return the samples that share a prompt of the generation."""
        return state.samples[first : first + self._num_samples]


# Number of a request, and the index of the first sample that shares the prompt.
Prompt = tuple[int, int]


class Waiting:
    """Unfinished prompts of all priorities, waiting or on the device."""

    def __init__(self, shares: Mapping[Client, float]):
        for client, share in shares.items():
            is_number = isinstance(share, int | float | np.number)
            if not is_number or isinstance(share, bool) or not 0 < share < math.inf:
                raise ValueError(
                    f"shares must be finite numbers > 0, got {share!r} for {client!r}"
                )
        self.num_waiting = 0
        self._shares = dict(shares)
        self._levels: dict[int, FairQueue] = {}
        # A heap of the priorities with waiting prompts, removed lazily.
        self._order: list[int] = []
        self._ordered: set[int] = set()

    def add(self, priority: int, client: Client, prompt: Prompt) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = FairQueue(self._shares)
        level.add(client, prompt)
        self.num_waiting += 1
        if priority not in self._ordered:
            heapq.heappush(self._order, priority)
            self._ordered.add(priority)

    def pop(self) -> Prompt | None:
        while self._order:
            level = self._levels.get(self._order[0])
            if level is not None and level.num_waiting:
                self.num_waiting -= 1
                return level.pop()
            self._ordered.remove(heapq.heappop(self._order))
        return None

    def charge(self, priority: int, client: Client, num_tokens: int) -> None:
        self._levels[priority].charge(client, num_tokens)

    def end(self, priority: int, client: Client, prompt: Prompt) -> None:
        level = self._levels[priority]
        before = level.num_waiting
        level.end(client, prompt)
        self.num_waiting += level.num_waiting - before
        if not level.num_open:
            # The busy period is over; the next one starts with equal service.
            del self._levels[priority]


@dataclasses.dataclass(slots=True, eq=False)
class _Line:
    """A client's prompts of one priority."""

    client: Client
    share: float
    service: float = 0.0  # computed tokens over its share
    # Prompts in order of arrival, with their numbers.
    waiting: dict[Prompt, int] = dataclasses.field(default_factory=dict)
    num_open: int = 0  # prompts that have not finished
    number: int = 0  # of the first waiting prompt, or of the last that waited
    is_ordered: bool = False  # True if the heap has an entry of this line

    def find_place(self) -> tuple[float, int]:
        """Return the sort key of the line: service, then age."""
        self.number = next(iter(self.waiting.values()), self.number)
        return self.service, self.number


class FairQueue:
    """Prompts of one priority, with a line for each client."""

    def __init__(self, shares: Mapping[Client, float]):
        self.num_waiting = self.num_open = 0  # open ones are unfinished
        self._shares = shares
        self._lines: dict[Client, _Line] = {}
        # A heap with an entry (service, number, client) for each line with waiting
        # prompts, and for idle lines ahead of the others. Service only grows, so that a
        # stale entry comes too early and is corrected when it reaches the front.
        self._order: list[tuple[float, int, Client]] = []
        self._newest: _Line | None = None  # line of the last prompt taken
        self._next_number = 0

    def add(self, client: Client, prompt: Prompt) -> None:
        """Enqueue a prompt behind the others of its client."""
        floor = self._find_floor()  # may remove the line
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(client, self._shares.get(client, 1.0))
        if not line.waiting:
            line.service = max(line.service, floor)
        line.waiting[prompt] = self._next_number
        self._next_number += 1
        line.num_open += 1
        self.num_open += 1
        self.num_waiting += 1
        if not line.is_ordered:
            self._put(line)

    def pop(self) -> Prompt:
        """Remove and return the next prompt; at least one must be waiting."""
        line = self._find_first()
        assert line is not None
        self._take_entry()
        prompt = next(iter(line.waiting))
        del line.waiting[prompt]
        self.num_waiting -= 1
        self._newest = line
        if line.waiting:
            self._put(line)
        return prompt

    def charge(self, client: Client, num_tokens: int) -> None:
        """Add computed tokens to the service of a client with an open prompt."""
        line = self._lines[client]
        line.service += num_tokens / line.share

    def end(self, client: Client, prompt: Prompt) -> None:
        """Remove a finished prompt, waiting or not."""
        line = self._lines[client]
        if line.waiting.pop(prompt, None) is not None:
            self.num_waiting -= 1
        line.num_open -= 1
        self.num_open -= 1
        if not line.num_open and not line.is_ordered:
            self._put(line)

    def _find_first(self) -> _Line | None:
        """Return the next line, with its entry at the front of the heap, or None."""
        while self.num_waiting:
            service, number, client = self._order[0]
            line = self._lines[client]
            if line.waiting and (service, number) == line.find_place():
                return line
            self._take_entry()
            if line.waiting or (not line.num_open and line.service > service):
                self._put(line)
            elif not line.num_open:
                # All waiting clients have at least this service, so that a new line
                # would start at the same key.
                del self._lines[client]
        return None

    def _find_floor(self) -> float:
        """Return the initial service of a client that becomes active.

        It is the virtual time and never decreases: every waiting client has at least
        the service of the line of the last prompt taken.
        """
        line = self._find_first() or self._newest
        return 0.0 if line is None else line.service

    def _put(self, line: _Line) -> None:
        heapq.heappush(self._order, (*line.find_place(), line.client))
        line.is_ordered = True

    def _take_entry(self) -> None:
        _, _, client = heapq.heappop(self._order)
        self._lines[client].is_ordered = False
