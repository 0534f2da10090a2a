"""The book: who waits on the host, and who has which prompt of the generation.

A request with more sequences than a prompt of the generation has (`num_samples`) is
seated in several *parts*, each one prompt. Whatever ends a sequence goes through
`Book.end`: there its place in the generation is cancelled and its prompt given back.

Symbols: Q prompts and N sequences of the generation.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jkv.decoding.texts.results import FinishReason
from jkv.serving.record import Record, RequestState, Sample


class Part:
    """Sequences of a request that share a prompt of the generation.

    Attributes:
      record: the request.
      first: the first of its samples that is meant.
      count: how many.
      prompt: which prompt of the generation it is.
    """

    __slots__ = ("count", "first", "prompt", "record")

    def __init__(self, record: Record, first: int, count: int):
        self.record, self.first, self.count = record, first, count
        self.prompt = -1

    @property
    def samples(self) -> list[Sample]:
        """Its sequences, in order."""
        return self.record.samples[self.first : self.first + self.count]

    @property
    def has_ended(self) -> bool:
        """Whether all of its sequences have."""
        return all(sample.has_ended for sample in self.samples)


class Book:
    """Requests that have not ended."""

    def __init__(self, num_prompts: int, num_samples: int):
        self.records: dict[int, Record] = {}
        self._num_samples = num_samples
        self._waiting: list[tuple[int, int, int, Part]] = []
        self._num_waiting = 0  # parts in the heap that have not ended
        self._parts: list[Part | None] = [None] * num_prompts
        self._seated: dict[tuple[int, int], Part] = {}  # by request and first sample
        self._free = deque(range(num_prompts))
        self._cancelled = np.zeros(num_prompts * num_samples, bool)

    @property
    def num_waiting(self) -> int:
        """Parts that wait on the host."""
        return self._num_waiting

    @property
    def num_seated(self) -> int:
        """Parts that are in the generation."""
        return len(self._parts) - len(self._free)

    @property
    def has_changes(self) -> bool:
        """Whether the generation has to hear of somebody that comes or goes."""
        return bool(self._cancelled.any() or (self._num_waiting and self._free))

    def add(self, record: Record) -> None:
        """Let a request wait: by priority, then first come first served."""
        self.records[record.request_id] = record
        most, count = self._num_samples, len(record.samples)
        for first in range(0, count, most):
            part = Part(record, first, min(most, count - first))
            key = record.request.priority, record.request_id, first
            heapq.heappush(self._waiting, (*key, part))
            self._num_waiting += 1

    def seat(self, most: int) -> list[Part]:
        """Give prompts of the generation to the first that wait, as many as there are.

        Args:
          most: how many at one time.
        """
        seated: list[Part] = []
        while self._waiting and self._free and len(seated) < most:
            part = heapq.heappop(self._waiting)[-1]
            if part.has_ended:
                continue
            self._num_waiting -= 1
            part.prompt = self._free.popleft()
            self._parts[part.prompt] = part
            self._seated[part.record.request_id, part.first] = part
            seated.append(part)
        return seated

    def take_cancelled(self) -> np.ndarray[Any, Any]:
        """Return which sequences of the generation to end, bool[N], once."""
        taken, self._cancelled = self._cancelled, np.zeros_like(self._cancelled)
        return taken

    def seated_parts(self) -> list[Part | None]:
        """Return who has each prompt now, as a list that stays as it is."""
        return list(self._parts)

    def live_samples(
        self, parts: list[Part | None], sequences: Iterable[int]
    ) -> Iterator[tuple[int, Part, int]]:
        """Yield what goes on of sequences: the number, and which sample of whom.

        Args:
          parts: who had each prompt at some time.
          sequences: numbers in the generation.
        """
        for sequence in sequences:
            prompt, index = divmod(sequence, self._num_samples)
            part = parts[prompt]
            if part is None or index >= part.count:
                continue
            index += part.first
            if not part.record.samples[index].has_ended:
                yield sequence, part, index

    def end(
        self, record: Record, index: int, reason: FinishReason, *, is_computed: bool
    ) -> bool:
        """End a sequence, wherever it is; the one way out of the book.

        Args:
          record: its request.
          index: which of its sequences; it has not ended.
          reason: why.
          is_computed: whether the generation may go on with it, unless it is told.

        Returns:
          Whether that was the last of the request, which is then forgotten.
        """
        record.samples[index].reason = reason
        first = index - index % self._num_samples
        part = self._seated.get((record.request_id, first))
        if part is None:
            self._end_waiting(record, first)
        else:
            sequence = part.prompt * self._num_samples + index - first
            self._cancelled[sequence] |= is_computed
            if part.has_ended:
                self._parts[part.prompt] = None
                self._free.append(part.prompt)
                del self._seated[record.request_id, first]
        if record.has_ended:
            del self.records[record.request_id]
        return record.has_ended

    def count_states(self) -> dict[RequestState, int]:
        """Return how many requests are in each state."""
        counts = dict.fromkeys(RequestState, 0)
        for record in self.records.values():
            counts[record.state] += 1
        return counts

    def _end_waiting(self, record: Record, first: int) -> None:
        """Count a part that waits no longer, once all of its sequences have ended."""
        group = record.samples[first : first + self._num_samples]
        if not all(sample.has_ended for sample in group):
            return
        self._num_waiting -= 1
        # Those that ended are left in the heap until they are the larger part.
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [e for e in self._waiting if not e[-1].has_ended]
            heapq.heapify(self._waiting)
