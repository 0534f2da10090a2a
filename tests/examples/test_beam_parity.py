"""Beam search returns the hypotheses and scores of transformers, in a batch.

The results of transformers are committed; if it is installed, they are recomputed.
"""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.checkpoints import beam_fixtures as fixtures
from support.checkpoints import checkpoint_fixtures as checkpoints
from support.jax_versions import with_further

import jkv

HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("transformers", "torch")))
if os.environ.get("JKV_REQUIRE_PARITY") and not HAS_TRANSFORMERS:
    raise ImportError("JKV_REQUIRE_PARITY is set, but transformers or torch is missing")

# Relative; the largest observed difference was 2e-6, a penalty off by 0.01 gives 1e-2.
TOLERANCE = 1e-4


@pytest.mark.further
@pytest.mark.one_end
@pytest.mark.parametrize(
    "search",
    with_further(fixtures.SEARCHES, *fixtures.SEARCHES[1:]),
    ids=lambda case: case.name,
)
def test_beams_equal_transformers(search):
    wanted = json.loads(fixtures.FIXTURE.read_text())[search.name]
    if HAS_TRANSFORMERS:
        live = fixtures.expected(search)
        for ours, theirs in zip(wanted["found"], live["found"], strict=True):
            assert ours["sequences"] == theirs["sequences"]
    folder = checkpoints.checkpoint_folder(search.name)
    model, params = pretrained.load(folder, scan_layers=True)
    params = jax.tree.map(lambda weights: weights.astype(jnp.float32), params)
    prompts, width = wanted["prompts"], search.num_beams
    cache = jkv.init(
        jkv.CacheConfig(
            **model.cache_fields,
            num_blocks=200,
            block_size=4,
            max_sequences=len(prompts) * width,
            max_context_length=64,
            dtype=jnp.float32,
        )
    )
    find = jax.jit(
        lambda params, cache, penalty: jkv.beam_search(
            model,
            params,
            cache,
            prompts,
            num_beams=width,
            max_new_tokens=fixtures.NEW_TOKENS,
            stop_tokens=wanted["stops"],
            length_penalty=penalty,
            early_stopping=search.early_stopping,
            num_return=width,
        )
    )
    for penalty, found in zip(search.penalties, wanted["found"], strict=True):
        after, result = find(params, cache, jnp.float32(penalty))
        jkv.check(after)
        lengths = np.asarray(result.lengths).reshape(-1)
        tokens = np.asarray(result.tokens).reshape(len(lengths), -1)
        sequences = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        assert sequences == found["sequences"]
        if found["scores"] is not None:
            scores = np.asarray(result.scores).reshape(-1)
            np.testing.assert_allclose(scores, found["scores"], rtol=TOLERANCE)
