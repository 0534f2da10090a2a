"""An engine on a cache with groups of layers of different windows."""

import numpy as np
import pytest
from support.windowed_model import (
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
    """Full layers have 20 blocks, for three texts of up to eleven."""
    engine = make_engine(grouped_cache([48, 48], prefix_caching=True))
    results = engine.generate([*PROMPTS, PROMPTS[0]])
    expected = expect(MIXED)
    assert [result.tokens for result in results] == [*expected, expected[0]]
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.num_blocks == 64
    assert stats.free_blocks == 64 - 30


def test_all_pools_are_made_anew_when_a_step_failed():
    """A prompt that was found again before is computed once more."""
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


def test_a_prompt_needs_the_blocks_that_a_window_keeps():
    """Ten blocks are too few for all layers of 41 tokens, and enough for a window."""
    config = jkv.CacheConfig(
        num_blocks=10, max_sequences=4, sliding_window=WINDOW, **SIZES
    )
    windowed = make_engine(jkv.init(config), windowed_model)
    assert windowed.submit([1] * 41) == 0
    mixed = make_engine(grouped_cache([48, 48, 40], prefix_caching=True))
    with pytest.raises(RequestRefused, match="10 blocks of 4 .* need 11") as no:
        mixed.submit([1] * 41)
    assert no.value.reason == FinishReason.OUT_OF_BLOCKS
