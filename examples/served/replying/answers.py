"""A request's way through the engine: submitted, waited for or streamed, cancelled.

A request is cancelled when its client has left: a stream is closed by its server, and
the connection of a whole reply is watched meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request

from jkv import FinishReason
from jkv.serving import Completion, EngineError, Event, QueueFull

from ..asking.showing import ParsedBody, Shown
from ..loading import Served
from ..mistakes import Refused
from .kinds import AnyReply
from .replies import check_reason, select_likely

# Events, each with its text's number; None where nothing came for a while.
Found = AsyncGenerator[tuple[int, Event] | None, None]

SILENT_SECONDS = 15.0


def submit_all(served: Served, parsed: ParsedBody, variant: int) -> list[int]:
    """Submit every prompt of a body, or none; one variant applies to all.

    Raises:
        Refused: when too many wait, for now or always; when the engine has failed.
        RequestRefused: for a request that can never be served.
    """
    most, num = served.max_waiting, parsed.request.n
    if most is not None and (len(parsed.prompts) - 1) * num >= most:
        raise Refused(
            f"{len(parsed.prompts)} prompts with {num} texts each are more than may "
            f"wait at one time, {most}; ask for fewer in a request"
        )
    numbers: list[int] = []
    try:
        for prompt in parsed.prompts:
            request = dataclasses.replace(
                parsed.request, tokens=prompt, variant=variant
            )
            numbers.append(served.engine.submit(request))
    except BaseException as error:
        cancel_all(served, numbers)
        if isinstance(error, QueueFull):
            raise Refused(
                f"{error}; try later",
                status=429,
                headers={
                    "Retry-After": str(math.ceil(error.seconds)),
                    # Of OpenAI's clients, which take it first.
                    "retry-after-ms": str(math.ceil(1000 * error.seconds)),
                },
            ) from error
        if isinstance(error, EngineError):
            raise Refused(str(error), status=503, code="engine_failed") from error
        raise
    return numbers


async def list_events(events: Sequence[tuple[int, Event]]) -> Found:
    """Yield known events, as `read_events` does the engine's."""
    for event in events:
        check_reason(event[1].reason)
        yield event


def cancel_all(served: Served, numbers: list[int]) -> None:
    """Cancel requests; finished ones stay as they are."""
    for number in numbers:
        served.engine.cancel(number)


async def read_events(served: Served, numbers: list[int], n: int) -> Found:
    """Yield events of requests, each with its text's number; n texts a request.

    Leaving the generator cancels unfinished requests.

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
            try:
                found = await asyncio.wait_for(queue.get(), SILENT_SECONDS)
            except TimeoutError:
                yield None
                continue
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
    found: Found, parsed: ParsedBody, shown: Shown
) -> tuple[list[Completion], int]:
    """Return the completion of each choice, and the tokens that all texts took."""
    n = parsed.request.n
    texts = [
        Completion(number, sample, [], [], FinishReason.RUNNING, "")
        for number in range(len(parsed.prompts))
        for sample in range(n)
    ]
    async with contextlib.aclosing(found) as events:
        async for index, event in filter_events(events):
            old = texts[index]
            texts[index] = old._replace(
                tokens=old.tokens + event.tokens,
                logprobs=old.logprobs + event.logprobs,
                text=(old.text or "") + event.text,
                reason=event.reason,
                cached_tokens=event.cached_tokens,
            )
    chosen = []
    for i in range(0, len(texts), n):
        chosen += select_likely(texts[i : i + n], shown.num_choices)
    return chosen, sum(len(text.tokens) for text in texts)


async def filter_events(found: Found) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events that are not empty."""
    async for each in found:
        if each is not None:
            yield each


async def reply_whole(
    request: Request, found: Found, reply: AnyReply, parsed: ParsedBody, shown: Shown
) -> dict[str, Any] | None:
    """Wait for the end of all, or of the connection: then there is no reply."""
    work = asyncio.ensure_future(gather(found, parsed, shown))
    gone = asyncio.ensure_future(wait_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        # To write logprobs takes a tokenizer's time.
        return await asyncio.to_thread(reply.whole, *work.result())
    finally:
        # Both tasks are cancelled with the task that waits for them.
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def wait_until_gone(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(found: Found, reply: AnyReply) -> AsyncIterator[str]:
    """Write a reply as server-sent events, and a comment where nothing came."""
    try:
        if opening := reply.write_opening():
            yield opening
        async with contextlib.aclosing(found) as events:
            async for each in events:
                if each is None:
                    yield ": nothing yet\n\n"
                elif reply.is_scored:
                    yield await asyncio.to_thread(reply.write_piece, *each)
                else:
                    yield reply.write_piece(*each)
    except Refused as error:
        yield reply.write_failure(error.body)
        return
    yield reply.write_closing()
