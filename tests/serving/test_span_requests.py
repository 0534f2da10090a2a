"""Requests with spans in the engine: batching, prefix caching, parking."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.models.small_attention_model import (
    DIM,
    HEADS,
    VOCABULARY,
    attention_model,
    attention_params,
    continue_densely,
)

import jkv
from jkv.decoding import FinishReason
from jkv.serving import Engine, RequestRefused

NEW = 5
PROMPTS = [[8, 9, 14, 18, 0, 2, 15, 18, 4, 5, 16, 8], [4, 11, 9, 2, 7], [3, 1, 2]]
SPANS = [[-1, -1, 7, 7, 7, 7, 7, 7] + [-1] * 4, [4] * 5, None]


def make_engine(num_blocks=24, params=None, **options):
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=8,
        max_context_length=32,
        prefix_caching=True,
    )
    fields = dict(
        max_running=2,
        max_new_tokens=NEW,
        max_prompt_tokens=24,
        num_steps=3,
        row_counts=(2, 8),
        max_span=8,
        checks=True,
    )
    cache = jkv.init(config)
    params = params or attention_params()
    return Engine(attention_model, params, cache, **(fields | options))


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests, compiled once."""
    return make_engine()


def run(engine, prompts, spans, **fields):
    numbers = [
        engine.submit(prompt, spans=ends, **fields)
        for prompt, ends in zip(prompts, spans, strict=True)
    ]
    while not engine.is_idle:
        engine.step()
    return [engine.results(number)[0] for number in numbers]


@pytest.mark.newest_further
def test_requests_with_and_without_spans_share_a_batch(engine):
    for _ in range(2):  # the second time beside cached blocks
        found = run(engine, PROMPTS * 2, SPANS * 2)
        for result, prompt, ends in zip(found, PROMPTS * 2, SPANS * 2, strict=True):
            expected = continue_densely(prompt, ends or ())
            assert list(result.tokens) == expected


@pytest.mark.one_end
def test_private_spans_are_not_shared(engine):
    """The same ids without a span, or in another span, have other keys."""
    prompt = PROMPTS[0]
    for ends in (SPANS[0], None, [5] * 6 + [-1] * 6, SPANS[0]):
        (result,) = run(engine, [prompt], [ends])
        assert list(result.tokens) == continue_densely(prompt, ends or ())


@pytest.mark.one_end
def test_a_parked_request_continues_with_its_spans(engine):
    number = engine.submit(PROMPTS[1], spans=SPANS[1])
    engine.park(number)
    while not engine.is_idle:
        engine.step()
    first = list(engine.results(number)[0].tokens)
    more = [7, 1, 12, 3]
    again = engine.resume(number, more, spans=[-1, 2, 2, -1])
    while not engine.is_idle:
        engine.step()
    sequence = [*PROMPTS[1], *first, *more]
    ends = [*SPANS[1], *[-1] * NEW, -1, 12, 12, -1]
    assert list(engine.results(again)[0].tokens) == continue_densely(sequence, ends)


@pytest.mark.further
@pytest.mark.one_end
def test_image_embeddings_are_rows_of_the_params():
    """Ids beyond the vocabulary select rows that `update_params` replaces."""

    def with_rows(seed):
        rows = np.random.default_rng(seed).normal(size=(4, HEADS * DIM))
        params, rows = attention_params(), jnp.asarray(rows, jnp.float32)
        return params | {"embedding": jnp.concatenate([params["embedding"], rows])}

    prompt = [5, *range(VOCABULARY, VOCABULARY + 4), 7]
    ends = [-1, 4, 4, 4, 4, -1]
    engine = make_engine(params=with_rows(0), extra_ids=4)
    for seed in (0, 1):
        params = with_rows(seed)
        if seed:
            engine.update_params(params, keep_cached=True)
        (result,) = run(engine, [prompt], [ends])
        expected = continue_densely(prompt, ends, params=params)
        assert list(result.tokens) == expected
    with pytest.raises(RequestRefused, match="must have token ids below 23"):
        engine.submit([VOCABULARY + 4])


@pytest.mark.one_end
def test_invalid_spans_are_refused_by_name(engine):
    prompt = PROMPTS[0]
    cases = {
        "spans must have an end below 12": [3] * 11,
        "spans must have an end below 12, or -1": [12] + [-1] * 11,
        "spans must be a list of ends": [0.5] * 12,
        "spans must have at most 8 tokens, got 9": [8] * 9 + [-1] * 3,
    }
    for message, ends in cases.items():
        with pytest.raises(RequestRefused, match=message):
            engine.submit(prompt, spans=ends)
    with pytest.raises(RequestRefused) as refused:
        engine.submit(prompt, spans=[8] * 9 + [-1] * 3)
    assert refused.value.reason == FinishReason.SPAN_TOO_LONG
    with pytest.raises(RequestRefused, match=r"pass Engine\(max_span=...\)"):
        make_engine(max_span=0).submit(prompt, spans=[-1] * 12)
