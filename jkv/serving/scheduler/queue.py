"""The queue of requests: which wait on the host, and which the device computes.

The device's generation has Q prompts of `num_samples` sequences each. A request with
more sequences takes several prompts, each for its own samples. Whatever ends a sequence
goes through `Queue.end`: there the generation's sequence is cancelled, and its prompt
is free for another request once all of its sequences have ended.

Symbols: Q prompts and N sequences of the generation.
"""

import heapq
from collections import deque
from typing import Any

import numpy as np

from jkv.decoding.texts.results import FinishReason
from jkv.serving.request.request import Request, RequestState, Sample


class Queue:
    """Requests that have not ended.

    Attributes:
      requests: all of them by number, those that wait here and those on the device.
      num_waiting: prompts that wait here.
    """

    def __init__(self, num_prompts: int, num_samples: int):
        self.requests: dict[int, Request] = {}
        self.num_waiting = 0
        self._num_samples = num_samples
        # Priority, request and the first of its samples: the order of the queue.
        self._waiting: list[tuple[int, int, int]] = []
        self._free = deque(range(num_prompts))  # prompts of the generation
        # What each sequence of the generation computes, until that has ended.
        self._computed: list[Sample | None] = [None] * (num_prompts * num_samples)
        self._cancelled = np.zeros(num_prompts * num_samples, bool)

    @property
    def has_changes(self) -> bool:
        """Whether the device has to hear of a request that begins or ends."""
        return bool(self._cancelled.any() or (self.num_waiting and self._free))

    @property
    def has_work(self) -> bool:
        """Whether the device has a sequence to compute."""
        return len(self._free) * self._num_samples < len(self._computed)

    def add(self, request: Request) -> None:
        """Let a request wait: by priority, then first come first served."""
        self.requests[request.request_id] = request
        for first in range(0, request.n, self._num_samples):
            heapq.heappush(self._waiting, (request.priority, request.request_id, first))
            self.num_waiting += 1

    def dispatch(self, most: int) -> list[tuple[Request, int]]:
        """Give free prompts of the generation to the first that wait.

        Args:
          most: how many at one time.

        Returns:
          Requests, and the first of the samples that share the prompt; each sample
          knows its sequence now.
        """
        dispatched: list[tuple[Request, int]] = []
        while self._waiting and self._free and len(dispatched) < most:
            _, request_id, first = heapq.heappop(self._waiting)
            request = self.requests.get(request_id)
            if request is None:  # it has ended
                continue
            self.num_waiting -= 1
            sequence = self._free.popleft() * self._num_samples
            for sample in self._find_sharing(request, first):
                self._computed[sequence] = sample
                sample.sequence = sequence
                sequence += 1
            dispatched.append((request, first))
        return dispatched

    def take_cancelled(self) -> np.ndarray[Any, Any]:
        """Return which sequences of the generation to end, bool[N], once."""
        taken, self._cancelled = self._cancelled, np.zeros_like(self._cancelled)
        return taken

    def find_begun(self) -> list[list[Sample]]:
        """Return the samples on the device: those that share a prompt, with ended ones.

        Returns:
          A list for each prompt of the generation that has one which goes on.
        """
        on_device = [each for each in self._computed if each is not None]
        first = {
            (s.request_id, s.index - s.index % self._num_samples) for s in on_device
        }
        return [
            self._find_sharing(self.requests[request_id], index)
            for request_id, index in sorted(first)
        ]

    def find_computed(self) -> list[Sample | None]:
        """Return what each of the N sequences computes now; the list stays as it is."""
        return list(self._computed)

    def end(self, sample: Sample, reason: FinishReason, *, is_computed: bool) -> bool:
        """End a sequence, wherever it is; the one way out of the queue.

        Args:
          sample: it has not ended.
          reason: why.
          is_computed: whether the device may go on with it, unless it is told.

        Returns:
          Whether that was the last of the request, which is then forgotten.
        """
        request = self.requests[sample.request_id]
        sample.reason = reason
        if sample.sequence >= 0:
            self._cancelled[sample.sequence] |= is_computed
            self._computed[sample.sequence] = None
            self._free_prompt(sample.sequence // self._num_samples)
        elif self._is_last_of_prompt(request, sample):
            self.num_waiting -= 1
        if request.has_ended:
            del self.requests[request.request_id]
            self._forget_ended()
        return request.has_ended

    def count_states(self) -> dict[RequestState, int]:
        """Return how many requests are in each state."""
        counts = dict.fromkeys(RequestState, 0)
        for request in self.requests.values():
            counts[request.state] += 1
        return counts

    def _find_sharing(self, request: Request, first: int) -> list[Sample]:
        """Return the samples that share a prompt of the generation."""
        return request.samples[first : first + self._num_samples]

    def _free_prompt(self, prompt: int) -> None:
        """Let a prompt of the generation be free if all of its sequences have ended."""
        start = prompt * self._num_samples
        sharing = self._computed[start : start + self._num_samples]
        if all(each is None for each in sharing):
            self._free.append(prompt)

    def _is_last_of_prompt(self, request: Request, sample: Sample) -> bool:
        """Whether all samples that share a prompt with this one have ended."""
        first = sample.index - sample.index % self._num_samples
        return all(each.has_ended for each in self._find_sharing(request, first))

    def _forget_ended(self) -> None:
        """Drop entries of requests that ended while they waited.

        They are left in the heap until they are the larger part. Samples that wait end
        with their whole request, so a request that is known has no such entry.
        """
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [e for e in self._waiting if e[1] in self.requests]
            heapq.heapify(self._waiting)
