"""Middleware: API key, request ids, limits of heads and bodies, and shutdown."""

import asyncio
import hmac
import re
import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..mistakes import Refused
from .connections import Bounds

OPEN_TO_ALL = ("/health",)
NAME = re.compile(rb"[!-~]{1,128}")  # of a request, chosen by a client


def respond(error: Refused) -> JSONResponse:
    """Return the HTTP response of an error."""
    return JSONResponse(error.body, error.status, error.headers)


def ask_for_key(app: ASGIApp, key: str) -> ASGIApp:
    """Require the key as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    The scheme's case does not matter (RFC 9110, section 11.1).
    """
    expected = key.encode()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_TO_ALL:
            headers = dict(scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer":
                given = headers.get(b"x-api-key", b"")
            if not hmac.compare_digest(given.strip(), expected):
                await respond(
                    Refused(
                        "the API key is missing or wrong: send it as a Bearer token",
                        status=401,
                        code="invalid_api_key",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
                )(scope, receive, send)
                return
        await app(scope, receive, send)

    return answer


def announce_end(app: ASGIApp) -> ASGIApp:
    """Answer requests that are cancelled by the server's shutdown."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, note)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:
                going = Refused("the server is shutting down", status=503)
                await respond(going)(scope, receive, send)

    return answer


def name_request(app: ASGIApp) -> ASGIApp:
    """Add the header `x-request-id`: the client's own id, or a new one."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if NAME.fullmatch(given) else uuid.uuid4().hex.encode()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        return await app(scope, receive, note)

    return answer


def refuse_two_lengths(app: ASGIApp) -> ASGIApp:
    """Refuse a body with two lengths, which could be read as two requests.

    RFC 9112, section 6.3: it "ought to be handled as an error".
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            error = Refused(
                "a body has Content-Length or Transfer-Encoding, not both",
                headers={"Connection": "close"},
            )
            return await respond(error)(scope, receive, send)
        return await app(scope, receive, send)

    return answer


def refuse_long_heads(app: ASGIApp, most: int) -> ASGIApp:
    """Refuse a request whose head has more than `most` bytes."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        names = ("raw_path", "query_string")
        lengths = [len(scope.get(name) or b"") for name in names]
        # Each header has a colon, a space and a line ending.
        lengths += [len(k) + len(v) + 4 for k, v in scope.get("headers", ())]
        if sum(lengths) > most:
            error = Refused(
                f"the head has more than {most} bytes",
                headers={"Connection": "close"},
            )
            return await respond(error)(scope, receive, send)
        return await app(scope, receive, send)

    return answer


async def read_bytes(request: Request, bounds: Bounds) -> bytes:
    """Read a body within the limits of size and time.

    Raises:
        Refused: if a limit is exceeded; the connection handles the remaining bytes.
        ClientDisconnect: if the client has disconnected.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(bounds.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > bounds.body_bytes:
                    raise Refused(
                        f"the body has more than {bounds.body_bytes} bytes", status=413
                    )
    except TimeoutError as error:
        raise Refused(
            f"the body did not arrive within {bounds.body_seconds} seconds",
            status=408,
            headers={"Connection": "close"},
        ) from error
    return bytes(body)
