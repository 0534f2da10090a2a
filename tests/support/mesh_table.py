"""What is run on meshes: a call for each row of the table in docs/how-to/devices.md.

Each takes caches, prompts and weights, and returns arrays that are the same whatever
the devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.decoding import DraftModel, PromptLookup
from support.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    attention_model,
)

PROMPTS = np.array([[5, 9, 5, 9, 5], [11, 7, 3, 8, -1]], np.int32)
CONTINUATIONS = np.array([[3, 1, 4], [1, 5, -1]], np.int32)
NEW_TOKENS = 4
CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    num_blocks=16,
    block_size=4,
    max_sequences=6,
    max_context_length=16,
    dtype="float32",
)


def score(_caches, prompts, params):
    """Log-probabilities, without a cache."""
    return jkv.score(attention_model, params, prompts, CONTINUATIONS, config=CONFIG)


def score_gradient(caches, prompts, params):
    """Their derivative by the embedding."""

    def loss(embedding):
        return score(caches, prompts, params | {"embedding": embedding}).sum()

    return jax.grad(loss)(params["embedding"])


def extend(caches, prompts, params):
    """Two turns of two texts."""
    cache, opened = jkv.allocate(*caches, [0, 0])
    found = []
    for texts in (prompts, CONTINUATIONS):
        cache, result = jkv.extend(
            attention_model,
            params,
            cache,
            opened.seq_ids,
            texts,
            max_new_tokens=NEW_TOKENS,
        )
        found += [result.tokens, result.logprobs]
    return found


def beam_search(caches, prompts, params):
    """Two beams of each prompt."""
    _, result = jkv.beam_search(
        attention_model,
        params,
        *caches,
        prompts,
        num_beams=2,
        num_return=2,
        max_new_tokens=NEW_TOKENS,
        chunk_size=8,
    )
    return result.tokens, result.scores


def generate(caches, prompts, params, **options):
    """Continue both prompts at one time."""
    cache, result = jkv.generate(
        attention_model,
        params,
        caches[0],
        prompts,
        max_new_tokens=NEW_TOKENS,
        max_running=2,
        row_counts=(8,),
        **options,
    )
    return result.tokens, result.logprobs, jkv.num_free_blocks(cache)


def watched(caches, prompts, params):
    """The same in debug mode."""
    return generate([jkv.debug(caches[0])], prompts, params)


def draft(caches, prompts, params):
    """With guesses of a draft model, which is the model itself."""
    speculate = DraftModel(
        model=attention_model, params=params, cache=caches[1], num_tokens=2
    )
    return generate(caches, prompts, params, speculate=speculate)


def look_up(caches, prompts, params):
    """With guesses that are looked up."""
    speculate = PromptLookup(num_tokens=2, min_ngram=1, cost=1.0)
    return generate(caches, prompts, params, speculate=speculate)


def twice(caches, prompts, params):
    """The second time finds what the first left, and attends through a window."""
    cache, found = caches[0], []
    for _ in range(2):
        cache, result = jkv.generate(
            attention_model,
            params,
            cache,
            prompts,
            max_new_tokens=NEW_TOKENS,
            max_running=2,
            row_counts=(8,),
        )
        found += [result.tokens, result.logprobs, result.statistics.cached_tokens]
    return found


PLAYS = {
    "score": score,
    "score, its derivative": score_gradient,
    "extend": extend,
    "beam_search": beam_search,
    "generate": generate,
    "debug": watched,
    "DraftModel": draft,
    "PromptLookup": look_up,
    "int8": generate,
    "float8_e4m3fn": generate,
    "window and index": twice,
}
CHANGES = {
    "int8": {"dtype": "int8"},
    "float8_e4m3fn": {"dtype": "float8_e4m3fn"},
    "window and index": {"sliding_window": 6, "prefix_caching": True},
}


def make_caches(row, **where):
    """The caches that a row takes: one, or that of a draft model too."""
    config = dataclasses.replace(CONFIG, **CHANGES.get(row, {}))
    count = 0 if row.startswith("score") else 1 + (row == "DraftModel")
    return tuple(jkv.init(config, **where) for _ in range(count))


def run_row(row, caches, params):
    """What a row gives, on the host."""
    found = jax.jit(PLAYS[row])(caches, jnp.asarray(PROMPTS), params)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def assert_alike(row, found, wanted):
    """Integers are equal, and other numbers to float32's sums; some are not zero."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and theirs.any(), row
        if np.issubdtype(theirs.dtype, np.integer):
            np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-4)
