"""Faults: failing steps, lost consumers, timeouts."""

import asyncio
import functools
import gc
import threading
import tracemalloc

import jax
import numpy as np
import pytest
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    attention_model,
    attention_params,
)
from support.serving.small_engines import (
    assert_alone,
    assert_released,
    draw_request,
    expected,
    make_engine,
    run_all,
)
from support.small_caches import copied, small_cache

import jkv
from jkv.decoding import FinishReason
from jkv.serving import Engine, EngineError, QueueFull, RequestRefused, RequestStatus
from jkv.serving.device import programs


class Boom(Exception):
    """An exception raised by a step."""


def failing_once(function, error=Boom, *, after):
    """Wrap a function to raise at one call, after its donated arrays are gone."""
    calls = iter(range(10**9))

    def wrapped(*args):
        result = function(*args)
        if next(calls) == after:
            raise error
        return result

    return wrapped


def poisoned(loop, monkeypatch, *, after):
    """Make windows unreadable from one on until a restart, like a failed device."""
    run, start_again, calls, is_lost = loop.run, loop.start_again, iter(range(99)), []

    def run_in_vain(num_steps):
        report = run(num_steps)
        if next(calls) == after:
            is_lost.append(True)
        return Boom if is_lost else report

    def start():
        is_lost.clear()
        start_again()

    monkeypatch.setattr(loop, "run", run_in_vain)
    monkeypatch.setattr(loop, "start_again", start)


@pytest.mark.parametrize("place", ["run", "exchange", "read"])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.one_end
def test_a_failing_step_fails_only_its_requests(monkeypatch, caplog, place, after):
    engine = make_engine(free_rows=22)  # no other sequence has a row
    engine.warm_up()
    num_compiled = programs.run_window._cache_size()
    loop = engine._scheduler.loop
    if place == "read":
        poisoned(loop, monkeypatch, after=after)
    else:
        function = failing_once(getattr(loop, place), after=after)
        monkeypatch.setattr(loop, place, function)
    rng = np.random.default_rng(after)
    requests = {}
    for _ in range(14):
        request = draw_request(rng, priority=0)
        requests[engine.submit(**request)] = request
        engine.step()
    run_all(engine)
    states = [engine.state(number) for number in requests]
    assert 1 <= states.count(RequestStatus.FAILED) <= 6
    for number, state in zip(requests, states, strict=True):
        if state == RequestStatus.FAILED:
            with pytest.raises(EngineError, match="Boom"):
                engine.results(number)
            found = engine.results(number, wait=False)
            assert {each.reason for each in found} >= {FinishReason.FAILED}
        else:
            assert_alone(engine.results(number), requests[number])
    assert engine.stats().failed == states.count(RequestStatus.FAILED)
    assert programs.run_window._cache_size() == num_compiled
    assert caplog.text.count("requests failed") == 1
    assert_released(engine, free_rows=22)


@pytest.mark.one_end
def test_an_engine_continues_after_an_interrupt(monkeypatch, caplog):
    engine = make_engine(free_rows=22)
    loop = engine._scheduler.loop
    number = engine.submit([1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(loop, "run", failing_once(loop.run, KeyboardInterrupt, after=1))
        with pytest.raises(KeyboardInterrupt):
            engine.results(number)
    assert engine.state(number) == RequestStatus.FAILED and not caplog.text
    assert len(engine.generate([[1, 2]], max_new_tokens=3)[0].tokens) == 3
    assert_released(engine, free_rows=22)


def test_an_engine_fails_if_a_step_loses_the_pool(monkeypatch):
    engine = make_engine()
    loop = engine._scheduler.loop
    monkeypatch.setattr(loop, "run", failing_once(loop.run, after=0))
    assert not engine.has_failed
    with pytest.raises(EngineError, match="failed"):
        list(engine.stream(engine.submit([1, 2])))
    assert engine.has_failed
    with pytest.raises(EngineError, match="the engine has failed") as caught:
        engine.submit([1])
    causes = caught.value.__cause__, caught.value.__cause__.__cause__
    assert "open sequences of its previous owner" in str(causes[0])
    assert isinstance(causes[1], Boom)


@pytest.mark.one_end
@pytest.mark.parametrize("error", [Boom, asyncio.CancelledError])
def test_a_raising_detokenizer_fails_only_its_request(error):
    def decode(ids):
        if 7 in ids:
            raise error
        return "x" * len(ids)

    engine = make_engine(detokenize=decode)
    request = dict(max_new_tokens=6, stop_tokens=[], stop_sequences=[])
    prompts = [[1], [2], [3, 4], [5, 6]]
    numbers = [engine.submit(prompt, **request) for prompt in prompts]
    run_all(engine)
    alone = [
        expected(dict(request, tokens=prompt, n=1, sampling=jkv.Sampling()))[0][0]
        for prompt in prompts
    ]
    failed = [7 in tokens for tokens in alone]
    assert any(failed) and not all(failed)
    for number, tokens, has_failed in zip(numbers, alone, failed, strict=True):
        if has_failed:
            assert engine.state(number) == RequestStatus.FAILED
        else:
            (found,) = engine.results(number)
            assert (found.tokens, found.text) == (tokens, "x" * 6)
    # A single stop string is not split into letters.
    found = engine.results(engine.submit([1], stop_strings="x!", **request))[0]
    assert (found.text, found.reason) == ("x" * 6, FinishReason.LENGTH)
    assert_released(engine)


@pytest.mark.one_end
def test_a_slow_detokenizer_delays_no_other_request():
    """While it runs, another thread can acquire the lock of `submit`."""
    was_free = []

    def try_lock():
        was_free.append(engine._runner.lock.acquire(blocking=False))
        if was_free[-1]:
            engine._runner.lock.release()

    def decode(ids):
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        return "x" * len(ids)

    engine = make_engine(detokenize=decode)
    assert engine.results(engine.submit([1, 2]))[0].text
    assert len(was_free) > 1 and all(was_free)


@pytest.mark.one_end
def test_a_cache_passed_to_two_engines_is_refused():
    first = make_engine()
    second = make_engine(cache=first.cache)
    assert first.generate([[1, 2]], max_new_tokens=2)[0].tokens
    with pytest.raises(EngineError, match="cache must own its arrays, got deleted"):
        second.generate([[1, 2]], max_new_tokens=2)


@pytest.mark.one_end
def test_free_blocks_are_counted_for_an_idle_engine():
    engine = make_engine()
    free = engine.stats().free_blocks
    number = engine.submit([1, 2, 3], max_new_tokens=12)
    for _ in range(2):
        engine.step()
    assert engine.stats().free_blocks < free
    engine.cancel(number)
    run_all(engine)
    assert engine.is_idle and engine.stats().free_blocks == free


@pytest.mark.one_end
def test_a_lost_consumer_cancels_and_a_slow_one_does_not():
    engine = make_engine()
    slow, left, read = (engine.submit([i, i], max_new_tokens=12) for i in (1, 2, 3))
    slow_stream, left_stream = engine.stream(slow), engine.stream(left)
    first = next(slow_stream), next(left_stream)
    left_stream.close()
    assert engine.state(left) == RequestStatus.CANCELLED
    tokens = list(engine.stream(read))
    alone = [
        expected(
            dict(
                tokens=[i, i],
                n=1,
                max_new_tokens=12,
                sampling=jkv.Sampling(),
                stop_tokens=[],
                stop_sequences=[],
            )
        )[0][0]
        for i in (1, 2, 3)
    ]
    assert tokens == alone[2]
    # It was computed in the meantime, completely.
    assert engine.state(slow) == RequestStatus.FINISHED
    assert [first[0], *slow_stream] == alone[0]
    found = engine.results(left)[0]
    assert found.reason == FinishReason.CANCELLED
    assert found.tokens == alone[1][: len(found.tokens)] and first[1] == alone[1][0]
    assert_released(engine)
    with pytest.raises(ValueError, match="must have one sequence"):
        engine.stream(engine.submit([1], n=2))
    engine.close()


@pytest.mark.one_end
def test_requests_time_out_in_every_state():
    now = [0.0]
    engine = make_engine(free_rows=1, clock=lambda: now[0], result_seconds=5.0)
    request = dict(tokens=[1, 2], max_new_tokens=12, timeout=2.0)
    running, waiting = engine.submit(**request), engine.submit(**request)
    timely = engine.submit([3], max_new_tokens=2, timeout=50.0)
    for _ in range(3):
        engine.step()
    now[0] = 2.0
    run_all(engine)
    found = [engine.results(number)[0] for number in (running, waiting, timely)]
    reasons = [each.reason for each in found]
    assert reasons == [FinishReason.DEADLINE] * 2 + [FinishReason.LENGTH]
    assert 0 < len(found[0].tokens) < 12 and found[1].tokens == []
    assert engine.state(running) == RequestStatus.CANCELLED
    assert_released(engine, free_rows=1)
    now[0] = 7.1
    with pytest.raises(KeyError, match="expired"):
        engine.results(running)
    assert not engine.cancel(running)


@pytest.mark.one_end
def test_the_queue_and_stored_results_are_bounded():
    with pytest.raises(ValueError, match="max_waiting must be a static int of at"):
        make_engine(max_waiting=0)
    engine = make_engine(max_waiting=2, max_results=3)
    with pytest.raises(RequestRefused, match="max_new_tokens must be an int, got 1.5"):
        engine.submit([1], max_new_tokens=1.5)
    numbers = [engine.submit([i], max_new_tokens=1) for i in range(2)]
    with pytest.raises(QueueFull, match="got 2 already"):
        engine.submit([3])
    # `generate` waits until the queue accepts its prompts.
    found = engine.generate([[i] for i in range(12)], max_new_tokens=2)
    assert [len(each.tokens) for each in found] == [2] * 12
    run_all(engine)
    known = [n for n in range(14) if _is_known(engine, n)]
    assert len(known) == 3 and numbers[0] not in known
    assert_released(engine)


def _is_known(engine, number):
    try:
        engine.results(number)
    except KeyError:
        return False
    return True


@pytest.mark.one_end
def test_many_requests_leak_no_memory_and_no_blocks():
    engine = make_engine(max_results=20, checks=False)
    rng = np.random.default_rng(5)
    requests = [draw_request(rng, timeout=1000.0) for _ in range(40)]

    def serve(count):
        for start in range(0, count, 40):
            numbers = [engine.submit(**requests[i]) for i in range(40)]
            for number in numbers[start % 7 :: 7]:
                engine.cancel(number)
            run_all(engine)
        gc.collect()
        arrays = sorted((a.shape, str(a.dtype)) for a in jax.live_arrays())
        # Count only this package: other tests' objects change, too.
        ours = tracemalloc.Filter(inclusive=True, filename_pattern="*/jkv/serving/*")
        taken = tracemalloc.take_snapshot().filter_traces([ours])
        return sum(trace.size for trace in taken.traces), arrays

    tracemalloc.start()
    try:
        serve(40)
        memory, arrays = serve(40)
        memory_after, arrays_after = serve(200)
    finally:
        tracemalloc.stop()
    assert arrays_after == arrays
    # A stored result takes 3 KB. (benchmarks/soak.py serves 100,000 requests.)
    assert memory_after - memory < 200 * 1000
    assert_released(engine)


@pytest.mark.further
@pytest.mark.one_end
def test_nan_logits_end_only_their_request():
    """One of sixteen; attention runs in loops, as in larger calls."""
    model = functools.partial(attention_model, implementation="xla")
    sound = attention_params()
    prompts = [[i, 3 + i % 5, 7, 7 - i % 4] for i in range(16)]
    cache = small_cache(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        num_blocks=128,
        block_size=4,
        max_sequences=16,
        max_context_length=24,
    )

    def generate(params):
        engine = Engine(
            model,
            params,
            copied(cache),
            max_running=16,
            max_new_tokens=16,
            max_prompt_tokens=4,
            row_counts=(64,),
        )
        return [(*each.tokens,) for each in engine.generate(prompts)]

    expected = generate(sound)
    prompted = {token for prompt in prompts for token in prompt}
    chosen = [{*sequence[:-1]} - prompted for sequence in expected]
    # A token that some completions choose, and most do not.
    counts = {i: sum(i in each for each in chosen) for i in range(VOCABULARY)}
    token = min((n, i) for i, n in counts.items() if n)[1]
    embedding = np.array(sound["embedding"])
    embedding[token] = np.inf
    found = generate(dict(sound, embedding=jax.device_put(embedding)))
    ends = [[*sequence, token].index(token) + 1 for sequence in expected]
    assert found == [sequence[:n] for sequence, n in zip(expected, ends, strict=True)]
    assert {min(n, 16) for n in ends} > {16}
