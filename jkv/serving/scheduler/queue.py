"""Queue of unfinished requests, on the host and on the device.

The device's generation has Q prompts of `num_samples` sequences each. A request with
more sequences is split over several prompts. Every sequence finishes through
`Queue.end`, which cancels it on the device if needed; the prompt's index is reused once
all of its sequences have finished.

Symbols: Q prompts and N sequences of the generation.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.decoding.texts.results import FinishReason
from jkv.serving.request.request import Client
from jkv.serving.request.state import RequestState, Sample
from jkv.serving.scheduler.waiting import Waiting


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

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_waiting

    @property
    def has_changes(self) -> bool:
        """True if requests are to be enqueued or cancelled on the device."""
        return bool(self._cancelled.any() or (self.num_waiting and self._free))

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
