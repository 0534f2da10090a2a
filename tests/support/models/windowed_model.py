"""Models with or without windows, their completions by hand, and caches."""

import jax.numpy as jnp
import numpy as np

import jkv

VOCABULARY, WIDTH, WINDOW, NEW_TOKENS = 29, 6, 8, 30
MIXED = (WINDOW, None)  # by layer
SIZES = dict(num_kv_heads=1, head_dim=WIDTH, block_size=4, dtype="float32")
SIZES |= dict(max_context_length=48, num_layers=1)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1, 8]]
EMBEDDING = np.random.default_rng(3).standard_normal((VOCABULARY, WIDTH))
EMBEDDING = EMBEDDING.astype("float32")


def make_model(windows):
    """Return a model with one attention layer per window; values differ from keys."""

    def model(params, tokens, cache, batch, *, all_rows=False):
        params = jnp.asarray(params)
        given = rows = params[tokens][:, None]
        for layer, window in enumerate(windows):
            cache = jkv.write(cache, layer, batch, rows, jnp.flip(rows, axis=2))
            seen = jkv.attend(cache, layer, batch, rows, window=window, scale=-0.3)
            rows = rows + seen
        logits = (rows - 2 * given)[:, 0] @ params.T
        if all_rows:
            return logits, cache
        return logits[jnp.minimum(batch.last_rows, batch.num_rows - 1)], cache

    return model


def continue_by_hand(sequence, windows, num_tokens):
    """Return the greedy tokens after a prompt, one by one."""
    sequence = list(sequence)
    for _ in range(num_tokens):
        sequence.append(int(np.argmax(find_logits(sequence, windows))))
    return sequence[-num_tokens:]


def find_logits(sequence, windows):
    """Return the logits after a sequence."""
    rows = EMBEDDING[sequence]
    distance = np.subtract.outer(np.arange(len(sequence)), np.arange(len(sequence)))
    for window in windows:
        seen = (distance >= 0) & (distance < (window or len(sequence)))
        scores = np.where(seen, -0.3 * rows @ rows.T, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        rows = rows + weights @ np.flip(rows, axis=1)
    return (rows[-1] - 2 * EMBEDDING[sequence[-1]]) @ EMBEDDING.T


def expect(windows, prompts=PROMPTS, samples=1):
    """Return the expected generation with several samples per prompt."""
    sequences = [continue_by_hand(prompt, windows, NEW_TOKENS) for prompt in prompts]
    assert all(len(set(sequence)) > 5 for sequence in sequences)
    return [sequence for sequence in sequences for _ in range(samples)]


windowed_model, mixed_model = make_model([WINDOW]), make_model(MIXED)


def grouped_cache(held=(), num_blocks=(44, 20), prefix_caching=False):
    """Create a cache of two groups; other sequences reserve `held` tokens each.

    Beyond the window they hold blocks of the full layers only.
    """
    full, windowed = num_blocks
    sizes = SIZES | dict(max_sequences=10)
    config = jkv.GroupedConfig(
        groups=(
            jkv.CacheConfig(num_blocks=full, **sizes),
            jkv.CacheConfig(num_blocks=windowed, sliding_window=WINDOW, **sizes),
        ),
        layer_groups=(1, 0),
        prefix_caching=prefix_caching,
    )
    padding = [-1] * (6 - len(held))
    cache, opened = jkv.allocate(jkv.init(config), [*held, *padding])
    jkv.raise_for_status(opened.status)
    return cache


def count_free(cache):
    return [int(group.free_blocks.count) for group in cache.metadata.groups]
