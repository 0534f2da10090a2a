"""Endpoints that generate completions, whole or streamed."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..asking.showing import ParsedBody, Shown, count_chat, read_fields, read_json
from ..loading import ROOM_SECONDS, Served
from ..messages.reading import read_message_body
from ..mistakes import Refused
from ..processors.variants import Held
from ..replying.answers import (
    cancel_all,
    list_events,
    read_events,
    reply_whole,
    stream,
    submit_all,
)
from ..replying.kinds import KINDS, Fields, Kind
from ..replying.known import answer_known
from ..replying.replies import refuse_overdue
from ..replying.scoring import Scored
from ..responses.reading import read_response
from .connections import Bounds
from .gate import read_bytes

Answer = Callable[[Request], Awaitable[Response]]

# Headers that disable buffering and caching in proxies.
OF_STREAMS = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}

# Threads for requests that wait for a grammar or rules, and for scoring, so that other
# requests do not wait for them.
_HOLDING = ThreadPoolExecutor(256, "jkv-holding")
_SCORING = ThreadPoolExecutor(4, "jkv-scoring")


def count_input(served: Served, bounds: Bounds) -> Answer:
    """Return the endpoint that counts the tokens of a response's input."""

    def count(fields: Fields) -> dict[str, Any]:
        found = count_chat(served, read_response(fields))
        return {"object": "response.input_tokens", "input_tokens": found}

    return _make_counter(count, bounds, KINDS["/v1/responses"])


def count_message(served: Served, bounds: Bounds) -> Answer:
    """Return the endpoint that counts the tokens of a message's prompt."""

    def count(fields: Fields) -> dict[str, Any]:
        return {"input_tokens": count_chat(served, read_message_body(fields))}

    return _make_counter(count, bounds, KINDS["/v1/messages"])


def _make_counter(
    count: Callable[[Fields], dict[str, Any]], bounds: Bounds, kind: Kind
) -> Answer:
    """Return an endpoint that does not use the engine."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_bytes(request, bounds)
            found = await asyncio.to_thread(lambda: count(read_json(body)))
            return JSONResponse(found)
        except Refused as error:
            return _respond(kind, error)
        except (ValueError, RecursionError) as error:
            return _respond(kind, Refused(str(error)))
        except ClientDisconnect:
            return Response(status_code=400)

    return endpoint


def _respond(kind: Kind, error: Refused) -> JSONResponse:
    """Return the HTTP response of an error."""
    answer = kind.write_error(kind.rename(error))
    return JSONResponse(answer, error.status, error.headers)


def make_endpoint(served: Served, bounds: Bounds, path: str) -> Answer:
    """Return the endpoint that generates, for a path of `KINDS`."""
    kind = KINDS[path]

    def understand(body: bytes) -> tuple[Fields, ParsedBody, Shown]:
        fields = read_json(body)
        parsed, shown = read_fields(served, kind.read(fields), is_chat=kind.is_chat)
        return fields, kind.bound(served, fields, parsed), shown

    async def endpoint(request: Request) -> Response:
        arrived = time.monotonic()
        try:
            body = await read_bytes(request, bounds)
            fields, parsed, shown = await asyncio.to_thread(understand, body)
            scored = await _score(served, parsed, shown)
            held = await _hold(served, parsed, arrived)
            parsed = parsed._replace(warnings=held.warnings)
            with contextlib.ExitStack() as at_end:
                at_end.callback(held.release)
                known = answer_known(served, parsed, scored)
                if known is None:
                    parsed = _leave_time(parsed, arrived)
                    numbers = submit_all(served, parsed, held.variant)
                    at_end.callback(cancel_all, served, numbers)
                    found = read_events(served, numbers, parsed.request.n)
                else:
                    found = list_events(known)
                reply = kind.reply(served, fields, parsed, shown, scored)
                if shown.is_streamed:
                    return _Stream(stream(found, reply), at_end.pop_all())
                whole = await reply_whole(request, found, reply, parsed, shown)
                if whole is not None:
                    return JSONResponse(whole)
        except Refused as error:
            if error.code == "engine_failed":
                request.app.state.failure = error
            return _respond(kind, error)
        except (ValueError, RecursionError) as error:
            return _respond(kind, Refused(str(error)))
        except ClientDisconnect:
            pass
        return Response(status_code=400)  # the client has left

    return endpoint


class _Stream(StreamingResponse):
    """Server-sent events; resources are released however the response ends."""

    def __init__(
        self, events: AsyncIterator[str], at_end: contextlib.ExitStack
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=OF_STREAMS)
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A background task would not run after an exception, nor would the generator
        # if the client leaves before the first event.
        with self._at_end:
            await super().__call__(scope, receive, send)


async def _score(served: Served, parsed: ParsedBody, shown: Shown) -> Sequence[Scored]:
    """Return the prompts' scores if the reply shows them."""
    if not shown.has_prompt_logprobs or served.scorer is None:
        return ()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_SCORING, served.scorer.score, parsed.prompts)


async def _hold(served: Served, parsed: ParsedBody, arrived: float) -> Held:
    """Return the logits processors of a request; wait for capacity.

    Raises:
        Refused: if there is no capacity within the time limit.
    """
    if parsed.language is None and parsed.rules is None:
        return Held()
    seconds = ROOM_SECONDS
    if parsed.request.timeout is not None:
        seconds = min(seconds, parsed.request.timeout - (time.monotonic() - arrived))
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(
            _HOLDING, served.hold, parsed.language, parsed.rules, seconds
        )
    except Refused:
        _leave_time(parsed, arrived)  # raises if the request's timeout has passed
        raise


def _leave_time(parsed: ParsedBody, arrived: float) -> ParsedBody:
    """Return the request with its remaining timeout.

    Raises:
        Refused: if the timeout has passed.
    """
    if parsed.request.timeout is None:
        return parsed
    left = parsed.request.timeout - (time.monotonic() - arrived)
    if left <= 0:
        raise refuse_overdue()
    return parsed._replace(request=dataclasses.replace(parsed.request, timeout=left))
