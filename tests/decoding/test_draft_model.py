"""A draft model: greedy texts are the model's own, sampled ones have its distribution.

The distributions come from two independent tables, with texts that can be reckoned by
hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_beam_search import checked_model, found_wrong
from test_generation import (
    assert_as_before,
    attention_params,
    dense_logits,
    fresh_cache,
    padded,
    reasons,
    texts,
)

import jkv
from jkv.decoding import DraftModel, Sampling

pytestmark = pytest.mark.one_end

PROMPTS, NEW_TOKENS = 4, 16
STATIC = ("model", "max_new_tokens", "max_running", "row_counts")
generate = jax.jit(jkv.generate, static_argnames=STATIC)


def similar_params():
    """Weights that often agree with the model's, and often do not."""
    rng = np.random.default_rng(4)

    def disturb(weights):
        weights = np.asarray(weights)
        noise = rng.standard_normal(weights.shape, np.float32)
        return weights + np.float32(0.15 * weights.std()) * noise

    return jax.tree.map(disturb, attention_params())


def greedy_text(prompt, limit):
    text = []
    while len(text) < limit and (not text or text[-1] != 2):
        text.append(int(np.argmax(dense_logits(prompt + text))))
    return text


@pytest.mark.further  # the engine has them: test_engine_speculation.py
def test_greedy_texts_are_the_models_own_in_every_pool():
    rng = np.random.default_rng(4)
    totals = np.zeros(3, int)
    # Of the draft's cache: room for all, for some, rows for some, and short contexts.
    room = [(64, 8), (7, 8), (64, 1), (11, 2), (4, 8)]
    for blocks, rows in room:
        prompts = [
            rng.integers(3, 19, n).tolist() for n in rng.integers(1, 10, PROMPTS)
        ]
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        before = fresh_cache(int(rng.choice([7, 64])), 8)
        found_wrong.clear()
        cache, result = generate(
            checked_model,
            attention_params(),
            before,
            padded(prompts, PROMPTS),
            max_new_tokens=NEW_TOKENS,
            limits=np.int32(limits),
            stop_tokens=np.int32([2]),
            max_running=2,
            row_counts=(32,),
            speculate=DraftModel(
                model=checked_model,
                params=similar_params(),
                cache=fresh_cache(blocks, rows),
                num_tokens=3,
                cost=1.0,
            ),
        )
        jax.effects_barrier()
        assert not found_wrong, found_wrong[0]
        assert_as_before(cache, before)
        wanted = [greedy_text(*one) for one in zip(prompts, limits, strict=True)]
        assert texts(result) == wanted, reasons(result)
        counts = result.statistics
        totals += [counts.draft_tokens, counts.accepted_tokens, counts.preemptions]
    drafted, accepted, preemptions = totals
    assert 0.2 * drafted < accepted < 0.9 * drafted and drafted > 50
    assert preemptions > 0


VOCABULARY, SAMPLES = 5, 4096
WANTED, DRAFTED = np.float32(
    1.5 * np.random.default_rng(8).standard_normal((2, VOCABULARY, VOCABULARY))
)


def table_model(params, tokens, cache, batch, *, all_rows=False):
    logits = jnp.asarray(params)[tokens]
    last = jnp.minimum(batch.last_rows, tokens.shape[0] - 1)
    return (logits if all_rows else logits[last]), cache


def chances(logits, temperature, top_k):
    """The distribution after each token, [V, V], after temperature and top-k."""
    scaled = logits.astype(np.float64) / temperature
    if top_k:
        scaled[scaled < np.sort(scaled)[:, [-top_k]]] = -np.inf
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@jax.jit
def sample_texts(cache, temperature, top_k):
    """4096 texts of four tokens after token 0, with drafts."""
    return jkv.generate(
        table_model,
        WANTED,
        cache,
        [[0]],
        max_new_tokens=4,
        sampling=Sampling(temperature=temperature, top_k=top_k, seeds=3),
        num_samples=SAMPLES,
        max_running=32,
        row_counts=(33,),
        speculate=DraftModel(
            model=table_model, params=DRAFTED, cache=cache, num_tokens=3, cost=1.0
        ),
    )[1]


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 3)])
def test_sampled_texts_have_the_models_distribution(temperature, top_k):
    cache = jkv.init(
        jkv.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            num_blocks=128,
            block_size=4,
            max_sequences=33,
            max_context_length=8,
        )
    )
    result = sample_texts(cache, np.float32(temperature), np.int32(top_k))
    rate = result.statistics.accepted_tokens / result.statistics.draft_tokens
    assert 0.1 < rate < 0.8  # far apart, and yet some are accepted
    tokens = np.asarray(result.tokens)
    assert tokens.shape == (SAMPLES, 4) and (tokens >= 0).all()

    wanted, drafted = (
        chances(logits, temperature, top_k) for logits in (WANTED, DRAFTED)
    )
    first = wanted[0]  # the prompt's token is 0, and nothing is drafted for it
    assert chi_squared(tokens[:, 1], first @ wanted) < LIMITS[VOCABULARY - 1]
    assert chi_squared(tokens[:, 1], first @ drafted) > 10 * LIMITS[VOCABULARY - 1]
    # The third and the fourth together: 25 pairs.
    pairs = tokens[:, 2] * VOCABULARY + tokens[:, 3]
    third = first @ wanted @ wanted
    expected = (third[:, None] * wanted).reshape(-1)
    assert chi_squared(pairs, expected) < LIMITS[(expected > 0).sum() - 1]
    # Each token's and its neighbour's distribution, ignoring the tokens before.
    alone = (third[:, None] * (third @ wanted)[None]).reshape(-1)
    assert chi_squared(pairs, alone) > 10 * LIMITS[24]


# Values that chi-squared exceeds once in a thousand times, by degrees of freedom.
LIMITS = {4: 18.47, 14: 36.12, 24: 51.18}


def chi_squared(found, expected):
    counts = np.bincount(found, minlength=len(expected))
    assert (counts[expected == 0] == 0).all()
    is_possible = expected > 0
    wanted = SAMPLES * expected[is_possible]
    return float(((counts[is_possible] - wanted) ** 2 / wanted).sum())


def test_the_vocabularies_must_be_the_same():
    draft = DraftModel(
        model=table_model, params=jnp.zeros((6, 6)), cache=fresh_cache(), cost=1.0
    )
    with pytest.raises(ValueError, match="vocabulary of 5 tokens, got logits"):
        jax.eval_shape(
            lambda params, cache: jkv.generate(
                table_model, params, cache, [[1]], max_new_tokens=2, speculate=draft
            ),
            WANTED,
            fresh_cache(),
        )
