"""uvicorn connections with limits in time and bytes.

uvicorn limits the size of a head, idle time, the number of connections and the time of
a shutdown. This module adds limits for slow heads, data after a reply, clients that do
not read, and incomplete bodies at shutdown.
"""

import asyncio
import functools
import json
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..mistakes import Refused


class Bounds(NamedTuple):
    """Limits per client."""

    head_seconds: float = 10.0  # from the head's first byte or the connection
    head_bytes: int = 2**14
    body_seconds: float = 30.0
    body_bytes: int = 2**20
    reading_seconds: float = 30.0  # without reading from the reply
    # Between requests. If the server closes first, the next request may be lost; httpx
    # closes after 5 seconds.
    idle_seconds: int = 75
    closing_seconds: int = 5  # for running replies at shutdown
    connections: int = 512  # at a time; others get status 503


def make_config(
    app: ASGIApp, bounds: Bounds | None = None, **options: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration.

    Args:
        app: the application.
        bounds: limits per client.
        **options: arguments of `uvicorn.Config`, such as host and port.
    """
    bounds = bounds or Bounds()
    settings: dict[str, Any] = dict(
        http=functools.partial(Connection, bounds),
        ws="none",
        h11_max_incomplete_event_size=bounds.head_bytes,
        limit_concurrency=bounds.connections,
        timeout_keep_alive=bounds.idle_seconds,
        timeout_graceful_shutdown=bounds.closing_seconds,
        server_header=False,
    )
    return uvicorn.Config(app, **(settings | options))


class Connection(H11Protocol):
    """Connection with deadlines for its client."""

    def __init__(self, bounds: Bounds, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._head_clock = Clock(self.loop, bounds.head_seconds)
        self._reading_clock = Clock(self.loop, bounds.reading_seconds)
        # Bytes received while no request is running.
        self._num_between = 0

    @property
    def is_answering(self) -> bool:
        """True if a request has no complete reply yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head_clock.start(transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_answering:
            self._head_clock.stop()
            self._num_between = 0
            return
        # The next head, or the rest of a body that was answered early.
        self._head_clock.start(self.transport.abort)
        self._num_between += len(data)
        if self._num_between > self._bounds.body_bytes:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with the API's error format, and close."""
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not (
            h11.SEND_RESPONSE
        ):
            self.transport.close()
            return
        body = json.dumps(Refused(msg).body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_clock.start(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading_clock.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_clock.stop()
        self._reading_clock.stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Shut down; do not wait for an incomplete body."""
        if self.is_answering and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()


class Clock:
    """Timer that calls a function after a delay, unless stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float):
        self._loop, self._seconds = loop, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self, act: Any) -> None:
        """Start the timer; a running timer is not restarted."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, act)

    def stop(self) -> None:
        """Stop the timer without calling the function."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
