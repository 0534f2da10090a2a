"""A request's way through the engine: submitted, waited for or streamed, cancelled.

What a client has left is cancelled: a stream is closed by its server, and the
connection of a whole reply is watched meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request

from jkv import FinishReason
from jkv.serving import Completion, EngineError, Event, QueueFull

from .loading import Served
from .mistakes import Refused
from .replies import Reply, check_reason
from .showing import Asked, Shown

Found = AsyncGenerator[tuple[int, Event], None]


def submit_all(served: Served, asked: Asked, variant: int) -> list[int]:
    """Submit every prompt of a body, or none; a variant steers all of them.

    Raises:
        Refused: when too many wait, for now or always; when the engine has failed.
        RequestRefused: for what can never be served.
    """
    most, num = served.max_waiting, asked.ask.n
    if most is not None and (len(asked.prompts) - 1) * num >= most:
        raise Refused(
            f"{len(asked.prompts)} prompts with {num} texts each are more than may "
            f"wait at one time, {most}; ask for fewer in a request"
        )
    numbers: list[int] = []
    try:
        for prompt in asked.prompts:
            ask = dataclasses.replace(asked.ask, tokens=prompt, variant=variant)
            numbers.append(served.engine.submit(ask))
    except BaseException as error:
        cancel_all(served, numbers)
        if isinstance(error, QueueFull):
            later = {"Retry-After": str(math.ceil(error.seconds))}
            raise Refused(f"{error}; try later", status=429, headers=later) from error
        if isinstance(error, EngineError):
            raise Refused(str(error), status=503, code="engine_failed") from error
        raise
    return numbers


def cancel_all(served: Served, numbers: list[int]) -> None:
    """Cancel requests; those that have ended stay as they are."""
    for number in numbers:
        served.engine.cancel(number)


async def read_events(served: Served, numbers: list[int], n: int) -> Found:
    """Yield what comes of requests, each with its text's number; n texts a request.

    To leave cancels what goes on.

    Raises:
        Refused: when a text was not ended by its model or its limit.
    """
    queue: asyncio.Queue[tuple[int, Event] | EngineError | None] = asyncio.Queue()

    async def read(first: int, events: AsyncGenerator[Event, None]) -> None:
        try:
            async for event in events:
                queue.put_nowait((first + event.sample, event))
        except EngineError as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    tasks = [
        asyncio.ensure_future(read(i * n, served.engine.aevents(number)))
        for i, number in enumerate(numbers)
    ]
    num_open = len(tasks)
    try:
        while num_open:
            found = await queue.get()
            if found is None:
                num_open -= 1
                continue
            if isinstance(found, EngineError):
                raise Refused(str(found), status=500) from found
            check_reason(found[1].reason)
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cancel_all(served, numbers)


async def gather(
    served: Served, numbers: list[int], asked: Asked, shown: Shown
) -> tuple[list[Completion], int]:
    """Return what came of each choice, and the tokens that all texts took."""
    n = asked.ask.n
    texts = [
        Completion(number, sample, [], [], FinishReason.RUNNING, "")
        for number in numbers
        for sample in range(n)
    ]
    async with contextlib.aclosing(read_events(served, numbers, n)) as events:
        async for index, event in events:
            old = texts[index]
            texts[index] = old._replace(
                tokens=old.tokens + event.tokens,
                logprobs=old.logprobs + event.logprobs,
                text=(old.text or "") + event.text,
                reason=event.reason,
            )
    chosen = []
    for i in range(0, len(texts), n):
        chosen += select_likely(texts[i : i + n], shown.num_choices)
    return chosen, sum(len(text.tokens) for text in texts)


def select_likely(texts: list[Completion], count: int) -> list[Completion]:
    """Return so many, by the mean logprob of their tokens; all as they are."""
    if count == len(texts):
        return texts

    def measure(text: Completion) -> float:
        return sum(text.logprobs) / len(text.tokens) if text.tokens else -float("inf")

    return sorted(texts, key=measure, reverse=True)[:count]


async def reply_whole(
    served: Served,
    request: Request,
    numbers: list[int],
    reply: Reply,
    asked: Asked,
    shown: Shown,
) -> dict[str, Any] | None:
    """Wait for the end of all, or of the connection: then there is no reply."""
    work = asyncio.ensure_future(gather(served, numbers, asked, shown))
    gone = asyncio.ensure_future(wait_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        # To write logprobs takes a tokenizer's time.
        return await asyncio.to_thread(reply.whole, *work.result())
    finally:
        # What was asked for is cancelled with the task that waits for it.
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def wait_until_gone(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(
    served: Served, numbers: list[int], n: int, reply: Reply, *, has_usage: bool
) -> AsyncIterator[str]:
    """Write a reply as server-sent events, and what it took if that is asked for."""
    num_new = 0
    try:
        async with contextlib.aclosing(read_events(served, numbers, n)) as events:
            async for index, event in events:
                num_new += len(event.tokens)
                yield write_event(reply.piece(index, event))
    except Refused as error:
        yield write_event(error.body)
        return
    if has_usage:
        yield write_event(reply.closing(num_new))
    yield "data: [DONE]\n\n"


def write_event(found: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(found)}\n\n"
