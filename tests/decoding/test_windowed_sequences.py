"""Loops on caches that release blocks, compared with the same models in numpy.

A cache's window does not change completions if no layer attends further.
"""

import jax
import numpy as np
import pytest
from support.decoding import plain_beam_search
from support.jax_versions import further
from support.models.windowed_model import (
    EMBEDDING,
    MIXED,
    NEW_TOKENS,
    PROMPTS,
    SIZES,
    WINDOW,
    count_free,
    expect,
    find_logits,
    grouped_cache,
    mixed_model,
    windowed_model,
)

import jkv
from jkv.decoding import FinishReason, PromptLookup

pytestmark = pytest.mark.one_end
SAMPLES = 3


def test_sequences_outgrow_the_pool():
    """Two sequences of up to 42 tokens run in nine blocks, which hold 36 tokens.

    The third sample starts after its prompt has left the window of the first two, and
    recomputes the prompt.
    """
    config = jkv.CacheConfig(
        num_blocks=9, max_sequences=4, sliding_window=WINDOW, **SIZES
    )
    cache, found = jax.jit(
        lambda params, cache: jkv.generate(
            windowed_model,
            params,
            cache,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            num_samples=SAMPLES,
            max_running=2,
            row_counts=(4,),
        )
    )(EMBEDDING, jkv.init(config))
    jkv.check(cache)
    assert int(jkv.num_free_blocks(cache)) == 9
    expected = expect([WINDOW], samples=SAMPLES)
    assert expected != expect([WINDOW + 1], samples=SAMPLES)
    assert found.tokens.tolist() == expected
    assert found.statistics.prompt_tokens > sum(map(len, PROMPTS))


@pytest.fixture(scope="module")
def generate():
    """Return a program: samples of all prompts, four at a time, with speculation.

    The engine's test covers plain steps.
    """
    return jax.jit(
        lambda cache, limits: jkv.generate(
            mixed_model,
            EMBEDDING,
            cache,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            limits=limits,
            num_samples=2,
            max_running=4,
            row_counts=(6,),
            speculate=PromptLookup(num_tokens=2, min_ngram=1, cost=1.0),
        )
    )


def make_cache(held=(), prefix_caching=True):
    """Create groups of one size, so that all tests share a program."""
    return grouped_cache(held, num_blocks=(44, 20), prefix_caching=prefix_caching)


@pytest.mark.parametrize("prefix_caching", [True, *further([False])])
@pytest.mark.parametrize(
    "held, scarce",
    [([], None), ([48, 48, 24], 0), ([8] * 6, 1)],
    ids=["room", "full layers lack blocks", "windowed layers lack blocks"],
)
def test_grouped_caches_generate_like_one_cache(generate, held, scarce, prefix_caching):
    """Blocks are reserved in both groups, and the youngest sequences are preempted."""
    cache = make_cache(held, prefix_caching)
    before = count_free(cache)
    cache, found = generate(cache, np.int32([NEW_TOKENS] * 3))
    jkv.check(cache)
    assert count_free(cache) == before
    assert found.tokens.tolist() == expect(MIXED, samples=2)
    assert set(found.reasons.tolist()) == {FinishReason.LENGTH}
    statistics = found.statistics
    assert (statistics.preemptions > 0) == (scarce is not None)
    assert statistics.accepted_tokens < statistics.draft_tokens  # some are rejected
    lowest = [int(group.free_blocks.fewest) for group in cache.metadata.groups]
    assert scarce is None or lowest[scarce] <= 2


def test_prompts_hit_the_prefix_cache_in_all_groups(generate):
    """Sequences are short, so that windows release few blocks of the prompts."""
    cache = make_cache()
    expected = [completion[:6] for completion in expect(MIXED, samples=2)]
    for num_found in (0, 11 + 1 + 5):  # all tokens of prompts except the last
        cache, found = generate(cache, np.int32([6] * 3))
        jkv.check(cache)
        assert [completion[:6] for completion in found.tokens.tolist()] == expected
        assert found.statistics.cached_tokens == num_found
    assert count_free(cache) == [44, 20]


def search_by_hand(prompt):
    """Return the three best beams of ten tokens, without a cache."""

    def logprobs_after(tokens):
        logits = find_logits(tokens, MIXED).astype(np.float64)
        return logits - np.logaddexp.reduce(logits)

    return plain_beam_search.search(
        logprobs_after, prompt, num_beams=3, max_new_tokens=10
    )


@pytest.mark.further
def test_grouped_beams_equal_plain_python():
    """If blocks run out in either group, the last search restarts."""
    search = jax.jit(
        lambda cache: jkv.beam_search(
            mixed_model,
            EMBEDDING,
            cache,
            PROMPTS,
            num_beams=3,
            max_new_tokens=10,
            num_return=2,
            chunk_size=6,
        )
    )
    expected = [search_by_hand(prompt)[:2] for prompt in PROMPTS]
    for held, restarts in (((), False), ((48, 48, 8), True), ((8,) * 6, True)):
        cache = grouped_cache(held, num_blocks=(44, 30))
        before = count_free(cache)
        cache, found = search(cache)
        jkv.check(cache)
        assert count_free(cache) == before
        for i, completions in enumerate(expected):
            assert found.tokens[i].tolist() == [tokens for _, tokens in completions]
            scores = [score for score, _ in completions]
            np.testing.assert_allclose(found.scores[i], scores, rtol=1e-4)
        assert (found.statistics.restarts > 0) == restarts


def test_a_sequence_that_exceeds_one_group_ends(generate):
    """Eight blocks of the full layers are left: 32 tokens. The window pool suffices."""
    cache, found = generate(make_cache([48, 48, 48]), np.int32([NEW_TOKENS] * 3))
    jkv.check(cache)
    expected, lengths = expect(MIXED, samples=2), found.lengths.tolist()
    assert found.reasons.tolist()[:2] == [FinishReason.OUT_OF_BLOCKS] * 2
    assert lengths == [21, 21, 30, 30, 27, 27]
    completions = [
        completion[:n]
        for completion, n in zip(found.tokens.tolist(), lengths, strict=True)
    ]
    assert completions == [
        completion[:n] for completion, n in zip(expected, lengths, strict=True)
    ]


def test_open_sequences_continue_in_groups():
    """A second turn continues the first; tokens beyond the pool are refused."""
    cache, opened = jkv.allocate(grouped_cache([40]), [0, 0])
    extend = jax.jit(
        lambda cache, tokens: jkv.extend(
            mixed_model,
            EMBEDDING,
            cache,
            opened.seq_ids,
            tokens,
            max_new_tokens=NEW_TOKENS // 2,
            chunk_size=8,
        )
    )
    first, second = expect(MIXED)[:2]
    tokens = np.full((2, 12), -1, np.int32)
    for row, prompt in enumerate(PROMPTS[:2]):
        tokens[row, : len(prompt)] = prompt
    cache, found = extend(cache, tokens)
    assert found.tokens.tolist() == [first[:15], second[:15]]
    tokens[:, 1:] = -1
    tokens[:, 0] = found.tokens[:, -1]
    cache, found = extend(cache, tokens)
    jkv.check(cache)
    assert found.tokens.tolist() == [first[15:], second[15:]]
    tokens[:] = 1
    after, found = extend(cache, tokens)
    assert found.reasons.tolist()[0] == FinishReason.CONTEXT_FULL
    lengths = jkv.context_lengths(after)[opened.seq_ids].tolist()
    assert found.lengths.tolist()[0] == 0 and lengths == [41, 48]
