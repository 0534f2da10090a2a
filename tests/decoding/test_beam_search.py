"""Beam search: compared with plain Python, in tiny pools, and with invalid arguments.

`test_beam_parity.py` compares with transformers. One program serves nearly all tests
here: prompts are padded, and other sequences fill the pool.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding import plain_beam_search
from support.jax_versions import few
from test_generation import (
    CONTEXT,
    VOCABULARY,
    assert_as_before,
    attention_model,
    attention_params,
    dense_logits,
    fresh_cache,
    padded,
)

import jkv
from jkv.decoding import FinishReason
from jkv.decoding.beams.branches import assign_rows

NUM_PROMPTS, NUM_BEAMS, NEW_TOKENS = 4, 3, 6
STOPS = (3, 11)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8], [9, 7, 9, 3, 2, 3, 8, 4, 6]]
found_wrong = []


def checked_model(params, tokens, cache, batch, *, all_rows=False):
    """The attention model; `check` runs on the cache of each step."""

    def look(cache):
        try:
            jkv.check(cache)
        except Exception as error:
            found_wrong.append(error)

    jax.debug.callback(look, cache)
    return attention_model(params, tokens, cache, batch, all_rows=all_rows)


beam_search = jax.jit(
    jkv.beam_search,
    static_argnames=(
        "model",
        "num_beams",
        "max_new_tokens",
        "early_stopping",
        "num_return",
        "chunk_size",
    ),
)


def run(prompts, cache=None, penalty=1.0, stops=STOPS, params=None):
    """Search in the shared shapes; check the cache and return the result as arrays."""
    found_wrong.clear()
    before = fresh_cache(free_rows=12) if cache is None else cache
    after, result = beam_search(
        checked_model,
        attention_params() if params is None else params,
        before,
        padded(prompts, NUM_PROMPTS),
        num_beams=NUM_BEAMS,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=np.array(stops, np.int32),
        length_penalty=jnp.float32(penalty),
        num_return=NUM_BEAMS,
        chunk_size=8,
    )
    jax.effects_barrier()
    assert not found_wrong, found_wrong[0]
    assert_as_before(after, before)
    return jax.tree.map(np.asarray, result)


@functools.cache
def logprobs_after(tokens):
    logits = dense_logits(list(tokens)).astype(np.float64)
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def expected(prompt, penalty=1.0, stops=STOPS, **options):
    return plain_beam_search.search(
        lambda tokens: logprobs_after(tuple(tokens)),
        prompt,
        num_beams=NUM_BEAMS,
        max_new_tokens=options.pop("max_new_tokens", NEW_TOKENS),
        stop_tokens=stops,
        length_penalty=penalty,
        **options,
    )


def assert_found(result, i, wanted):
    """Assert the hypotheses and scores of prompt i."""
    lengths = result.lengths[i]
    hypotheses = [
        row[:n].tolist() for row, n in zip(result.tokens[i], lengths, strict=True)
    ]
    assert hypotheses == [tokens for _, tokens in wanted]
    past = np.arange(NEW_TOKENS) >= lengths[:, None]
    assert ((result.tokens[i] == -1) == past).all()
    np.testing.assert_allclose(
        result.scores[i], [score for score, _ in wanted], rtol=1e-4
    )


@pytest.mark.newest_further
@pytest.mark.parametrize("penalty", few([1.0, 0.0, 3.0], 3.0))
def test_beams_equal_plain_python(penalty):
    result = run(PROMPTS, penalty=penalty)
    for i, prompt in enumerate(PROMPTS):
        assert_found(result, i, expected(prompt, penalty))
    # Another penalty, or one more beam, finds other hypotheses.
    if penalty == 1.0:
        others = [expected(prompt, -1.0) for prompt in PROMPTS]
        assert any(
            wanted[0][1] != result.tokens[i, 0, : result.lengths[i, 0]].tolist()
            for i, wanted in enumerate(others)
        )


@pytest.mark.one_end
def test_a_search_ends_by_its_hypotheses_or_their_length():
    result = run(PROMPTS, stops=(-1, -1))
    assert result.reasons.tolist() == [FinishReason.LENGTH] * 4
    assert (result.lengths == NEW_TOKENS).all()
    stopped = run(PROMPTS, stops=(12, 11)).reasons
    assert set(stopped.tolist()) <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.one_end
def test_invalid_prompts_report_a_reason_and_no_tokens():
    long = list(range(1, 19)) * 2
    result = run([[], PROMPTS[0], long[: CONTEXT + 1]])
    assert result.reasons[0] == FinishReason.EMPTY_PROMPT
    assert result.reasons[2] == FinishReason.CONTEXT_FULL
    assert_found(result, 1, expected(PROMPTS[0]))
    for i in (0, 2):
        assert (result.lengths[i] == 0).all() and (result.tokens[i] == -1).all()
        assert (result.scores[i] == -np.inf).all()


@pytest.mark.one_end
def test_the_context_limits_a_hypothesis_like_a_limit():
    prompt = (PROMPTS[3] * 4)[: CONTEXT - 2]
    result = run([prompt])
    assert result.reasons[0] in (FinishReason.CONTEXT_FULL, FinishReason.STOP)
    assert_found(result, 0, expected(prompt, max_new_tokens=3))


@pytest.mark.one_end
def test_nan_logits_end_only_their_search():
    params = dict(attention_params())
    params["embedding"] = params["embedding"].at[6].set(jnp.nan)
    result = run([PROMPTS[0][:3], [6], [7, 8]], params=params)
    assert result.reasons[1] == FinishReason.NAN_LOGITS
    assert (result.lengths[1] == 0).all()


@pytest.mark.one_end
def test_waiting_for_blocks_and_rows_preserves_results():
    """Results in every pool large enough for one search equal those of a large pool."""
    rng = np.random.default_rng(0)
    restarts = out_of_blocks = 0
    for _ in range(8):
        prompts = [
            rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 20, 4)
        ]
        blocks, rows = int(rng.integers(5, 24)), int(rng.integers(3, 9))
        result = run(prompts, fresh_cache(blocks, rows))
        restarts += int(result.statistics.restarts)
        for i, prompt in enumerate(prompts):
            if result.reasons[i] == FinishReason.OUT_OF_BLOCKS:
                # Alone, a search needs a block per beam beside the shared ones.
                shared, longest = len(prompt) // 4, -(-(len(prompt) + NEW_TOKENS) // 4)
                assert shared + NUM_BEAMS * (longest - shared) > blocks
                out_of_blocks += 1
            else:
                assert_found(result, i, expected(prompt))
    assert restarts > 3 and out_of_blocks > 0


@pytest.mark.one_end
def test_the_rows_of_one_search_suffice_and_fewer_do_not():
    result = run(PROMPTS, fresh_cache(free_rows=NUM_BEAMS))
    for i, prompt in enumerate(PROMPTS):
        assert_found(result, i, expected(prompt))
    result = run(PROMPTS, fresh_cache(free_rows=NUM_BEAMS - 1))
    assert (result.reasons == FinishReason.OUT_OF_SEQUENCES).all()
    assert (result.lengths == 0).all()


@pytest.mark.one_end
def test_a_prompt_is_computed_once_and_shared():
    statistics = run(PROMPTS).statistics
    assert statistics.prompt_tokens == sum(map(len, PROMPTS))
    assert statistics.restarts == 0
    assert statistics.peak_blocks < 0.75 * statistics.unshared_peak_blocks


@pytest.mark.one_end
def test_the_first_child_keeps_its_parents_row():
    seq_ids = np.array([[7, 3, 5, 1], [0, 2, 4, 6]], np.int32)
    parents = np.array([[2, 2, 0, 2], [3, 1, 0, 2]], np.int32)
    rows = jax.jit(assign_rows)(seq_ids, parents)
    # Parents 1 and 3 of the first prompt have no child: rows 3 and 1 are spare.
    assert rows.tolist() == [[5, 3, 7, 1], [6, 2, 0, 4]]


@pytest.mark.one_end
@pytest.mark.parametrize(
    "options, text",
    [
        (dict(num_beams=0), "num_beams must be a static int of at least 1"),
        (dict(num_return=3), "num_return must be at most num_beams"),
        (dict(early_stopping="always"), 'True, False or "never"'),
        (dict(stop_tokens=np.zeros((2, 2), np.int32)), "shared by all prompts"),
        (dict(length_penalty=np.ones(2, np.float32)), "must be one number"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        jkv.beam_search(
            attention_model,
            attention_params(),
            fresh_cache(),
            [[1, 2]],
            **dict(num_beams=2, max_new_tokens=2) | options,
        )
