"""What is new of requests: told once to whoever does the steps; others are woken."""

from collections.abc import Callable

from jkv.serving.record import Cursor, Event, Record


class News:
    """Requests that have changed since the last step told of them."""

    def __init__(self) -> None:
        self._changed: dict[int, Record] = {}
        self._cursors: dict[int, Cursor] = {}  # what was told of each that goes on

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._changed)

    def follow(self, record: Record) -> None:
        """Begin to tell of a request."""
        self._cursors[record.request_id] = Cursor(record)

    def note(self, record: Record) -> None:
        """Note that a request has changed."""
        self._changed[record.request_id] = record

    def tell(self, left: Callable[[Record], None]) -> list[Event]:
        """Return what is new, and wake those who wait for it.

        Args:
          left: called with the requests whose consumers are found to be gone.
        """
        events = []
        changed, self._changed = self._changed, {}
        for record in changed.values():
            events += self._cursors[record.request_id].read()
            if record.has_ended:
                del self._cursors[record.request_id]
            wake(record, left)
        return events


def wake(record: Record, left: Callable[[Record], None]) -> None:
    """Wake those who wait for a request; `left` is called if one of them is gone."""
    for listener in list(record.listeners):
        try:
            listener()
        except RuntimeError:  # its event loop is closed
            record.listeners.remove(listener)
            left(record)
