"""Loops over the folding model, each compiled once per kind of groups."""

import functools

import jax
import numpy as np

import jkv
from support.states.folding_model import MODELS, continue_prompt

NUM_NEW, ROWS = 11, 16  # of every step: each size is a program to compile
SHARED = [3, 1, 4, 1, 0, 2, 2, 1, 4, 3, 0, 3, 1, 1, 2, 0, 4, 2, 3]
# After the shared tokens, prompts end at a multiple, one before and one after it.
PROMPTS = [
    [*SHARED, 1, 2, 3, 4],
    [*SHARED, 4, 4, 1, 2, 0],
    [*SHARED, 0, 3, 2, 1, 1, 3],
    SHARED,
    [2, 1, 0],
    [*SHARED, 1, 2, 3, 4, 2, 2, 0, 1, 0, 3, 3],
]
STATIC = {
    jkv.generate: ("max_new_tokens", "max_running", "num_samples", "row_counts"),
    jkv.extend: "max_new_tokens",
    jkv.beam_search: ("max_new_tokens", "num_beams"),
}


@functools.cache
def _compile(loop, kind):
    return jax.jit(functools.partial(loop, MODELS[kind]), static_argnames=STATIC[loop])


def generate(kind, cache, prompts, **options):
    """Continue prompts, and check the cache."""
    given = dict(max_new_tokens=NUM_NEW, max_running=4, row_counts=(ROWS,)) | options
    run = _compile(jkv.generate, kind)
    cache, result = run(None, cache, padded(prompts), **given)
    for pool in pools_of(cache):
        jkv.check(pool)
    return cache, result


def extend(kind, num_new, cache, seq_ids, rows):
    """Continue sequences, each with its own padded tokens."""
    run = _compile(jkv.extend, kind)
    return run(None, cache, seq_ids, rows, max_new_tokens=num_new)


def beam_search(kind, num_new, cache, prompts):
    """Search with two beams for padded prompts."""
    run = _compile(jkv.beam_search, kind)
    return run(None, cache, prompts, num_beams=2, max_new_tokens=num_new)


def pools_of(cache):
    """Return the cache of each rank on the host."""
    return [cache] if cache.pools is None else jkv.split_pools(cache)


def expect(kind, prompts=PROMPTS, count=NUM_NEW):
    """Return the tokens that follow each prompt."""
    return np.array([continue_prompt(prompt, count, kind) for prompt in prompts])


def padded(prompts, width=32):
    """Pad prompts to one width, so that queues of equal length share a program."""
    rows = np.full((len(prompts), width), -1, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows
