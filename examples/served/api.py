"""The endpoints of OpenAI's API around an engine: completions, chats, and its numbers.

A body is read within limits (`gate.py`), understood in another thread, since tokenizers
take their time (`showing.py`), and answered (`answers.py`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jkv.serving.prometheus import render

from .answers import cancel_all, reply_whole, stream, submit_all
from .connections import Bounds
from .gate import ask_for_key, read_bytes, respond, tell_of_end
from .loading import Served
from .mistakes import Refused
from .replies import Reply
from .showing import check_model, read_request

Answer = Callable[[Request], Awaitable[Response]]


def make_app(
    served: Served, *, api_key: str | None = None, bounds: Bounds | None = None
) -> Starlette:
    """Make an application; the engine has its thread while it runs.

    Args:
        served: the model.
        api_key: what clients have to send; None lets everyone in.
        bounds: what a client may take.
    """
    bounds = bounds or Bounds()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.engine.start()
        yield
        await asyncio.to_thread(served.engine.close)

    texts = answer(served, bounds, is_chat=False)
    chats = answer(served, bounds, is_chat=True)
    keys = [Middleware(ask_for_key, key=api_key)] if api_key else []
    return Starlette(
        routes=[
            Route("/v1/completions", texts, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            *describe(served),
        ],
        middleware=[Middleware(tell_of_end), *keys],
        exception_handlers={HTTPException: tell_status, Exception: tell_crash},
        lifespan=lifespan,
    )


def answer(served: Served, bounds: Bounds, *, is_chat: bool) -> Answer:
    """Make the endpoint for texts, or for chats."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_bytes(request, bounds)
            asked, shown = await asyncio.to_thread(
                read_request, served, body, is_chat=is_chat
            )
            held = await asyncio.to_thread(served.hold, asked.language, asked.rules)
            with contextlib.ExitStack() as at_end:
                at_end.callback(held.release)
                numbers = submit_all(served, asked, held.variant)
                at_end.callback(cancel_all, served, numbers)
                reply = Reply(served, asked, shown, is_chat=is_chat)
                if shown.is_streamed:
                    num, has_usage = shown.num_choices, shown.has_usage
                    # A client may leave before the first piece is asked for.
                    return StreamingResponse(
                        stream(served, numbers, num, reply, has_usage=has_usage),
                        media_type="text/event-stream",
                        background=BackgroundTask(at_end.pop_all().close),
                    )
                whole = await reply_whole(served, request, numbers, reply, asked, shown)
                if whole is not None:
                    return JSONResponse(whole)
        except Refused as error:
            if error.code == "engine_failed":
                request.app.state.failure = error
            return respond(error)
        except (ValueError, RecursionError) as error:
            return respond(Refused(str(error)))
        except ClientDisconnect:
            pass
        return Response(status_code=400)  # the client has left

    return endpoint


def describe(served: Served) -> list[Route]:
    """Make the endpoints that tell of the server."""
    model = {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "jkv",
        "max_model_len": served.context,
    }

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def show_model(request: Request) -> Response:
        try:
            check_model(served, request.path_params["name"])
        except Refused as error:
            return respond(error)
        return JSONResponse(model)

    async def show_health(request: Request) -> Response:
        failure = getattr(request.app.state, "failure", None)
        return JSONResponse({"status": "ok"}) if failure is None else respond(failure)

    async def show_numbers(_: Request) -> Response:
        text = await asyncio.to_thread(render, served.engine)
        return Response(text, media_type="text/plain; version=0.0.4")

    return [
        Route("/health", show_health),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/metrics", show_numbers),
    ]


async def tell_status(request: Request, error: Exception) -> Response:
    """Answer what no endpoint takes: another address, or another method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    return respond(Refused(text, status=error.status_code, headers=headers))


async def tell_crash(_: Request, error: Exception) -> Response:
    """Answer when the server has a mistake; its log has more."""
    return respond(Refused(f"the server failed: {type(error).__name__}", status=500))
