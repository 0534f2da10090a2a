"""ASGI application with the endpoints of OpenAI's API for an engine.

Bodies are read within limits, and parsed in another thread, since tokenizing is slow.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .endpoints.connections import Bounds
from .endpoints.continuing import count_input, count_message, make_endpoint
from .endpoints.describing import describe
from .endpoints.gate import (
    announce_end,
    ask_for_key,
    name_request,
    refuse_long_heads,
    refuse_two_lengths,
    respond,
)
from .endpoints.tokens import list_token_routes
from .loading import Served
from .mistakes import Refused, describe_crash
from .replying.kinds import KINDS


def make_app(
    served: Served,
    *,
    api_key: str | None = None,
    bounds: Bounds | None = None,
    allowed_origins: Sequence[str] = (),
) -> Starlette:
    """Return an application; it starts the engine's thread and closes the engine.

    Args:
        served: the model.
        api_key: the key that clients must send; None admits all clients.
        bounds: limits per client.
        allowed_origins: origins of web pages that may send requests; "*" allows all.
    """
    bounds = bounds or Bounds()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.engine.start()
        served.begin()
        yield
        await asyncio.to_thread(served.engine.close)
        await asyncio.to_thread(served.end)

    app = Starlette(
        routes=[
            *(
                Route(path, make_endpoint(served, bounds, path), methods=["POST"])
                for path in KINDS
            ),
            Route(
                "/v1/responses/input_tokens",
                count_input(served, bounds),
                methods=["POST"],
            ),
            Route(
                "/v1/messages/count_tokens",
                count_message(served, bounds),
                methods=["POST"],
            ),
            *list_token_routes(served, bounds),
            *describe(served),
        ],
        middleware=_list_middleware(api_key, allowed_origins, bounds),
        exception_handlers={HTTPException: write_status, Exception: write_crash},
        lifespan=lifespan,
    )
    # A redirect would use the Host header, which any client can forge.
    app.router.redirect_slashes = False
    return app


def _list_middleware(
    api_key: str | None, allowed_origins: Sequence[str], bounds: Bounds
) -> list[Middleware]:
    """Return the middleware in front of the endpoints, outermost first."""
    found = [
        Middleware(announce_end),
        Middleware(name_request),
        Middleware(refuse_long_heads, most=bounds.head_bytes),
    ]
    if allowed_origins:
        origins = Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After"],
        )
        found.append(origins)
    if api_key:
        found.append(Middleware(ask_for_key, key=api_key))
    return [*found, Middleware(refuse_two_lengths)]


async def write_status(request: Request, error: Exception) -> Response:
    """Return the error for an unknown path or method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    return respond(Refused(text, status=error.status_code, headers=headers))


async def write_crash(_: Request, error: Exception) -> Response:
    """Return the error for an unexpected exception; the log has the traceback."""
    return respond(describe_crash(error))
