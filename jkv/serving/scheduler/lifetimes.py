"""How long things last: requests until their deadline, results until forgotten."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

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


class Results(Generic[Value]):
    """What has ended is kept for a while: so many at most, so long at most.

    The oldest are forgotten first, and their memory is given up then.

    Example:
      >>> results = Results(max_entries=2, seconds=10.0, clock=lambda: 0.0)
      >>> for number in (1, 2, 3):
      ...     results.put(number, str(number))
      >>> results.find(1), results.find(3), len(results)
      (None, '3', 2)
    """

    def __init__(
        self, *, max_entries: int, seconds: float, clock: Callable[[], float]
    ) -> None:
        if max_entries < 0 or not seconds >= 0:
            raise ValueError(
                f"a store keeps 0 or more results for 0 or more seconds, got "
                f"{max_entries} and {seconds}"
            )
        self._max_entries, self._seconds, self._clock = max_entries, seconds, clock
        self._entries: OrderedDict[int, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, number: int, value: Value) -> None:
        """Keep a value; forget what is too old, and the oldest beyond the most."""
        self._entries[number] = self._clock() + self._seconds, value
        self.forget_old()
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def find(self, number: int) -> Value | None:
        """Return a value, None if it was never here or is forgotten."""
        self.forget_old()
        return self._entries[number][1] if number in self._entries else None

    def forget_old(self) -> None:
        """Drop what has been here for its time."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
