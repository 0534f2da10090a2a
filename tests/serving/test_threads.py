"""Threads that submit, and event loops that stream."""

import asyncio
import threading

import numpy as np
import pytest
from support.serving.small_engines import (
    assert_alone,
    assert_released,
    draw_request,
    make_engine,
)

from jkv.decoding import FinishReason
from jkv.serving import EngineError, RequestStatus

pytestmark = pytest.mark.one_end


@pytest.mark.parametrize("has_thread", [False, True])
def test_threads_submit_and_wait_together(has_thread):
    engine = make_engine(checks=False)
    if has_thread:
        engine.start()
    done, errors = [], []

    def serve(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(4):
                request = draw_request(rng)
                number = engine.submit(**request)
                if rng.random() < 0.3:
                    for _ in engine.events(number):
                        pass
                done.append((request, engine.results(number)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    engine.close()
    assert not errors and len(done) == 32
    for request, found in done:
        assert_alone(found, request)
    assert_released(engine)


def test_an_event_loop_streams_tokens():
    requests = [draw_request(np.random.default_rng(i), n=1) for i in range(12)]
    streamed = {}

    async def read(engine, i):
        tokens = []
        async for token in engine.astream(**requests[i]):
            tokens.append(token)
            if i % 4 == 3 and len(tokens) == 1:
                break  # the consumer leaves
        streamed[i] = tokens

    async def leave(engine):
        number = engine.submit([1, 2], max_new_tokens=12)
        task = asyncio.ensure_future(_read_all(engine.aevents(number)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return number

    async def main(engine):
        left, *_ = await asyncio.gather(
            leave(engine), *(read(engine, i) for i in range(12))
        )
        return left

    with make_engine(checks=False) as engine:
        left = asyncio.run(main(engine))
        assert engine.state(left) in (RequestStatus.CANCELLED, RequestStatus.FINISHED)
        for i, request in enumerate(requests):
            found = engine.results(engine.submit(**request))[0]
            assert streamed[i] == found.tokens[: len(streamed[i])]
            if i % 4 != 3:
                assert streamed[i] == found.tokens
    assert_released(engine)


async def _read_all(events):
    return [event async for event in events]


def test_a_closed_event_loop_is_a_lost_consumer():
    engine = make_engine(checks=False)
    number = engine.submit([1, 2], max_new_tokens=12)
    engine.warm_up()
    events = engine.aevents(number)

    async def begin():
        return await anext(events)

    loop = asyncio.new_event_loop()
    first = loop.run_until_complete(begin())
    assert first.request_id == number
    loop.close()
    engine.close()
    assert engine.state(number) in (RequestStatus.CANCELLED, RequestStatus.FINISHED)
    assert_released(engine)


def test_closing_cancels_unfinished_requests():
    with make_engine(checks=False) as engine:
        numbers = [engine.submit([i], max_new_tokens=12) for i in range(20)]
    reasons = {engine.results(number)[0].reason for number in numbers}
    assert FinishReason.CANCELLED in reasons
    assert_released(engine)
    # It can continue without its thread, and with a new one.
    assert len(engine.generate([[1]], max_new_tokens=2)[0].tokens) == 2
    with engine:
        assert len(engine.generate([[1]], max_new_tokens=2)[0].tokens) == 2


def test_waiting_callers_receive_the_failure():
    engine = make_engine(checks=False)
    engine.warm_up()

    def run(*_):
        raise RuntimeError("no device")

    engine._scheduler.loop.run = run
    with engine, pytest.raises(EngineError, match="no device"):
        engine.results(engine.submit([1]))
