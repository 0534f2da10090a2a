"""Trees of texts: each distinct token once, the same numbers as text by text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    attention_model,
    attention_params,
    dense_rows,
)

import jkv

CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    block_size=4,
    num_blocks=1,
    max_sequences=1,
    max_context_length=1,
)
# Two roots; segments of none, of one that stay inside a block, of several blocks; a
# chain of five; siblings that begin in the middle of a block and at its end.
SEGMENTS = [
    ([3, 1, 4, 1, 5, 9], -1),
    ([2, 6], 0),
    ([5], 1),
    ([], 1),
    ([3, 5, 8, 9, 7, 9, 3, 2, 3], 2),
    ([8, 4], 3),
    ([6], 2),
    ([2, 6, 4, 3, 3], -1),
    ([8, 3, 2], 7),
    ([7, 9, 5, 0, 2], 7),
    ([8, 8], 4),
    ([4, 1, 9, 7, 1, 6], 0),
]
TEXTS, PARENTS = (list(each) for each in zip(*SEGMENTS, strict=True))
LENGTHS = [len(text) for text in TEXTS]
NUM_TOKENS = sum(LENGTHS)
TREE = jkv.TextTree.of(TEXTS, PARENTS)

score = functools.partial(jkv.score, attention_model, config=CONFIG)


def branch(segment):
    """The segments of a text, from its root on."""
    path = []
    while segment >= 0:
        path.insert(0, segment)
        segment = PARENTS[segment]
    return path


def dense_scores(params, xp=np):
    """Each segment's text alone: a list for each segment, NaN for what begins one."""
    width = 1 + max(len(jkv.trees.read_text(TREE, s)) for s in range(len(TEXTS)))
    texts = np.zeros((len(TEXTS), width), np.int32)
    for segment, row in enumerate(texts):
        text = sum((TEXTS[each] for each in branch(segment)), [])
        row[: len(text)] = text
    run = functools.partial(dense_rows, params, xp=xp)
    logits = jax.vmap(run)(texts) if xp is jnp else np.stack([run(t) for t in texts])
    normalised = logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))
    found = []
    for segment, own in enumerate(TEXTS):
        before = sum(LENGTHS[each] for each in branch(segment)[:-1])
        scores = [
            normalised[segment, before + i - 1, token] if before + i else xp.float32(0)
            for i, token in enumerate(own)
        ]
        found.extend(scores)
    return xp.stack(found)


ROOT_ROWS = [0, sum(LENGTHS[:7])]
WEIGHTS = np.cos(np.arange(NUM_TOKENS, dtype=np.float32))
WEIGHTS[ROOT_ROWS] = 0


def weigh(scores):
    """A loss in which each token counts differently, as advantages do."""
    return jnp.where(WEIGHTS != 0, scores * WEIGHTS, 0.0).sum()


@functools.cache
def expected_gradient():
    params = attention_params()
    return jax.jit(jax.grad(lambda p: weigh(dense_scores(p, jnp))))(params)


def assert_same_gradients(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = np.abs(other).max()
        assert scale > 1e-2
        np.testing.assert_allclose(one, other, atol=1e-5 * scale, rtol=0)


@pytest.mark.one_end
def test_scores_and_gradients_equal_a_dense_model():
    """Of a tree whose numbers only the run knows."""
    params = attention_params()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, tree):
        scores = score(params, tree)
        return weigh(scores), scores

    (_, scores), gradient = jax.jit(loss)(params, TREE)
    assert np.flatnonzero(np.isnan(scores)).tolist() == ROOT_ROWS
    expected = dense_scores(jax.device_get(params))
    known = WEIGHTS != 0
    np.testing.assert_allclose(scores[known], expected[known], atol=2e-5)
    assert_same_gradients(gradient, expected_gradient())
