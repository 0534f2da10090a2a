"""Weight updates while requests run, and the versions of the attended keys."""

import numpy as np
import pytest
from support.models.versioned_model import (
    check_versions,
    make_cache,
    make_engine,
    read_ages,
    weights,
)
from support.serving.long_runs import Clock, Game
from support.serving.small_engines import count_on

import jkv
from jkv.decoding import FinishReason
from jkv.serving import Engine
from jkv.serving.device.programs import exchange, preempt_all, run_window

pytestmark = pytest.mark.one_end
PROMPT = [9, 2, 6, 5, 3, 5, 8, 9, 7]


def finish(engine, number):
    """Return the completion of a request, and the oldest version by token."""
    (found,) = engine.results(number)
    assert found.reason == FinishReason.LENGTH
    return found, read_ages(PROMPT, found)


def begin_three(engine):
    """Submit two requests that run and one that waits; take three windows."""
    numbers = [engine.submit(PROMPT) for _ in range(2)]
    for _ in range(3):
        engine.step()
    return [*numbers, engine.submit(PROMPT)]


def test_new_weights_keep_running_requests_and_clear_cached_prefixes():
    engine = make_engine()
    *running, waiting = begin_three(engine)
    assert engine.update_params(weights(1)) == 1
    for number in running:
        found, oldest = finish(engine, number)
        assert found.versions == sorted(found.versions) and {*found.versions} == {0, 1}
        assert {*oldest} == {0} == {*found.context_versions}
    found, oldest = finish(engine, waiting)
    assert {*found.versions} == {*oldest} == {1} == {*found.context_versions}
    # No other request hits the blocks of the running sequences: their hits cover only
    # blocks computed under the new weights.
    before = engine.stats().cached_tokens
    old = engine.results(running[0])[0].tokens[:7]
    alike = [a == b for a, b in zip(old, found.tokens, strict=False)].index(False)
    (found,) = engine.generate([[*PROMPT, *old]], max_new_tokens=2)
    assert engine.stats().cached_tokens - before == len(PROMPT) + alike
    assert {*read_ages([*PROMPT, *old], found)} == {1}


def test_recompute_restarts_running_requests_under_new_weights():
    engine = make_engine()
    *running, waiting = begin_three(engine)
    engine.update_params(weights(5), recompute=True, version=5)
    for number in [*running, waiting]:
        found, oldest = finish(engine, number)
        assert {*found.versions} <= {0, 5}
        assert oldest == found.versions == found.context_versions
    assert engine.stats().preemptions == 2 and engine.stats().version == 5
    assert engine.stats().recomputed_tokens > 0


def test_keep_cached_keeps_prefix_hits_under_new_weights():
    engine = make_engine()
    *running, waiting = begin_three(engine)
    engine.update_params(weights(1), keep_cached=True)
    found, oldest = finish(engine, waiting)
    assert {*oldest} == {0} == {*found.context_versions} and {*found.versions} == {1}
    # The next update removes both versions from the index.
    engine.update_params(weights(2))
    found, oldest = finish(engine, engine.submit(PROMPT))
    assert {*oldest} == {2} == {*found.context_versions}


def test_samples_that_share_a_prompt_share_its_version():
    """A waiting sample forks from the old prompt, and reports its version."""
    engine = make_engine()
    for token in range(3):  # of four batch indices
        engine.submit([token])
    number = engine.submit(PROMPT, n=2)
    for _ in range(3):
        engine.step()
    engine.update_params(weights(1))
    for found in engine.results(number):
        oldest = read_ages(PROMPT, found)
        assert {*oldest} == {0} == {*found.context_versions}
    assert found.versions == [
        0,
        *[1] * 11,
    ]  # the first came with the prompt


@pytest.mark.parametrize("seed", range(2))
def test_context_versions_bound_the_attended_blocks(seed):
    """Common prefixes, preemption and cancellation, under many updates."""
    rng, engine = np.random.default_rng(seed), make_engine()
    submitted, version, traces = {}, 0, None
    starts = rng.integers(0, 64, (3, 12)).tolist()
    while len(submitted) < 60 or not engine.is_idle:
        for _ in range(rng.integers(0, 4) if len(submitted) < 60 else 0):
            prompt = starts[rng.integers(3)][: rng.integers(1, 12)]
            submitted[engine.submit(prompt, n=int(rng.integers(1, 4)))] = prompt
        if rng.random() < 0.2:
            engine.cancel(int(rng.integers(1 + len(submitted))))
        if rng.random() < 0.3:
            how = [{}, {"recompute": True}, {"keep_cached": True}][rng.integers(3)]
            version = engine.update_params(weights(version + 1), **how)
            assert traces in (None, count_traces())
            traces = count_traces() if version > 8 else None
        engine.step()
    for number, prompt in submitted.items():
        for found in engine.results(number):
            check_versions(prompt, found)
    stats = engine.stats()
    assert stats.version == version > 10 and stats.preemptions > 0
    assert stats.cached_tokens > 0 and stats.free_blocks == stats.num_blocks


def count_traces():
    """Return the number of compiled programs; one of them contains the model."""
    return [each._cache_size() for each in (exchange, run_window, preempt_all)]


def test_mismatched_weights_are_refused_by_name():
    """The engine's state is unchanged."""
    params = {"layers": [{"w": np.zeros((2, 3), np.float32)}]}

    engine = Engine(count_on, params, make_cache(), max_running=2, max_new_tokens=2)
    for other, text in [
        (
            {"layers": [{"w": np.zeros((3, 2), np.float32)}]},
            r"\['w'\] must be float32\[2,3",
        ),
        ({"layers": [{"w": np.zeros((2, 3), np.int32)}]}, r"got int32\[2,3"),
        ({"layers": [{"v": params["layers"][0]["w"]}]}, r"params\['layers'\]\[0\]"),
        ({"layers": ({"w": params["layers"][0]["w"]},)}, "structure"),
    ]:
        with pytest.raises(ValueError, match=text):
            engine.update_params(other)
    with pytest.raises(ValueError, match="speculate=DraftModel"):
        engine.update_params(params, draft_params=params)
    with pytest.raises(ValueError, match="pass one of them"):
        engine.update_params(params, recompute=True, keep_cached=True)
    with pytest.raises(ValueError, match="version must be an int > 0"):
        engine.update_params(params, version=0)
    assert engine.stats().version == 0
    assert engine.update_params(params, version=3) == 3


def test_small_long_runs():
    """Multi-turn rollouts, parked, cancelled and abandoned, under updates."""
    clock = Clock()
    engine = make_engine(clock=clock, park_seconds=6.0, max_parked_bytes=4000)
    game = Game(engine, clock, np.random.default_rng(0))
    game.play(40)
    counts, stats = game.counts, engine.stats()
    assert min(counts.updates, counts.resumed, counts.given_up, counts.cancelled) > 0
    assert 0 < counts.of_older_versions < counts.tokens
    assert stats.version == counts.updates and stats.parked == stats.parked_bytes == 0
    assert stats.cached_tokens > 0 and stats.failed == 0
    assert int(jkv.num_free_blocks(engine.cache)) == 24
