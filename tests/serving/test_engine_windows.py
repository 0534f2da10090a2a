"""Engines on a cache with groups of layers of different windows."""

import numpy as np
import pytest
from support.models.windowed_model import (
    EMBEDDING,
    MIXED,
    NEW_TOKENS,
    PROMPTS,
    SIZES,
    WINDOW,
    count_free,
    expect,
    grouped_cache,
    mixed_model,
    windowed_model,
)

import jkv
from jkv.decoding import FinishReason
from jkv.serving import Engine, RequestRefused, StopSizes

pytestmark = pytest.mark.one_end


def make_engine(cache, model=mixed_model):
    return Engine(
        model,
        EMBEDDING,
        cache,
        max_running=3,
        num_ahead=1,
        max_new_tokens=NEW_TOKENS,
        row_counts=(6,),
        stop_sizes=StopSizes(1, 0, 0),
        checks=True,
    )


def test_windowed_requests_in_scarce_pools_equal_the_model():
    """The full layers have 20 blocks for three sequences of up to eleven."""
    engine = make_engine(grouped_cache([48, 48], prefix_caching=True))
    results = engine.generate([*PROMPTS, PROMPTS[0]])
    expected = expect(MIXED)
    assert [result.tokens for result in results] == [*expected, expected[0]]
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.num_blocks == 64
    assert stats.free_blocks == 64 - 30


def test_all_pools_are_recreated_after_a_failed_step():
    """A prompt that was cached before is recomputed once."""
    engine = make_engine(grouped_cache(prefix_caching=True))
    loop = engine._scheduler.loop
    for num_found in (0, 11, 11 + 11):
        (found,) = engine.generate(PROMPTS[:1], max_new_tokens=4)
        assert found.tokens == expect(MIXED)[0][:4]
        assert found.cached_tokens == min(num_found, 11)
        assert engine.stats().cached_tokens == num_found
    loop.start_again()
    assert count_free(loop.cache) == [44, 20]
    assert [np.count_nonzero(each.key_pool) for each in loop.cache.storage] == [0, 0]
    assert [each.tokens for each in engine.generate(PROMPTS)] == expect(MIXED)
    assert engine.stats().cached_tokens == 11 + 11


def test_a_prompt_needs_only_the_blocks_of_its_window():
    """Ten blocks suffice for 41 tokens with a window, but not with full attention."""
    config = jkv.CacheConfig(
        num_blocks=10, max_sequences=4, sliding_window=WINDOW, **SIZES
    )
    windowed = make_engine(jkv.init(config), windowed_model)
    assert windowed.submit([1] * 41) == 0
    mixed = make_engine(grouped_cache([48, 48, 40], prefix_caching=True))
    with pytest.raises(RequestRefused, match="10 blocks of 4 .* need 11") as no:
        mixed.submit([1] * 41)
    assert no.value.reason == FinishReason.OUT_OF_BLOCKS
