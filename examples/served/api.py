"""The endpoints of OpenAI's API around an engine: completions, chats, and its numbers.

A client that goes away cancels what it asked for: a stream is closed by its server, and
the connection of a whole reply is watched meanwhile.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jkv.serving import Completion, EngineError, Event, QueueFull
from jkv.serving.prometheus import render

from .asking import Asked, read_body
from .loading import Served
from .replies import Reply, mistake

MOST_BYTES = 2**20  # of a body
MOST_PROMPTS = 32

Answer = Callable[[Request], Awaitable[Response]]


def make_app(served: Served) -> Starlette:
    """Make an application; the engine has its thread while it runs."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.engine.start()
        yield
        await asyncio.to_thread(served.engine.close)

    model = {"id": served.folder.name, "object": "model", "owned_by": "jkv"}

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def show_numbers(_: Request) -> Response:
        return Response(render(served.engine), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/v1/completions", answer(served, is_chat=False), methods=["POST"]),
            Route(
                "/v1/chat/completions", answer(served, is_chat=True), methods=["POST"]
            ),
            Route("/v1/models", list_models),
            Route("/metrics", show_numbers),
        ],
        lifespan=lifespan,
    )


def answer(served: Served, *, is_chat: bool) -> Answer:
    """Make the endpoint for texts, or for chats."""

    async def endpoint(request: Request) -> Response:
        try:
            body = json.loads(await read_bytes(request))
            asked = read_body(served, body, is_chat=is_chat)
            if len(asked.prompts) > MOST_PROMPTS:
                raise ValueError(f"a request takes {MOST_PROMPTS} prompts at most")
            numbers = submit_all(served, asked)
        except BodyTooLarge as error:
            return JSONResponse(mistake(str(error)), status_code=413)
        except (ValueError, RecursionError) as error:
            return JSONResponse(mistake(str(error)), status_code=400)
        except QueueFull as error:
            return JSONResponse(mistake(str(error), "rate_limit_error"), 429)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has left
        reply = Reply.begin(numbers[0], served.folder.name, is_chat=is_chat)
        num_prompt = sum(map(len, asked.prompts))
        if body.get("stream"):
            options = body.get("stream_options")
            has_usage = isinstance(options, dict) and options.get("include_usage")
            pieces = stream(served, numbers, asked.n, reply)
            lines = write_lines(pieces, reply, num_prompt if has_usage else None)
            return StreamingResponse(lines, media_type="text/event-stream")
        return await reply_whole(served, request, numbers, reply, num_prompt)

    return endpoint


class BodyTooLarge(Exception):
    """A body that is not read to its end."""


async def read_bytes(request: Request) -> bytes:
    """Read a body, as far as it may go.

    Raises:
        BodyTooLarge: beyond that.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise BodyTooLarge(f"the body has more than {MOST_BYTES} bytes")
    return body


def submit_all(served: Served, asked: Asked) -> list[int]:
    """Submit every prompt of a body, or none."""
    numbers: list[int] = []
    try:
        for prompt in asked.prompts:
            numbers.append(served.engine.submit(prompt, **asked.options))
    except BaseException:
        for number in numbers:
            served.engine.cancel(number)
        raise
    return numbers


async def reply_whole(
    served: Served,
    request: Request,
    numbers: list[int],
    reply: Reply,
    num_prompt: int,
) -> Response:
    """Wait for the end of all, or of the connection."""
    work = asyncio.ensure_future(gather(served, numbers))
    gone = asyncio.ensure_future(wait_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=400)  # the client has left
        return JSONResponse(reply.whole(work.result(), num_prompt))
    except EngineError as error:
        return JSONResponse(mistake(str(error), "server_error"), status_code=500)
    finally:
        # What was asked for is cancelled with the task that waits for it.
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def gather(served: Served, numbers: list[int]) -> list[Completion]:
    """Return what came of requests; leaving cancels those that go on."""
    try:
        for number in numbers:
            async for _ in served.engine.aevents(number):
                pass
    finally:
        for number in numbers:
            served.engine.cancel(number)
    return [each for n in numbers for each in served.engine.results(n)]


async def wait_until_gone(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(
    served: Served, numbers: list[int], n: int, reply: Reply
) -> AsyncGenerator[tuple[dict[str, Any], int], None]:
    """Yield the pieces of a reply as they come, each with its number of tokens."""
    queue: asyncio.Queue[tuple[int, Event] | None | EngineError] = asyncio.Queue()

    async def read(choice: int, number: int) -> None:
        try:
            async for event in served.engine.aevents(number):
                await queue.put((choice * n + event.sample, event))
        except EngineError as error:
            await queue.put(error)
        await queue.put(None)

    tasks = [asyncio.ensure_future(read(i, number)) for i, number in enumerate(numbers)]
    num_open = len(tasks)
    try:
        while num_open:
            found = await queue.get()
            if found is None:
                num_open -= 1
            elif isinstance(found, EngineError):
                yield mistake(str(found), "server_error"), 0
            else:
                index, event = found
                yield reply.piece(index, event), len(event.tokens)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in numbers:
            served.engine.cancel(number)


async def write_lines(
    pieces: AsyncGenerator[tuple[dict[str, Any], int], None],
    reply: Reply,
    num_prompt: int | None,
) -> AsyncIterator[str]:
    """Write pieces as server-sent events, and what it took if that is asked for."""
    num_new = 0
    async with contextlib.aclosing(pieces):
        async for piece, count in pieces:
            num_new += count
            yield f"data: {json.dumps(piece)}\n\n"
    if num_prompt is not None:
        yield f"data: {json.dumps(reply.closing(num_prompt, num_new))}\n\n"
    yield "data: [DONE]\n\n"
