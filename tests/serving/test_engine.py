"""The engine, compared with plain Python and `jkv.generate` for each request."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding.plain_queue import VOCABULARY
from support.jax_versions import few, further
from support.models.versioned_model import make_engine as make_versioned
from support.models.versioned_model import weights
from support.serving.small_engines import (
    CONTEXT,
    MOST_SAMPLES,
    NEW_TOKENS,
    WIDTH,
    assert_alone,
    assert_released,
    come_and_go,
    draw_request,
    expected,
    make_engine,
    run_all,
)

from jkv.decoding import FinishReason, Sampling, spread_seeds
from jkv.serving import Request, RequestRefused, RequestStatus
from jkv.status import UsageError


@pytest.mark.newest_further
@pytest.mark.parametrize("seed", few([0, 1, *further([2, 3, 4, 5])], 1))
def test_random_requests_equal_their_solo_runs(seed):
    rng = np.random.default_rng(seed)
    free_blocks, free_rows = int(rng.choice([5, 6, 8, 40])), int(rng.choice([2, 10]))
    nan_every = int(rng.choice([0, 17]))
    engine = make_engine(free_blocks, free_rows, nan_every)
    left = [draw_request(rng) for _ in range(25)]
    requests, events, cancelled = come_and_go(engine, rng, left)
    stats = engine.stats()
    assert stats.cancelled == len(cancelled) > 0
    assert stats.finished == len(requests) - len(cancelled) > 10
    num_tokens = 0
    for number, request in requests.items():
        found = engine.results(number)
        assert_alone(found, request, free_blocks=free_blocks, nan_every=nan_every)
        for each in found:
            mine = [e for e in events if e[:2] == each[:2]]
            assert [t for e in mine for t in e.tokens] == each.tokens
            assert [p for e in mine for p in e.logprobs] == each.logprobs
            reasons = [e.reason for e in mine]
            assert reasons[-1] == each.reason and not any(reasons[:-1])
            num_tokens += len(each.tokens)
    assert stats.generated_tokens == num_tokens
    assert stats.cached_tokens > 0 or free_blocks < 40
    assert stats.preemptions > 0 or free_blocks > 8
    assert_released(engine, free_blocks, free_rows)


@pytest.mark.one_end
def test_each_prompt_of_a_batch_equals_its_solo_run():
    """As in `jkv.generate`, sequences with one seed draw different tokens."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in (3, 10, 1, 0, 7, 5)]
    limits, salts = [4, 12, 0, 5, 9, 12], [0, 1, 0, 1, 0, 1]
    sampling = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seeds=11)
    stops = dict(stop_tokens=[7, 11], stop_sequences=[[3, 4], [9]])
    engine, seeds = make_engine(), spread_seeds(11, 6 * MOST_SAMPLES)
    found = engine.generate(
        prompts, n=MOST_SAMPLES, sampling=sampling, limits=limits, salts=salts, **stops
    )
    assert len(found) == 6 * MOST_SAMPLES
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        first = i * MOST_SAMPLES
        options = dict(
            tokens=prompt,
            n=MOST_SAMPLES,
            max_new_tokens=limit,
            sampling=dataclasses.replace(sampling, seeds=seeds[first:][:MOST_SAMPLES]),
        )
        assert_alone(found[first : first + MOST_SAMPLES], options | stops)
    assert {each.reason.name for each in found} >= {"STOP", "LENGTH", "EMPTY_PROMPT"}
    assert_released(engine)


@pytest.mark.one_end
def test_a_request_equals_its_keyword_fields():
    engine, request = make_engine(), draw_request(np.random.default_rng(4))
    numbers = [engine.submit(**request), engine.submit(Request(**request))]
    named, options = (
        [each._replace(request_id=0, cached_tokens=0) for each in engine.results(n)]
        for n in numbers
    )
    assert repr(named) == repr(options) and named[0].tokens
    with pytest.raises(UsageError, match="a Request and the keywords n, salt"):
        engine.submit(Request([1]), n=2, salt=3)
    with pytest.raises(TypeError, match="max_tokens"):
        engine.submit([1], max_tokens=3)


@pytest.mark.one_end
def test_smaller_priorities_run_first_and_ties_in_order():
    engine = make_engine(free_rows=1)  # one request runs at a time
    options = dict(tokens=[5], max_new_tokens=1)
    order = [engine.submit(**options, priority=p) for p in (3, 3, 1, 2, 1, 0)]
    events = run_all(engine)
    ended = [event.request_id for event in events if event.reason]
    assert [order.index(number) for number in ended] == [5, 2, 4, 3, 0, 1]
    # Requests already on the device also yield, unless they have started.
    group = engine.submit([5], n=2, max_new_tokens=12)
    later = engine.submit([6], max_new_tokens=5, priority=5)
    engine.step()
    sooner = engine.submit([7], max_new_tokens=5, priority=-5)
    ended = [event.request_id for event in run_all(engine) if event.reason]
    assert ended == [group, group, sooner, later]


def refused(engine, *args, **options):
    with pytest.raises(RequestRefused) as caught:
        engine.submit(*args, **options)
    return str(caught.value), caught.value.reason


@pytest.mark.one_end
def test_oversized_requests_are_refused_with_the_sizes():
    engine = make_engine(free_blocks=2)
    text, reason = refused(engine, range(9))
    assert "2 blocks of 4 tokens, got 9 tokens, which need 3" in text
    assert reason == FinishReason.OUT_OF_BLOCKS
    text, reason = refused(engine, [1] * (CONTEXT + 1))
    assert f"at most {CONTEXT} tokens, got {CONTEXT + 1}" in text
    assert reason == FinishReason.CONTEXT_FULL
    for words, arguments in {
        f"at most {WIDTH} tokens, got 11": dict(tokens=[1] * 11),
        "the prompt is empty": dict(tokens=[]),
        "below 29, the model's vocabulary, got 29": dict(tokens=[29]),
        "a list of token ids": dict(tokens=[[1]]),
        "integers of 0 or more, got [-1]": dict(tokens=[-1]),
        f"max_new_tokens must be at most {NEW_TOKENS}": dict(
            max_new_tokens=NEW_TOKENS + 1
        ),
        "at least 1, got 0": dict(max_new_tokens=0),
        "n must be at least 1, got 0": dict(n=0),
        "n must be at least 1, got -1": dict(n=-1),
        "salt must fit in 32 bits": dict(salt=2**40),
        "timeout must": dict(timeout=0),
        "priority must": dict(priority=2**31),
        "got StopSizes(tokens=3": dict(stop_tokens=[1, 2, 3]),
        "length=4)": dict(stop_sequences=[[1, 2, 3, 4]]),
        "must not be empty": dict(stop_sequences=[[]]),
        "detokenize=": dict(stop_strings=["x"]),
        "stop_strings must be str": dict(stop_strings=[b"x"]),
        "stop_strings must be a list": dict(stop_strings=None),
        "stop_sequences must be a list": dict(stop_sequences=3),
        "salt must be an int": dict(salt=1.2),
        "priority must be an int": dict(priority=None),
        "timeout must be seconds": dict(timeout="1"),
        "sampling must be a jkv.Sampling": dict(sampling={}),
        "temperature must be": dict(sampling=Sampling(temperature=jnp.array(np.nan))),
        "one value for each sequence": dict(
            n=2, sampling=Sampling(top_k=np.ones(3, int))
        ),
    }.items():
        room = make_engine() if "at most" in words else engine
        assert words in refused(room, **(dict(tokens=[1]) | arguments))[0], words
    for name, size in (
        *(("max_running", 0), ("num_steps", 0), ("num_ahead", -1)),
        ("max_results", 2.5),
    ):
        with pytest.raises(ValueError, match=f"{name} must be .* at least"):
            make_engine(**{name: size})
    with pytest.raises(ValueError, match=r"got 3; pass stop_sizes=StopSizes\("):
        make_engine(stop_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="cache must be a jkv.Cache, got str"):
        make_engine(cache="cache")
    # Without the two of another engine.
    assert engine.is_idle and engine.stats().refused == 2 + 25 - 2


@pytest.mark.parametrize(
    "words, prompts, fields",
    [
        (r"got float64\[1, 2\]", [[1.7, 2.9]], {}),
        ("got rows of", [5, 6], {}),
        ("got bool", [[True, False]], {}),
        ("got 7 at position 2 of prompt 1", [[1], [5, -1, 7]], {}),
        ("got -9 at position 1 of prompt 0", [[5, -9]], {}),
        ("limits must be an int", [[5]], dict(limits=2.9)),
        ("lengths {'limits': 2", [[5]], dict(limits=[2, 3])),
        ("n must be an int, got 1.5", [[5]], dict(n=1.5)),
        ("max_new_tokens must be an int", [[5]], dict(max_new_tokens="2")),
        ("salt is a field of one request; pass salts=", [[5]], dict(salt="x")),
        ("salts must have one entry", [[5]], dict(salts=["x", "y"])),
        ("budget must be a field of Request", [[5]], dict(budget=3)),
    ],
)
@pytest.mark.one_end
def test_invalid_batches_are_refused(words, prompts, fields):
    """Nothing is converted silently, and nothing stays in the queue."""
    engine = make_engine()
    with pytest.raises(ValueError, match=words):
        engine.generate(prompts, **fields)
    assert engine.is_idle


@pytest.mark.one_end
def test_a_batch_may_have_string_salts():
    """Prompts of one salt share their prefixes, in two calls."""
    engine = make_engine()
    prompt = [*range(1, WIDTH + 1)]
    engine.generate([prompt], salts="a")
    for salts, expected_hits in (
        ("a", [True, True]),
        (["b", "a"], [False, True]),
        ([0, 1], [False, False]),
    ):
        found = engine.generate([prompt] * 2, salts=salts)
        assert [each.cached_tokens > 0 for each in found] == expected_hits
    # A refused request changes nothing: ints below 0 cannot stand beside strings.
    engine = make_engine()
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        engine.submit([], salt=-3)
    engine.submit([1], salt="a")


@pytest.mark.one_end
def test_numpy_weights_are_copied_to_the_device_once():
    """As arguments of each window they would be copied in each."""
    engine = make_versioned()
    assert isinstance(engine._scheduler.loop._given.params, jax.Array)
    engine.update_params(weights(1))
    assert isinstance(engine._scheduler.loop._given.params, jax.Array)
    (found,) = engine.generate([[1, 2]], max_new_tokens=2)
    assert {*found.versions} == {1}


@pytest.mark.one_end
def test_closing_an_iterator_cancels_before_it_starts():
    engine = make_engine()
    for open_iterator in (engine.events, engine.stream):
        number = engine.submit([1, 2])
        open_iterator(number).close()
        assert engine.state(number) == RequestStatus.CANCELLED
    number = engine.submit([1, 2])
    asyncio.run(engine.aevents(number).aclose())
    assert engine.state(number) == RequestStatus.CANCELLED
    number = engine.submit([1, 2], max_new_tokens=3)
    tokens = list(engine.stream(number))
    assert tokens == engine.results(number)[0].tokens and len(tokens) == 3


@pytest.mark.one_end
def test_a_request_is_in_one_state_at_a_time():
    engine = make_engine(free_blocks=6, free_rows=3)
    seen = set()
    numbers = [
        engine.submit(list(range(i, i + 8)), max_new_tokens=12, priority=i)
        for i in range(5)
    ]
    engine.cancel(numbers[-1])
    while not engine.is_idle:
        states = [engine.state(number) for number in numbers]
        stats = engine.stats()
        for state in RequestStatus:
            assert getattr(stats, state.value) == states.count(state)
        seen |= set(states)
        engine.step()
    assert seen == set(RequestStatus) - {RequestStatus.FAILED}
    assert engine.state(numbers[0]) == RequestStatus.FINISHED
    with pytest.raises(KeyError, match="is unknown"):
        engine.state(99)


@pytest.mark.parametrize("seed", [0, *further([1, 2])])
@pytest.mark.one_end
def test_stop_strings_are_trimmed_at_any_window_boundary(seed):
    """Completions equal those of plain Python, trimmed by hand."""
    rng, letters = np.random.default_rng(seed), "abcdefghijklmnopqrstuvwxyz .!"
    engine = make_engine(detokenize=lambda ids: "".join(letters[i] for i in ids))
    requests = {}
    for _ in range(12):
        request = draw_request(rng, stop_tokens=[], stop_sequences=[])
        whole = expected(request)[0]
        # A substring of one of its completions, and one that occurs in none.
        start = int(rng.integers(len(whole[0])))
        piece = "".join(letters[t] for t in whole[0][start : start + 3])
        options = request | dict(stop_strings=["zzz!", piece])
        requests[engine.submit(**options)] = whole, options["stop_strings"]
    events, num_stopped = run_all(engine), 0
    for number, (whole, stops) in requests.items():
        for found, tokens in zip(engine.results(number), whole, strict=True):
            texts = [
                "".join(letters[t] for t in tokens[: i + 1]) for i in range(len(tokens))
            ]
            ends = [i for i, text in enumerate(texts) if any(s in text for s in stops)]
            count = ends[0] + 1 if ends else len(tokens)
            text = texts[count - 1]
            if ends:
                text = text[: min(text.find(s) for s in stops if s in text)]
                assert found.reason == FinishReason.STOP
            assert (found.tokens, found.text) == (tokens[:count], text)
            assert len(found.logprobs) == count
            mine = [event for event in events if event[:2] == found[:2]]
            assert "".join(event.text for event in mine) == text
            num_stopped += bool(ends)
    assert num_stopped >= 12
    assert_released(engine)


@pytest.mark.newest_further
def test_nothing_is_compiled_after_warming_up():
    from jkv.serving.device import programs

    engine = make_engine()
    calls = []
    assert engine.warm_up(lambda *call: calls.append(call)) == 3
    assert [name for name, *_ in calls] == ["begin", "exchange", "window", "done"]
    assert calls[-1][1:] == (3, 3)
    compiled = [programs.begin_empty, programs.exchange, programs.run_window]
    before = [program._cache_size() for program in compiled]
    rng = np.random.default_rng(0)
    for _ in range(8):
        engine.submit(**draw_request(rng))
    run_all(engine)
    engine.generate([[5], [6]], sampling=Sampling(temperature=1.0), stop_tokens=[3])
    assert [program._cache_size() for program in compiled] == before
    assert_released(engine)


def test_windows_update_the_pool_in_place():
    engine = make_engine(checks=False)
    engine.warm_up()
    before = engine.cache.storage[0].key_pool.unsafe_buffer_pointer()
    engine.submit([1, 2, 3])
    run_all(engine)
    assert engine.cache.storage[0].key_pool.unsafe_buffer_pointer() == before
