"""Draft models: greedy tokens and sampling distributions equal the target's.

The distributions come from two independent tables, small enough to compute by hand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import further
from test_beam_search import checked_model, found_wrong
from test_generation import (
    assert_as_before,
    attention_model,
    attention_params,
    completions,
    dense_logits,
    fresh_cache,
    fresh_config,
    padded,
    reasons,
)

import jkv
from jkv import decoding
from jkv.decoding import DraftModel, Sampling

pytestmark = pytest.mark.one_end

PROMPTS, NEW_TOKENS = 4, 16
STATIC = ("model", "max_new_tokens", "max_running", "row_counts")
generate = jax.jit(jkv.generate, static_argnames=STATIC)


def similar_params():
    """Return weights whose predictions partly agree with the model's."""
    rng = np.random.default_rng(4)

    def disturb(weights):
        weights = np.asarray(weights)
        noise = rng.standard_normal(weights.shape, np.float32)
        return weights + np.float32(0.15 * weights.std()) * noise

    return jax.tree.map(disturb, attention_params())


def greedy_tokens(prompt, limit):
    tokens = []
    while len(tokens) < limit and (not tokens or tokens[-1] != 2):
        tokens.append(int(np.argmax(dense_logits(prompt + tokens))))
    return tokens


DRAFT = DraftModel(
    model=attention_model,
    params=similar_params(),
    config=fresh_config(),
    num_tokens=3,
    cost=1.0,
)


@pytest.mark.further  # the engine's are in test_engine_speculation.py
def test_greedy_tokens_equal_the_target_in_every_pool():
    rng = np.random.default_rng(4)
    totals = np.zeros(3, int)
    for blocks in [64, 7, 64, 11, 7]:
        prompts = [
            rng.integers(3, 19, n).tolist() for n in rng.integers(1, 10, PROMPTS)
        ]
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        before = fresh_cache(blocks, 8, DRAFT, prefix_caching=blocks == 11)
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
            speculate=DRAFT,
        )
        jax.effects_barrier()
        assert not found_wrong, found_wrong[0]
        assert_as_before(cache, before)
        wanted = [greedy_tokens(*one) for one in zip(prompts, limits, strict=True)]
        assert completions(result) == wanted, reasons(result)
        counts = result.statistics
        totals += [counts.draft_tokens, counts.accepted_tokens, counts.preemptions]
    drafted, accepted, preemptions = totals
    assert 0.2 * drafted < accepted < 0.9 * drafted and drafted > 50
    assert preemptions > 0


VOCABULARY, SAMPLES = 5, 4096
WANTED, DRAFTED = np.float32(
    1.5 * np.random.default_rng(8).standard_normal((2, VOCABULARY, VOCABULARY))
)


def table_model(params, tokens, cache, batch, *, all_rows=False, aux_layers=()):
    logits = jnp.asarray(params)[tokens]
    last = jnp.minimum(batch.last_rows, tokens.shape[0] - 1)
    found = (logits if all_rows else logits[last]), cache
    return (*found, logits) if aux_layers else found


def chances(logits, temperature, top_k):
    """Return the distribution after each token, [V, V], with temperature and top-k."""
    scaled = logits.astype(np.float64) / temperature
    if top_k:
        scaled[scaled < np.sort(scaled)[:, [-top_k]]] = -np.inf
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@jax.jit
def sample_completions(cache, draft, temperature, top_k):
    """Sample 4096 completions of four tokens after token 0, with draft tokens."""
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
        speculate=draft,
    )[1]


TABLE_CONFIG = jkv.CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    num_blocks=128,
    block_size=4,
    max_sequences=33,
    max_context_length=8,
)
SIZES = dict(config=TABLE_CONFIG, num_tokens=3, cost=1.0)


def draft_table(params, tokens, hidden, cache, _batch):
    """A head whose first draft token of a step also depends on the target's logits."""
    logits = params[tokens] + 0.1 * hidden
    return logits, jnp.zeros_like(hidden), cache


def draft_block(params, _tokens, cache, batch):
    """Return logits by position only, as block drafts see mask tokens."""
    return params[batch.positions % VOCABULARY], cache


DRAFTERS = {
    "DraftModel": DraftModel(model=table_model, params=DRAFTED, **SIZES),
    "Eagle3": jkv.drafters.Eagle3(
        head=draft_table,
        project=lambda _, hidden: hidden,
        params=DRAFTED,
        aux_layers=(1,),
        **SIZES,
    ),
    "Block": jkv.drafters.Block(
        reader=draft_block,
        write=lambda _params, _hidden, cache, _batch: cache,
        params=DRAFTED,
        aux_layers=(1,),
        mask_token=0,
        **SIZES,
    ),
}


@pytest.mark.parametrize(
    "name, temperature, top_k",
    [
        ("DraftModel", 1.0, 0),
        ("DraftModel", 0.7, 3),
        *further([("Eagle3", 1.0, 0), ("Block", 1.0, 0)]),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(name, temperature, top_k):
    draft = DRAFTERS[name]
    cache = jkv.init(jkv.with_drafter(TABLE_CONFIG, draft))
    result = sample_completions(cache, draft, np.float32(temperature), np.int32(top_k))
    rate = result.statistics.accepted_tokens / result.statistics.draft_tokens
    assert 0.1 < rate < 0.8  # far apart, and yet some are accepted
    tokens = np.asarray(result.tokens)
    assert tokens.shape == (SAMPLES, 4) and (tokens >= 0).all()

    wanted, drafted = (
        chances(logits, temperature, top_k) for logits in (WANTED, DRAFTED)
    )
    first = wanted[0]  # nothing is drafted for the first token
    assert chi_squared(tokens[:, 1], first @ wanted) < LIMITS[VOCABULARY - 1]
    # The first draft distribution: after any token, or at position 2 of a block.
    own = drafted[2] if name == "Block" else first @ drafted
    assert chi_squared(tokens[:, 1], own) > 10 * LIMITS[VOCABULARY - 1]
    # Pairs of the third and the fourth token.
    pairs = tokens[:, 2] * VOCABULARY + tokens[:, 3]
    third = first @ wanted @ wanted
    expected = (third[:, None] * wanted).reshape(-1)
    assert chi_squared(pairs, expected) < LIMITS[(expected > 0).sum() - 1]
    # Independent distributions of neighbouring tokens, which must not fit.
    alone = (third[:, None] * (third @ wanted)[None]).reshape(-1)
    assert chi_squared(pairs, alone) > 10 * LIMITS[24]


# Chi-squared values of probability 0.001, by degrees of freedom.
LIMITS = {4: 18.47, 14: 36.12, 24: 51.18}


def chi_squared(found, expected):
    counts = np.bincount(found, minlength=len(expected))
    assert (counts[expected == 0] == 0).all()
    is_possible = expected > 0
    wanted = SAMPLES * expected[is_possible]
    return float(((counts[is_possible] - wanted) ** 2 / wanted).sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Picky:
    """A drafter that drops a sequence's tokens depending on the ones drawn."""

    stops: bool = dataclasses.field(metadata={"static": True})  # by `keep`
    cost: float = dataclasses.field(metadata={"static": True})
    num_tokens = 2
    groups = aux_layers = ()

    def update(self, cache, *_):
        return cache

    def draft(self, cache, step):
        even = jnp.zeros((step.newest.shape[0], 2))
        likes = step.choose(0, even) == 0
        step.choose(1, even, keep=likes if self.stops else None)
        tokens, counts = step.drafted
        return cache, tokens, counts if self.stops else jnp.where(likes, counts, 0)


def toss(_, tokens, cache, batch, *, all_rows=False):
    """A model of two equally likely tokens."""
    logits = jnp.zeros((tokens.shape[0], 2))
    return (logits if all_rows else logits[: batch.seq_ids.shape[0]]), cache


# Single draft tokens do not pay at a cost of 2.5.
@pytest.mark.further
@pytest.mark.parametrize(("stops", "cost"), [(False, 1.0), (True, 2.5)])
def test_dropped_draft_tokens_do_not_change_the_distribution(stops, cost):
    count, new = 256, 20
    config = jkv.CacheConfig.toy(
        num_blocks=8 * count, max_sequences=count, max_context_length=32
    )
    result = jkv.jitted.generate(
        toss,
        None,
        jkv.init(config),
        np.zeros((count, 1), np.int32),
        max_new_tokens=new,
        row_counts=(count,),
        sampling=Sampling(temperature=1.0, seeds=3),
        speculate=Picky(stops, cost),
    )[1]
    assert int(result.statistics.accepted_tokens) > 500
    share = np.mean(np.asarray(result.tokens) == 0)
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(count * new)


def test_different_vocabularies_are_refused():
    draft = DraftModel(
        model=table_model, params=jnp.zeros((6, 6)), config=fresh_config(), cost=1.0
    )
    with pytest.raises(ValueError, match="vocabulary of 5 tokens, got logits"):
        jax.eval_shape(
            lambda params, cache: jkv.generate(
                table_model, params, cache, [[1]], max_new_tokens=2, speculate=draft
            ),
            WANTED,
            fresh_cache(drafter=draft),
        )


def follows_scan(params, tokens, cache, batch, **options):
    """A model that scans over its layers, so it must get only its own."""
    assert len(cache.layer_groups) == fresh_config().num_layers
    return attention_model(params, tokens, cache, batch, **options)


@pytest.mark.further
def test_prefill_updates_the_drafter():
    """All drafts of a copy of the target are accepted, so it has read the prompt."""
    drafter = dataclasses.replace(DRAFT, params=attention_params())
    prompts = padded([[3, 1, 4, 1, 5, 9, 2, 6, 3, 5, 8, 9]], 1)

    @jax.jit
    def run(params, cache, drafter):
        sizes = dict(max_new_tokens=12, row_counts=(16,))
        cache, state = decoding.prefill(
            follows_scan, params, cache, prompts, speculate=drafter, **sizes
        )
        return decoding.decode(follows_scan, params, cache, state, speculate=drafter)

    _, state = run(attention_params(), fresh_cache(drafter=drafter), drafter)
    counts = state.result.statistics
    assert int(counts.draft_tokens) == int(counts.accepted_tokens) > 5
