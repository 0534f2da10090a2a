"""The engine, speculation and beams on a mesh, with sharded heads and blocks.

Completions equal plain Python's around the same model without a cache.
"""

import functools

import jax
import numpy as np
import pytest
from support.decoding import plain_beam_search
from support.models.sharded_model import AUTO
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    attention_model,
    dense_rows,
)
from support.models.small_attention_model import attention_params as make_params

import jkv
from jkv.serving import Engine

pytestmark = pytest.mark.one_end

NEW_TOKENS, STOP = 6, 2
PROMPTS = [[5, 9, 5], [11, 7, 3, 8], [4]]
CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    num_blocks=16,
    block_size=4,
    max_sequences=8,
    max_context_length=16,
    dtype="float32",
)


def init():
    """Return a cache with heads and blocks sharded over two devices each."""
    mesh = AUTO._replace(axes=(("tp", 2), ("cp", 2))).mesh
    cache = jkv.init(CONFIG, mesh=mesh, heads="tp", context="cp")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return cache, jax.device_put(make_params(), whole)


@functools.cache
def logprobs_after(tokens):
    params = jax.tree.map(np.asarray, make_params())
    logits = dense_rows(params, np.array(tokens))[-1].astype(np.float64)
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def search(prompt, num_beams):
    """Return the best beams; one beam is greedy."""
    return plain_beam_search.search(
        lambda tokens: logprobs_after(tuple(tokens)),
        prompt,
        num_beams=num_beams,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=(STOP,),
    )


def assert_as_before(cache, before):
    """Assert that the cache is empty and its sharding unchanged."""
    jkv.check(cache)
    assert int(jkv.num_free_blocks(cache)) == CONFIG.num_blocks
    assert cache.sharding == before.sharding is not None
    pools = [each.storage[0].key_pool for each in (cache, before)]
    assert pools[0].sharding.is_equivalent_to(pools[1].sharding, 5)


def sequences_of(tokens):
    return [[token for token in row.tolist() if token >= 0] for row in tokens]


@pytest.mark.further  # drafts over pools: test_generating
def test_draft_tokens_are_verified_on_a_mesh():
    cache, params = init()

    @jax.jit
    def generate(params, cache):
        return jkv.generate(
            attention_model,
            params,
            cache,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            stop_tokens=[STOP],
            max_running=2,
            row_counts=(4,),
            speculate=jkv.decoding.PromptLookup(num_tokens=2, cost=1.0, min_ngram=1),
        )

    after, result = generate(params, cache)
    assert sequences_of(result.tokens) == [search(each, 1)[0][1] for each in PROMPTS]
    assert int(result.statistics.draft_tokens) > 0
    assert_as_before(after, cache)


@pytest.mark.further
def test_beams_branch_on_a_mesh():
    cache, params = init()

    @jax.jit
    def beam_search(params, cache):
        return jkv.beam_search(
            attention_model,
            params,
            cache,
            PROMPTS[:2],
            num_beams=2,
            num_return=2,
            max_new_tokens=NEW_TOKENS,
            stop_tokens=[STOP],
            chunk_size=8,
        )

    after, result = beam_search(params, cache)
    for i, prompt in enumerate(PROMPTS[:2]):
        wanted = search(prompt, 2)
        assert sequences_of(result.tokens[i]) == [tokens for _, tokens in wanted]
        scores = [score for score, _ in wanted]
        np.testing.assert_allclose(result.scores[i], scores, rtol=1e-4)
    assert_as_before(after, cache)


def test_the_engine_serves_from_a_mesh():
    cache, params = init()
    before = jax.tree.map(lambda array: array, cache)
    engine = Engine(
        attention_model,
        params,
        cache,
        max_running=2,
        max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=4,
        num_steps=3,
        row_counts=(4,),
        stop_tokens=[STOP],
        checks=True,
    )
    found = engine.generate(PROMPTS)
    assert [each.tokens for each in found] == [search(p, 1)[0][1] for p in PROMPTS]
    # Windows of steps are compiled once, also for requests after a pause.
    again = engine.generate(PROMPTS[:1])
    assert again[0].tokens == found[0].tokens
    assert_as_before(engine.cache, before)
