"""Prompts with bidirectional spans in every loop, compared with one dense pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import further
from support.models.small_attention_model import (
    VOCABULARY,
    attention_model,
    attention_params,
    continue_densely,
    dense_rows,
)

import jkv
from jkv.decoding import FinishReason, Prompts
from jkv.status import UsageError

NEW, WIDTH = 5, 14
PROMPTS = [
    [8, 9, 14, 18, 0, 2, 15, 18, 4, 5, 16, 8],
    [4, 11, 9, 2, 7],
    [3, 1, 8, 8, 6, 2, 5, 5, 9, 1, 2, 3, 4, 17],
]
# An image within tokens, a prefix-LM prompt, two images.
SPANS = [
    [-1, -1, 7, 7, 7, 7, 7, 7] + [-1] * 4,
    [4] * 5,
    [3, 3, 3, 3, -1, 9, 9, 9, 9, 9] + [-1] * 4,
]


def small_config(num_blocks=40, **more):
    return jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=8,
        max_context_length=32,
        **more,
    )


def make_cache(num_blocks=40, **more):
    return jkv.init(small_config(num_blocks, **more))


@functools.cache
def expected():
    return [continue_densely(*pair) for pair in zip(PROMPTS, SPANS, strict=True)]


@pytest.mark.one_end
def test_spans_change_the_completions():
    causal = [continue_densely(prompt, ()) for prompt in PROMPTS]
    assert all(a != b for a, b in zip(causal, expected(), strict=True))


@pytest.mark.one_end
@pytest.mark.parametrize(
    "fields",
    [
        {},
        *further([{"chunk_size": 8}, {"row_counts": (3, 9)}, {"exact": (3, 12)}]),
        *further([{"num_samples": 2, "max_running": 2, "row_counts": (2, 8)}]),
    ],
    ids=str,
)
def test_generate_ends_chunks_between_spans(fields):
    num_samples = fields.get("num_samples", 1)
    cache, found = jkv.generate(
        attention_model,
        attention_params(),
        make_cache(),
        PROMPTS,
        spans=SPANS,
        max_new_tokens=NEW,
        **fields,
    )
    for i, tokens in enumerate(found.tokens.tolist()):
        assert tokens == expected()[i // num_samples]
    assert int(jkv.num_free_blocks(cache)) == 40


@pytest.mark.one_end
def test_preempted_prompts_keep_their_spans():
    _, found = jkv.generate(
        attention_model,
        attention_params(),
        make_cache(num_blocks=11),
        PROMPTS,
        spans=SPANS,
        max_new_tokens=12,
        row_counts=(3, 10),
    )
    assert found.tokens.tolist() == [
        continue_densely(*pair, 12) for pair in zip(PROMPTS, SPANS, strict=True)
    ]
    assert int(found.statistics.preemptions) > 0


@pytest.mark.one_end
def test_speculation_verifies_after_the_spans():
    _, found = jkv.generate(
        attention_model,
        attention_params(),
        make_cache(),
        PROMPTS,
        spans=SPANS,
        max_new_tokens=NEW,
        speculate=jkv.PromptLookup(num_tokens=2),
    )
    assert found.tokens.tolist() == expected()


@pytest.mark.newest_further
def test_spans_may_be_traced():
    """Without a bound, spans have at most as many rows as a step."""
    prompts = Prompts.of(PROMPTS, spans=SPANS)
    assert prompts.spans is not None and prompts.spans.longest == 8

    @jax.jit
    def run(cache, spans, params):
        return jkv.generate(
            attention_model,
            params,
            cache,
            prompts.tokens,
            spans=spans,
            max_new_tokens=NEW,
        )[1].tokens

    ends = prompts.spans.ends
    assert run(make_cache(), ends, attention_params()).tolist() == expected()
    short = run(make_cache(), jnp.full_like(ends, -1), attention_params())
    assert short.tolist() == [continue_densely(prompt, ()) for prompt in PROMPTS]
    assert run._cache_size() == 1


@pytest.mark.further
@pytest.mark.one_end
def test_extend_accepts_spans_after_a_context():
    cache, opened = jkv.allocate(make_cache(), [0, 0, 0])
    begin, rest = [p[:3] for p in PROMPTS], [p[3:] for p in PROMPTS]
    # Spans are relative to the first token given here.
    spans = [[4] * 5 + [-1] * 4, [1, 1], [-1, -1, 6, 6, 6, 6, 6, -1, -1, -1, -1]]
    step = functools.partial(jkv.extend, attention_model, attention_params())
    cache, first = step(cache, opened.seq_ids, begin, max_new_tokens=1)
    given = [
        [token, *more]
        for token, more in zip(first.tokens[:, 0].tolist(), rest, strict=True)
    ]
    spans = [[-1, *(end + 1 if end >= 0 else -1 for end in row)] for row in spans]
    _, found = step(
        cache,
        opened.seq_ids,
        given,
        spans=spans,
        max_new_tokens=NEW,
        row_counts=(3, 8),
    )
    for i, tokens in enumerate(found.tokens.tolist()):
        sequence = begin[i] + given[i]
        ends = [-1] * 3 + [end + 3 if end >= 0 else -1 for end in spans[i]]
        assert tokens == continue_densely(sequence, ends)


@pytest.mark.further
@pytest.mark.one_end
def test_a_span_longer_than_a_step_is_refused():
    for fields in ({"row_counts": (3, 7)}, {"max_span": 7}):
        _, found = jkv.generate(
            attention_model,
            attention_params(),
            make_cache(),
            PROMPTS,
            spans=[[-1] * 12, [4] * 5, [-1, 9, *[-1] * 12]],
            max_new_tokens=NEW,
            **fields,
        )
        assert found.reasons.tolist() == [
            FinishReason.LENGTH,
            FinishReason.LENGTH,
            FinishReason.SPAN_TOO_LONG,
        ]
        assert found.tokens[1].tolist() == expected()[1]


@pytest.mark.further
@pytest.mark.one_end
def test_a_long_span_is_not_starved():
    """It needs a whole step, while short prompts keep arriving after it."""
    prompts = [[1, 2], [3, 4], [5] * 8, *([[6, 7, 8]] * 4)]
    spans = [[-1] * 2, [-1] * 2, [7] * 8, *([[-1] * 3] * 4)]
    _, found = jkv.generate(
        attention_model,
        attention_params(),
        make_cache(),
        prompts,
        spans=spans,
        max_new_tokens=NEW,
        max_running=3,
        row_counts=(3, 8),
    )
    assert found.tokens[2].tolist() == continue_densely(prompts[2], spans[2])
    assert all(found.reasons == FinishReason.LENGTH)


@pytest.mark.one_end
@pytest.mark.parametrize("cacheable", [True, *further([False])])
def test_prefix_hits_follow_the_spans(cacheable):
    cache = make_cache(prefix_caching=True)
    run = functools.partial(
        jkv.generate,
        attention_model,
        attention_params(),
        spans=SPANS,
        max_new_tokens=NEW,
        cacheable_spans=cacheable,
    )
    cache, first = run(cache, PROMPTS)
    cache, again = run(cache, PROMPTS)
    assert first.tokens.tolist() == again.tokens.tolist() == expected()
    # Only full blocks before any span, or all tokens but the last.
    hits = int(again.statistics.cached_tokens)
    assert hits == (sum(map(len, PROMPTS)) - 3 if cacheable else 0)


@pytest.mark.further
@pytest.mark.one_end
def test_score_takes_spans():
    """Log-probabilities and gradients equal dense passes."""
    continuations = [[4, 2, 9], [1, 7, 3], [5, 5, 5]]
    params = attention_params()

    def dense(params):
        found = []
        for prompt, ends, sequence in zip(PROMPTS, SPANS, continuations, strict=True):
            tokens = jnp.array([*prompt, *sequence])
            logits = dense_rows(params, tokens, xp=jnp, ends=ends)
            logits = jax.nn.log_softmax(logits[len(prompt) - 1 : -1])
            found.append(logits[jnp.arange(3), jnp.array(sequence)])
        return jnp.stack(found)

    def ours(params):
        config = small_config()
        given = params, PROMPTS, continuations
        return jkv.score(attention_model, *given, config=config, spans=SPANS)

    np.testing.assert_allclose(ours(params), dense(params), rtol=2e-5, atol=2e-5)
    grads = (jax.grad(lambda p, f=f: f(p).sum())(params) for f in (ours, dense))
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    wrong = jkv.score(
        attention_model,
        params,
        [[1, 2], [3, 4]],
        [[5], [6]],
        config=small_config(),
        spans=[[1, 1], [2, -1]],
    )
    assert np.isnan(wrong).tolist() == [[False], [True]]


@pytest.mark.one_end
def test_malformed_spans_are_refused():
    run = functools.partial(
        jkv.generate,
        attention_model,
        attention_params(),
        make_cache(),
        [[1, 2, 3]],
        max_new_tokens=NEW,
    )
    with pytest.raises(UsageError, match=r"spans must be int32\[B, P\] with B = 1"):
        run(spans=jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(UsageError, match="cacheable_spans must be True or False"):
        run(spans=[[1, 1, -1]], cacheable_spans=1)
    with pytest.raises(UsageError, match="max_span must be a static int"):
        run(spans=[[1, 1, -1]], max_span=0)
    with pytest.raises(UsageError, match="spans must be None for beam_search"):
        jkv.beam_search(
            attention_model,
            attention_params(),
            make_cache(),
            Prompts.of([[1, 2, 3]], spans=[[1, 1, -1]]),
            num_beams=2,
            max_new_tokens=2,
        )
    _, found = run(spans=[[3, -1, -1]])
    assert found.reasons.tolist() == [FinishReason.MALFORMED_PROMPT]


@pytest.mark.one_end
def test_the_vocabulary_is_the_models():
    assert all(max(prompt) < VOCABULARY for prompt in PROMPTS)
