"""Assertions about a published library's model, adapted to the cache."""

import ast
import functools
from typing import NamedTuple

import jax
import numpy as np

import jkv
from jkv.serving import Engine
from support.paths import ROOT

PROMPTS = [[5, 9, 5, 9, 5, 9, 5, 3], [11, 7, 3]]
NEW_TOKENS, VOCABULARY = 9, 64
# Sizes of the tiny models.
LAYERS, HEADS, KV_HEADS, DIM, WIDTH, WINDOW = 2, 4, 2, 8, 32, 6


# Absolute, for logits of 0.3 to 6 in float32. The largest difference seen was 4e-6.
TOLERANCE = 1e-4


class Continuation(NamedTuple):
    """A library's greedy tokens after each prompt, and the logits that chose them."""

    tokens: list[list[int]]
    logits: list[np.ndarray]  # f32[NEW_TOKENS, V] each


def make_cache(**sizes):
    layers = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM)
    pool = dict(num_blocks=48, block_size=4, max_sequences=8, max_context_length=32)
    options = dict(dtype="float32", prefix_caching=True)
    return jkv.init(jkv.CacheConfig(**(layers | pool | options | sizes)))


def shake(params, size=0.5):
    """Add noise to every weight: fresh norms and zeros would hide faults.

    Embeddings are small, so that the layers choose the tokens if heads are tied to
    them.
    """
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(2)
    noisy = [
        leaf + size * rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
        for leaf in leaves
    ]
    noisy = [
        leaf * np.float32(0.05) if leaf.shape[0] == VOCABULARY else leaf
        for leaf in noisy
    ]
    return jax.tree.unflatten(tree, noisy)


def continue_by(step):
    """Return a `Continuation` by a library's own cached loop, one prompt at a time.

    Args:
        step: `step(state, tokens, start)` returns state and last logits, f32[V].
            The first state is None.
    """
    found = Continuation([], [])
    for prompt in PROMPTS:
        state, tokens, start, rows = None, [*prompt], 0, []
        while len(rows) < NEW_TOKENS:
            state, logits = step(state, np.asarray([tokens], np.int32), start)
            start += len(tokens)
            tokens = [int(np.argmax(logits))]
            rows.append(np.asarray(logits))
        found.tokens.append([int(row.argmax()) for row in rows])
        found.logits.append(np.stack(rows))
    return found


def assert_logits(model, params, wanted, **sizes):
    """Assert that logits of all sequences in one packed step equal the library's."""
    pairs = zip(PROMPTS, wanted.tokens, strict=True)
    sequences = [[*prompt, *tokens[:-1]] for prompt, tokens in pairs]
    lengths = np.asarray([len(each) for each in sequences], np.int32)
    cache, opened = jkv.allocate(make_cache(**sizes), np.zeros_like(lengths))
    rows = np.concatenate(sequences).astype(np.int32)
    cache, batch = jkv.append(cache, opened.seq_ids, lengths, capacity=len(rows))
    forward = jax.jit(functools.partial(model, all_rows=True))
    logits, _ = forward(params, rows, cache, batch)
    each = np.split(np.asarray(logits), np.cumsum(lengths)[:-1])
    for found, own in zip(each, wanted.logits, strict=True):
        found = found[-NEW_TOKENS:]
        np.testing.assert_allclose(found, own, rtol=0, atol=TOLERANCE)
        # Positions that are off by one have other logits.
        assert np.abs(found[1:] - own[:-1]).max(axis=-1).min() > 100 * TOLERANCE


def assert_serves(model, params, continuation, **sizes):
    """Assert that logits, generation, samples, hits and engine equal the library."""
    assert_logits(model, params, continuation, **sizes)
    wanted = continuation.tokens
    assert len({*map(tuple, wanted)}) == len(PROMPTS)
    assert max(len({*tokens}) for tokens in wanted) > 2
    limits = dict(max_new_tokens=NEW_TOKENS, row_counts=(12,))
    cache, found = jkv.jitted.generate(
        model, params, make_cache(**sizes), PROMPTS, num_samples=2, **limits
    )
    samples = [tokens for tokens in wanted for _ in range(2)]
    assert found.tokens.tolist() == samples
    # The prompts are cached now, and forks share them.
    cache, again = jkv.jitted.generate(
        model, params, cache, PROMPTS, num_samples=2, **limits
    )
    assert again.tokens.tolist() == samples
    assert int(again.statistics.cached_tokens) >= 4
    jkv.check(cache)
    options = dict(max_running=2, max_prompt_tokens=8, checks=True, **limits)
    with Engine(model, params, make_cache(**sizes), **options) as engine:
        served = engine.generate(PROMPTS)
    assert [each.tokens for each in served] == wanted


def assert_short(name, most=40):
    """Assert that the adapter's functions have under `most` lines of code."""
    tree = ast.parse((ROOT / "examples" / "under" / f"{name}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    lines = sum(node.end_lineno - node.body[0].end_lineno for node in functions)
    assert 0 < lines < most
