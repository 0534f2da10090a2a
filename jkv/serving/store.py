"""What has ended is kept for a while: so many at most, so long at most."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Store(Generic[Value]):
    """A bounded store whose entries are forgotten after a time, the oldest first.

    Example:
      >>> store = Store(max_entries=2, seconds=10.0, clock=lambda: 0.0)
      >>> for name in (1, 2, 3):
      ...     store.put(name, str(name))
      >>> store.find(1), store.find(3), len(store)
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

    def put(self, name: int, value: Value) -> None:
        """Keep a value; others go where there is no room or their time is over."""
        self._entries[name] = self._clock() + self._seconds, value
        self.forget_old()
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def find(self, name: int) -> Value | None:
        """Return a value, None if it was never here or is forgotten."""
        self.forget_old()
        return self._entries[name][1] if name in self._entries else None

    def forget_old(self) -> None:
        """Drop what has been here for its time."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
