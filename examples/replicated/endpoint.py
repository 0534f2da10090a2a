"""HTTP endpoint in front of the replicas.

Requests are forwarded to a replica, and its reply to the client. If a replica dies
before the client has received a part of the reply, another replica gets the request; a
partly sent reply ends with an error.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from served.endpoints.connections import Bounds
from served.endpoints.gate import ask_for_key, read_bytes, respond
from served.mistakes import Refused
from served.replying.answers import wait_until_gone
from served.replying.replies import write_event
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jkv.serving import EngineStats
from jkv.serving.prometheus import render

from .forwarding import Forwarded
from .prefixes import hash_beginnings, read_beginning

# Time for retries after a replica's death, in which a new one may start.
RETRY_SECONDS = 120.0
RETRY_PAUSE = 0.2


class ReplicaStats(NamedTuple):
    """Statistics of a replica, with the interface of an engine."""

    numbers: EngineStats

    def stats(self) -> EngineStats:
        """Return the statistics."""
        return self.numbers


def make_endpoint(
    find_replicas: Callable[[], DeploymentHandle],
    *,
    api_key: str | None = None,
    bounds: Bounds = Bounds(),  # noqa: B008 (a tuple cannot change)
) -> Starlette:
    """Return the ASGI application for clients.

    Args:
      find_replicas: returns Ray Serve's handle of the replicas.
      api_key: the key that clients must send; None admits all clients.
      bounds: limits of bodies in time and bytes; Ray Serve limits connections.
    """

    async def show_numbers(_: Request) -> Response:
        answers = await find_replicas().broadcast("read_stats").results_async()
        reported = {name: ReplicaStats(stats) for name, stats in answers}
        text = await asyncio.to_thread(render, reported, label="replica")
        return Response(text, media_type="text/plain; version=0.0.4")

    keys = [Middleware(ask_for_key, key=api_key)] if api_key else []
    forwarder = Forwarder(find_replicas, bounds)
    return Starlette(
        routes=[
            Route("/metrics", show_numbers),
            Route("/{path:path}", forwarder, methods=["GET", "POST"]),
        ],
        middleware=keys,
    )


class Forwarder:
    """ASGI application that forwards requests to replicas."""

    def __init__(self, find_replicas: Callable[[], DeploymentHandle], bounds: Bounds):
        self._find_replicas, self._bounds = find_replicas, bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; stop if the client disconnects."""
        request = Request(scope, receive)
        try:
            body = await read_bytes(request, self._bounds)
        except Refused as error:
            return await respond(error)(scope, receive, send)
        except ClientDisconnect:
            return None
        hashes = hash_beginnings(read_beginning(body)) if body else ()
        headers = tuple((name, value) for name, value in scope["headers"])
        forwarded = Forwarded(request.method, request.url.path, headers, body, hashes)
        work = asyncio.ensure_future(self._answer(forwarded, send))
        gone = asyncio.ensure_future(wait_until_gone(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return None

    async def _answer(self, request: Forwarded, send: Send) -> None:
        start: Message | None = None
        try:
            async for message in self._ask_until_answered(request):
                if message["type"] == "http.response.start":
                    start = message
                await send(message)
        except RayActorError:
            lost = Refused("the replica has died", status=503, code="replica_died")
            if start is None:
                await send_response(respond(lost), send)
            else:
                # A length may have been sent; then this closes the connection early.
                is_stream = b"text/event-stream" in dict(start["headers"]).get(
                    b"content-type", b""
                )
                last = write_event(lost.body).encode() if is_stream else b""
                await send({"type": "http.response.body", "body": last})

    async def _ask_until_answered(self, request: Forwarded) -> AsyncIterator[Message]:
        """Yield a reply's messages; retry on another replica if none was sent yet."""
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            held: list[Message] = []
            has_begun = False
            try:
                async for message in self._ask(request):
                    held.append(message)
                    # Hold back the head, so that another replica can still answer.
                    if message["type"] == "http.response.start":
                        continue
                    has_begun = True
                    for found in held:
                        yield found
                    held = []
                return
            except RayActorError:
                if has_begun or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE)

    async def _ask(self, request: Forwarded) -> AsyncIterator[Message]:
        handle = self._find_replicas().options(stream=True)
        answer = handle.answer.remote(request)
        try:
            async for message in answer:
                yield message
        finally:
            answer.cancel()


async def send_response(response: Response, send: Send) -> None:
    """Send a response that does not depend on its request."""
    headers = response.raw_headers
    status = response.status_code
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
