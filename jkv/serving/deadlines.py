"""Which requests have run out of time: a heap of times."""

import heapq
from collections.abc import Callable

# Entries of requests that ended before their time are left until there are as many.
_SPARE = 64


class Deadlines:
    """Times at which requests are over.

    Example:
      >>> deadlines = Deadlines()
      >>> deadlines.add(7, 1.5)
      >>> deadlines.add(8, 0.5)
      >>> deadlines.pop_due(1.0), deadlines.pop_due(1.0)
      ([8], [])
    """

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []
        self._spare = _SPARE

    def __len__(self) -> int:
        return len(self._times)

    def add(self, request_id: int, time: float) -> None:
        """Note when a request is over."""
        heapq.heappush(self._times, (time, request_id))

    def pop_due(self, now: float) -> list[int]:
        """Return the requests whose time is over, and forget them."""
        due = []
        while self._times and self._times[0][0] <= now:
            due.append(heapq.heappop(self._times)[1])
        return due

    def forget_ended(self, is_live: Callable[[int], bool]) -> None:
        """Drop those that are not live any more, once they may be the larger part."""
        if len(self._times) < self._spare:
            return
        self._times = [entry for entry in self._times if is_live(entry[1])]
        heapq.heapify(self._times)
        self._spare = 2 * len(self._times) + _SPARE
