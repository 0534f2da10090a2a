"""Endpoints that continue texts: from a body to a reply, whole or streamed."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..asking.showing import Asked, Shown, count_chat, read_fields, read_json
from ..loading import ROOM_SECONDS, Served
from ..messages import reading as messages
from ..messages.reading import read_message_body, read_most_tokens
from ..messages.writing import MessageReply, respond_in_words
from ..mistakes import Refused
from ..replying.answers import (
    AnyReply,
    cancel_all,
    list_events,
    read_events,
    reply_whole,
    stream,
    submit_all,
    tell_known,
)
from ..replying.replies import Reply, tell_deadline
from ..replying.scoring import Scored
from ..responses.reading import NAMES, read_response
from ..responses.writing import ResponseReply
from ..steering.variants import Held
from .connections import Bounds
from .gate import read_bytes, respond

Answer = Callable[[Request], Awaitable[Response]]
Fields = Mapping[str, Any]

# A proxy hands on each part as it comes, and keeps none.
OF_STREAMS = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}

# Threads of requests that wait for a grammar or a row of rules, and of those that are
# scored: nobody else's wait behind them.
_HOLDING = ThreadPoolExecutor(256, "jkv-holding")
_SCORING = ThreadPoolExecutor(4, "jkv-scoring")


class Kind(NamedTuple):
    """What an endpoint makes of a body, and of what comes."""

    is_chat: bool
    read: Callable[[Fields], Fields]  # the fields, in the words of completions
    # From the body, what was asked for and is shown, and what is known of the prompts.
    reply: Callable[[Fields, Asked, Shown, Sequence[Scored]], AnyReply]
    names: Mapping[str, str] = {}  # of fields that it has in other words
    respond: Callable[[Refused], Response] = respond  # to a mistake
    # What is asked for, within what a body bounds.
    bound: Callable[[Fields, Asked], Asked] = lambda _, asked: asked


def make_completions(served: Served, bounds: Bounds, *, is_chat: bool) -> Answer:
    """Make the endpoint for texts, or for chats."""

    def reply(_: Fields, asked: Asked, shown: Shown, scored: Sequence[Scored]) -> Reply:
        return Reply(served, asked, shown, scored, is_chat=is_chat)

    return make_endpoint(served, bounds, Kind(is_chat, lambda body: body, reply))


def make_responses(served: Served, bounds: Bounds) -> Answer:
    """Make the endpoint for chats in the words of responses."""

    def reply(body: Fields, asked: Asked, shown: Shown, _: Any) -> ResponseReply:
        return ResponseReply(body, served, asked, shown)

    return make_endpoint(served, bounds, Kind(True, read_response, reply, NAMES))


def make_messages(served: Served, bounds: Bounds) -> Answer:
    """Make the endpoint for chats in the words of Anthropic's API."""

    def reply(body: Fields, asked: Asked, shown: Shown, _: Any) -> MessageReply:
        return MessageReply(body, served, asked, shown)

    def bound(body: Fields, asked: Asked) -> Asked:
        # The last token needs no room.
        room = served.context - len(asked.prompts[0]) + 1
        most = min(read_most_tokens(body), room)
        return asked._replace(ask=dataclasses.replace(asked.ask, max_new_tokens=most))

    names = messages.NAMES
    kind = Kind(True, read_message_body, reply, names, respond_in_words, bound)
    return make_endpoint(served, bounds, kind)


def count_message(served: Served, bounds: Bounds) -> Answer:
    """Make the endpoint that counts the tokens of a message's prompt."""

    def count(body: bytes) -> dict[str, Any]:
        return {"input_tokens": count_chat(served, read_message_body(read_json(body)))}

    return make_counter(count, bounds, messages.NAMES, respond_in_words)


def count_input(served: Served, bounds: Bounds) -> Answer:
    """Make the endpoint that counts the tokens of a response's input."""

    def count(body: bytes) -> dict[str, Any]:
        count = count_chat(served, read_response(read_json(body)))
        return {"object": "response.input_tokens", "input_tokens": count}

    return make_counter(count, bounds, NAMES)


def make_counter(
    count: Callable[[bytes], dict[str, Any]],
    bounds: Bounds,
    names: Mapping[str, str],
    respond: Callable[[Refused], Response] = respond,
) -> Answer:
    """Make an endpoint that answers without the engine."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_bytes(request, bounds)
            return JSONResponse(await asyncio.to_thread(count, body))
        except Refused as error:
            error.param = names.get(error.param or "", error.param)
            return respond(error)
        except (ValueError, RecursionError) as error:
            return respond(Refused(str(error)))
        except ClientDisconnect:
            return Response(status_code=400)

    return endpoint


def make_endpoint(served: Served, bounds: Bounds, kind: Kind) -> Answer:
    """Make an endpoint that continues texts, of a kind."""

    def understand(body: bytes) -> tuple[Fields, Asked, Shown]:
        fields = read_json(body)
        asked, shown = read_fields(served, kind.read(fields), is_chat=kind.is_chat)
        return fields, kind.bound(fields, asked), shown

    async def endpoint(request: Request) -> Response:
        arrived = time.monotonic()
        try:
            body = await read_bytes(request, bounds)
            fields, asked, shown = await asyncio.to_thread(understand, body)
            scored = await _score(served, asked, shown)
            held = await _hold(served, asked, arrived)
            asked = asked._replace(told=held.told)
            with contextlib.ExitStack() as at_end:
                at_end.callback(held.release)
                known = tell_known(served, asked, scored)
                if known is None:
                    asked = _leave_time(asked, arrived)
                    numbers = submit_all(served, asked, held.variant)
                    at_end.callback(cancel_all, served, numbers)
                    found = read_events(served, numbers, asked.ask.n)
                else:
                    found = list_events(known)
                reply = kind.reply(fields, asked, shown, scored)
                if shown.is_streamed:
                    # A client may leave before the first piece is asked for.
                    return StreamingResponse(
                        stream(found, reply),
                        media_type="text/event-stream",
                        headers=OF_STREAMS,
                        background=BackgroundTask(at_end.pop_all().close),
                    )
                whole = await reply_whole(request, found, reply, asked, shown)
                if whole is not None:
                    return JSONResponse(whole)
        except Refused as error:
            error.param = kind.names.get(error.param or "", error.param)
            if error.code == "engine_failed":
                request.app.state.failure = error
            return kind.respond(error)
        except (ValueError, RecursionError) as error:
            return kind.respond(Refused(str(error)))
        except ClientDisconnect:
            pass
        return Response(status_code=400)  # the client has left

    return endpoint


async def _score(served: Served, asked: Asked, shown: Shown) -> Sequence[Scored]:
    """Return what the model says of the prompts, if it is told."""
    if not shown.has_prompt_logprobs or served.scorer is None:
        return ()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_SCORING, served.scorer.score, asked.prompts)


async def _hold(served: Served, asked: Asked, arrived: float) -> Held:
    """Return what steers the texts of a body; there may be none for a while.

    Raises:
        Refused: if there is no room for it in time.
    """
    if asked.language is None and asked.rules is None:
        return Held()
    seconds = ROOM_SECONDS
    if asked.ask.timeout is not None:
        seconds = min(seconds, asked.ask.timeout - (time.monotonic() - arrived))
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(
            _HOLDING, served.hold, asked.language, asked.rules, seconds
        )
    except Refused:
        _leave_time(asked, arrived)  # raises if that is why
        raise


def _leave_time(asked: Asked, arrived: float) -> Asked:
    """Return what is asked for in the time that is left of it.

    Raises:
        Refused: if none is.
    """
    if asked.ask.timeout is None:
        return asked
    left = asked.ask.timeout - (time.monotonic() - arrived)
    if left <= 0:
        raise tell_deadline()
    return asked._replace(ask=dataclasses.replace(asked.ask, timeout=left))
