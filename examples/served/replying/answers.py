"""Submission of requests to the engine, their events and their cancellation.

A request is cancelled if its client disconnects. The HTTP server closes the generator
of a stream; the connection of a whole reply is monitored.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request

from jkv import FinishReason
from jkv.serving import Completion, EngineError, Event, QueueFull

from ..asking.showing import ParsedBody, Shown
from ..loading import Served
from ..mistakes import Refused, describe_crash
from .kinds import AnyReply
from .replies import check_reason, select_likely

# Events with the index of their completion; None after `SILENT_SECONDS` of silence.
Found = AsyncGenerator[tuple[int, Event] | None, None]

SILENT_SECONDS = 15.0

logger = logging.getLogger("served")


def submit_all(served: Served, parsed: ParsedBody, variant: int) -> list[int]:
    """Submit all prompts of a body with one variant, or none of them.

    Raises:
        Refused: if too many sequences wait, or the engine has failed.
        RequestRefused: for a request that can never run.
    """
    most, num = served.max_waiting, parsed.request.n
    if most is not None and (len(parsed.prompts) - 1) * num >= most:
        raise Refused(
            f"{len(parsed.prompts)} prompts with {num} completions each exceed the "
            f"limit of {most} waiting sequences; send fewer per request"
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
                f"{error}; try again later",
                status=429,
                headers={
                    "Retry-After": str(math.ceil(error.seconds)),
                    # OpenAI's clients prefer this header.
                    "retry-after-ms": str(math.ceil(1000 * error.seconds)),
                },
            ) from error
        if isinstance(error, EngineError):
            raise Refused(str(error), status=503, code="engine_failed") from error
        raise
    return numbers


async def list_events(events: Sequence[tuple[int, Event]]) -> Found:
    """Yield known events, with the interface of `read_events`."""
    for event in events:
        check_reason(event[1].reason)
        yield event


def cancel_all(served: Served, numbers: list[int]) -> None:
    """Cancel requests; finished ones are unchanged."""
    for number in numbers:
        served.engine.cancel(number)


async def read_events(served: Served, numbers: list[int], n: int) -> Found:
    """Yield events of requests with the index of their completion; n per request.

    Closing the generator cancels unfinished requests.

    Raises:
        Refused: if generation ended by other causes than a stop or a length limit.
    """
    queue: asyncio.Queue[tuple[int, Event] | Refused | None] = asyncio.Queue()

    async def read(first: int, events: AsyncGenerator[Event, None]) -> None:
        try:
            async for event in events:
                queue.put_nowait((first + event.sample, event))
        except EngineError as error:
            queue.put_nowait(Refused(str(error), status=500))
        except Exception as error:
            logger.exception("reading events failed")
            queue.put_nowait(describe_crash(error))
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
            if isinstance(found, Refused):
                raise found
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
    """Return the completions to show, and the number of tokens of all completions."""
    n = parsed.request.n
    completions = [
        Completion(number, sample, [], [], FinishReason.RUNNING, "")
        for number in range(len(parsed.prompts))
        for sample in range(n)
    ]
    async with contextlib.aclosing(found) as events:
        async for index, event in filter_events(events):
            old = completions[index]
            completions[index] = old._replace(
                tokens=old.tokens + event.tokens,
                logprobs=old.logprobs + event.logprobs,
                text=(old.text or "") + event.text,
                reason=event.reason,
                cached_tokens=event.cached_tokens,
            )
    chosen = []
    for i in range(0, len(completions), n):
        chosen += select_likely(completions[i : i + n], shown.num_choices)
    return chosen, sum(len(completion.tokens) for completion in completions)


async def filter_events(found: Found) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events, without None."""
    async for each in found:
        if each is not None:
            yield each


async def reply_whole(
    request: Request, found: Found, reply: AnyReply, parsed: ParsedBody, shown: Shown
) -> dict[str, Any] | None:
    """Return the whole reply, or None if the client disconnects first."""
    work = asyncio.ensure_future(gather(found, parsed, shown))
    gone = asyncio.ensure_future(wait_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        # Logprobs need the tokenizer, which is slow.
        return await asyncio.to_thread(reply.whole, *work.result())
    finally:
        # Cancel both tasks also if this coroutine is cancelled.
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def wait_until_gone(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(found: Found, reply: AnyReply) -> AsyncIterator[str]:
    """Yield server-sent events of a reply, and comments during silence."""
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
        yield reply.write_closing()
    except Refused as error:
        yield reply.write_failure(error.body)
    except Exception as error:
        logger.exception("a stream failed")
        yield reply.write_failure(describe_crash(error).body)
