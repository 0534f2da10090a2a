"""Forwarded requests, and calls of an ASGI application without HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message


class Forwarded(NamedTuple):
    """The parts of a request that a replica needs."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    hashes: tuple[bytes, ...] = ()  # of prefixes, for the router

    @property
    def scope(self) -> dict[str, Any]:
        """The ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


async def call_app(app: ASGIApp, request: Forwarded) -> AsyncIterator[Message]:
    """Yield the messages of an application's response.

    If the generator is closed, the application receives a disconnect message.

    Args:
      app: an ASGI application.
      request: the request.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    received = iter([{"type": "http.request", "body": request.body}])

    async def receive() -> Message:
        for message in received:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(request.scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
