"""Retention priority and lifetime of a request's cached blocks."""

import functools

import numpy as np
import pytest
from support.serving.small_engines import (
    BLOCK_SIZE,
    BLOCKS,
    CONTEXT,
    ROWS,
    VOCABULARY,
    WIDTH,
    make_engine,
)
from support.small_caches import copied, small_cache

import jkv
from jkv.serving import RequestRefused

pytestmark = pytest.mark.one_end
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Clock:
    """A clock set by the test."""

    now = 0.0

    def __call__(self):
        return self.now


@functools.cache
def fresh():
    return small_cache(
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=ROWS + 12,
        max_context_length=CONTEXT,
        prefix_caching=True,
        keep_classes=3,
    )


def engine_of_classes(clock=None, **options):
    return make_engine(cache=copied(fresh()), clock=clock or Clock(), **options)


def press(engine):
    """Fill all blocks once with other sequences."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (24, WIDTH)).tolist()
    engine.generate(prompts, max_new_tokens=6)


def found(engine):
    """Return the number of the prompt's cached tokens; it ends within a third block."""
    return int(jkv.match(engine.cache, np.array([PROMPT], np.int32))[0])


@pytest.mark.parametrize("keep", [0, 2])
def test_retained_blocks_outlive_unretained_ones(keep):
    engine = engine_of_classes()
    number = engine.submit(PROMPT, max_new_tokens=5, keep=keep)
    first = engine.results(number)[0].tokens
    press(engine)
    assert found(engine) == (9 if keep else 0)
    again = engine.submit(PROMPT, max_new_tokens=5)
    assert engine.results(again)[0].tokens == first
    press(engine)  # a hit keeps its priority
    assert found(engine) == (9 if keep else 0)
    kept = engine.cache.metadata.groups[0].free_blocks.kept
    # With the new tokens three blocks are full; the newest token has no slot yet.
    assert np.count_nonzero(kept.classes) == (3 if keep else 0)


def test_a_priority_expires_and_the_latest_deadline_counts():
    clock = Clock()
    engine = engine_of_classes(clock)
    for seconds in (5.0, 50.0):
        engine.results(
            engine.submit(PROMPT, max_new_tokens=5, keep=1, keep_seconds=seconds)
        )
    for now, is_kept in ((7.0, True), (60.0, False)):
        clock.now = now
        press(engine)
        press(engine)
        assert (found(engine) > 0) == is_kept


@pytest.mark.parametrize("late", [True, False])
def test_a_priority_also_expires_in_the_store(late):
    """Blocks restored after their deadline have priority 0, others until then."""
    clock, store = Clock(), jkv.BlockStore(2**20)
    engine = engine_of_classes(clock, store=store)
    engine.results(engine.submit(PROMPT, max_new_tokens=5, keep=1, keep_seconds=50.0))
    engine.close()
    engine = engine_of_classes(clock, store=store)  # without a request of its own
    clock.now = 60.0 if late else 0.0

    def count_kept():
        kept = engine.cache.metadata.groups[0].free_blocks.kept
        return np.count_nonzero(kept.classes)

    engine.results(engine.submit(PROMPT, max_new_tokens=5))
    assert engine.stats().restored_tokens == 8
    assert count_kept() == (0 if late else 2)
    clock.now = 60.0
    engine.results(engine.submit(PROMPT, max_new_tokens=5))
    assert count_kept() == 0


def test_a_cancelled_sequence_is_kept():
    engine = engine_of_classes()
    number = engine.submit(PROMPT, keep=1)
    engine.step()
    engine.step()
    engine.cancel(number)
    press(engine)
    assert found(engine) == 8


def test_an_invalid_priority_is_refused_by_name():
    engine = engine_of_classes()
    for fields, text in (
        (dict(keep=3), "keep must be from 0 to 2, got 3"),
        (dict(keep=-1), "keep must be from 0 to 2, got -1"),
        (dict(keep=1.0), "keep must be an int"),
        (dict(keep=1, keep_seconds=0), "keep_seconds must be > 0"),
        (dict(keep=1, keep_seconds="1"), "keep_seconds must be seconds or None"),
    ):
        with pytest.raises(RequestRefused, match=text):
            engine.submit(PROMPT, **fields)
    with pytest.raises(RequestRefused, match="from 0 to 0, got 1"):
        make_engine().submit(PROMPT, keep=1)


@pytest.mark.further
def test_nothing_is_compiled_after_warming_up():
    engine = engine_of_classes()
    engine.warm_up()
    from jkv.prefixes.verbs import _demote
    from jkv.serving.scheduler.retention import keep_sequence

    before = keep_sequence._cache_size(), _demote._cache_size()
    engine.results(engine.submit(PROMPT, keep=1, keep_seconds=1e-3))
    press(engine)
    assert (keep_sequence._cache_size(), _demote._cache_size()) == before


def test_a_sequence_that_fills_the_context_is_kept_and_parked():
    """The last token has no slot in the cache, and completes no block."""
    engine = engine_of_classes()
    number = engine.submit(PROMPT, max_new_tokens=12, keep=1)
    engine.park(number)
    sequence = PROMPT + engine.results(number)[0].tokens
    assert len(sequence) == CONTEXT + 1
    engine.step()
    press(engine)
    assert found(engine) == 9 and engine.stats().parked == 1
