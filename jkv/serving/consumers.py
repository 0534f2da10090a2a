"""Those who read a request while it is computed; one that leaves cancels it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator

from jkv.serving.record import Cursor, Event, Record
from jkv.serving.turns import Turns


def read_events(
    turns: Turns[list[Event]], record: Record, cancel: Callable[[Record], object]
) -> Iterator[Event]:
    """Yield what is new of a request until it has ended.

    Args:
      turns: waited for where nothing is new.
      record: the request.
      cancel: called if the consumer leaves before the end.

    Raises:
      EngineError: if the request failed.
    """
    cursor = Cursor(record)
    try:
        while not cursor.is_over:
            yield from turns.wait_for(cursor.read)
    finally:
        cancel(record)
    record.raise_error()


async def await_events(
    turns: Turns[list[Event]], record: Record, cancel: Callable[[Record], object]
) -> AsyncGenerator[Event, None]:
    """Do the same in an event loop; the engine's thread does the steps."""
    cursor, has_news = Cursor(record), asyncio.Event()
    running = asyncio.get_running_loop()

    def wake() -> None:
        running.call_soon_threadsafe(has_news.set)

    with turns.lock:
        record.listeners.append(wake)
    turns.start()
    try:
        while not cursor.is_over:
            has_news.clear()
            with turns.lock:
                events = cursor.read()
            for event in events:
                yield event
            if not events:
                await has_news.wait()
    finally:
        with turns.lock:
            if wake in record.listeners:
                record.listeners.remove(wake)
        cancel(record)
        turns.tell()
    record.raise_error()
