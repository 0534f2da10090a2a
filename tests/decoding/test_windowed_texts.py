"""`generate` on a cache whose layers have a window, beside the same model in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

pytestmark = pytest.mark.one_end
VOCABULARY, WINDOW, SAMPLES, NEW_TOKENS = 29, 8, 3, 30
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1, 8]]
EMBEDDING = np.random.default_rng(3).standard_normal((VOCABULARY, 6)).astype("float32")


def model(params, tokens, cache, batch):
    """One layer of attention over a window, whose values differ from its keys."""
    rows = params[tokens][:, None]
    cache = jkv.write(cache, 0, batch, rows, jnp.flip(rows, axis=2))
    seen = jkv.attend(cache, 0, batch, rows, window=WINDOW, scale=-0.3)
    logits = (seen - rows)[:, 0] @ params.T
    return logits[jnp.minimum(batch.last_rows, batch.num_rows - 1)], cache


def continue_by_hand(text, window):
    """The likeliest tokens after a prompt, one after the other."""
    for _ in range(NEW_TOKENS):
        rows = EMBEDDING[text]
        scores = -0.3 * rows[-window:] @ rows[-1]
        weights = np.exp(scores - scores.max())
        seen = weights / weights.sum() @ np.flip(rows[-window:], axis=1)
        text = [*text, int(np.argmax((seen - rows[-1]) @ EMBEDDING.T))]
    return text[-NEW_TOKENS:]


def test_texts_outgrow_the_pool():
    """Nine blocks hold 36 tokens; two texts of up to 42 run in them at a time.

    The third sample gets a place when its prompt has left the window of the first two:
    it computes the prompt again.
    """
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=6,
        num_blocks=9,
        block_size=4,
        max_sequences=4,
        max_context_length=48,
        dtype="float32",
        sliding_window=WINDOW,
    )
    cache, found = jax.jit(
        lambda params, cache: jkv.generate(
            model,
            params,
            cache,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            num_samples=SAMPLES,
            max_running=2,
            chunk_size=4,
        )
    )(EMBEDDING, jkv.init(config))
    jkv.check(cache)
    assert int(jkv.num_free_blocks(cache)) == 9
    expected = [continue_by_hand(prompt, WINDOW) for prompt in PROMPTS]
    assert all(len(set(text)) > 5 for text in expected)
    assert expected != [continue_by_hand(prompt, WINDOW + 1) for prompt in PROMPTS]
    assert found.tokens.tolist() == [text for text in expected for _ in range(SAMPLES)]
    assert found.statistics.prompt_tokens > sum(map(len, PROMPTS))
