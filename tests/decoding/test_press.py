"""Prompt compression: scores compared with kvpress 0.5.5, and token selection."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import press
from jkv.status import UsageError

pytestmark = pytest.mark.one_end
# Written by `tests/support/caches/kvpress_selections.py`, from a tiny random Llama.
FILE = pathlib.Path(__file__).parents[1] / "fixtures" / "kvpress.npz"
NUM_KEPT = 36


def rotate(rows, positions):
    """Apply a Llama's RoPE with theta 10,000 to rows [P, D]."""
    half = rows.shape[-1] // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / half
    angles = positions[:, None].astype(jnp.float32) * (10_000.0**-exponents)[None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = rows[:, :half], rows[:, half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


RULES = {
    "streaming_llm": press.streaming_llm(4),
    "knorm": press.knorm(),
    "key_diff": press.key_diff(),
    "snap_kv": press.snap_kv(8, 5),
    "expected_attention": press.expected_attention(32, 4, rotate=rotate),
}


@pytest.fixture(scope="module")
def found():
    return dict(np.load(FILE))


def select(found, name, more=0):
    """Return the tokens kept in each layer and head, with `more` rows of padding."""
    layers = found["keys"].shape[0]
    keys, values = (
        jnp.pad(found[each], ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=9.0)
        for each in ("keys", "values")
    )
    queries = {
        "snap_kv": jnp.asarray(found["queries"]),
        "expected_attention": press.QueryMoments(
            jnp.asarray(found["mean"]), jnp.asarray(found["covariance"])
        ),
    }.get(name)
    lengths = jnp.full((layers,), found["keys"].shape[1], jnp.int32)
    # Layers stand for sequences: a rule scores one layer of several sequences.
    scores = RULES[name].scores(keys, values, queries, lengths)
    return np.asarray(jkv.top_tokens(scores, NUM_KEPT, lengths, NUM_KEPT + 2))


@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("name", RULES)
def test_rules_keep_the_tokens_of_kvpress(found, name, more):
    kept = select(found, name, more)
    np.testing.assert_array_equal(kept[..., :NUM_KEPT], found[f"kept_{name}"])
    # Entries after the kept ones are out of range.
    assert np.all(kept[..., NUM_KEPT:] == found["keys"].shape[1] + more)


def test_rules_differ(found):
    """No two rules keep the same tokens, so the comparison can fail."""
    kept = [found[f"kept_{name}"].tobytes() for name in RULES]
    assert len(set(kept)) == len(kept)


def test_top_tokens_keep_the_highest_scores_in_order():
    scores = jnp.asarray([[5.0, 1.0, 5.0, jnp.nan, 7.0], [0.0, 3.0, 2.0, 1.0, 9.0]])
    kept = jkv.top_tokens(scores, [2, 4], [5, 4], 6)
    assert kept.tolist() == [[0, 4, 5, 5, 5, 5], [0, 1, 2, 3, 5, 5]]
    assert jkv.top_tokens(scores, 3, [2, 0], 3).tolist() == [[0, 1, 5], [5, 5, 5]]
    jitted = jax.jit(jkv.top_tokens, static_argnums=3)(scores, 1, 5, 1)
    assert jitted.tolist() == [[4], [4]]


def test_scores_feed_prune():
    """A custom rule is a method; padding after the kept slots is ignored."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=2,
        head_dim=2,
        num_blocks=8,
        block_size=4,
        max_sequences=2,
        max_context_length=16,
        dtype="float32",
        pruning=True,
    )
    cache, _ = jkv.allocate(jkv.init(config), [0])
    cache, batch = jkv.append(cache, [0], [6], capacity=6)
    rows = jnp.arange(24.0).reshape(6, 2, 2)
    cache = jkv.write(cache, 0, batch, rows, rows)
    keys, values, length = jkv.read(cache, 0, 0)

    class EverySecond:
        def scores(self, keys, _values, _queries, _lengths):
            even = (jnp.arange(keys.shape[1]) % 2 == 0).astype(jnp.float32)
            return jnp.broadcast_to(even, (1, 2, keys.shape[1]))

    scores = EverySecond().scores(keys[None], values[None], None, length[None])
    kept = jkv.top_tokens(scores, 3, length, 5)
    cache, status = jkv.prune(cache, 0, kept[:, None], 3)
    assert status.tolist() == [0]
    np.testing.assert_array_equal(jkv.read(cache, 0, 0)[0][:3], rows[::2])


def test_moments_of_observed_queries_equal_those_of_unrotated_ones():
    """Sinks, and queries before the start of a short sequence, are excluded."""
    width, sinks, lengths = 12, 2, np.int32([12, 7])
    plain = np.random.default_rng(3).standard_normal((2, width, 4, 8), np.float32)
    positions = lengths[:, None] - width + np.arange(width)
    plain[positions < 0] = 0
    each = np.broadcast_to(positions[..., None], plain.shape[:3]).astype(np.int32)
    rotated = rotate(jnp.asarray(plain.reshape(-1, 8)), jnp.asarray(each.reshape(-1)))
    queries = rotated.reshape(plain.shape)
    found = press.QueryMoments.of(queries, jnp.asarray(lengths), sinks, rotate)
    for i, length in enumerate(lengths):
        rows = plain[i, width - length + sinks :].swapaxes(0, 1)  # [H, n, D]
        np.testing.assert_allclose(found.mean[i], rows.mean(1), atol=1e-6)
        covariance = [np.cov(each.T, bias=True) for each in rows]
        np.testing.assert_allclose(found.covariance[i], covariance, atol=1e-5)
    keys = jnp.ones((2, width, 2, 8))
    rule = RULES["expected_attention"]
    given = rule.scores(keys, keys, queries, jnp.asarray(lengths))
    moments = press.QueryMoments.of(queries, jnp.asarray(lengths), rule.sinks, rotate)
    expected = rule.scores(keys, keys, moments, jnp.asarray(lengths))
    np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: press.snap_kv(0), "window"),
        (lambda: press.snap_kv(4, 4), "kernel must be odd"),
        (lambda: press.streaming_llm(-1), "sinks"),
        (lambda: RULES["snap_kv"].scores(*ROWS, None, ONE), "snap_kv needs queries"),
        (lambda: RULES["snap_kv"].scores(*ROWS, jnp.zeros((1, 3, 2, 4)), ONE), "8"),
        (
            lambda: press.expected_attention().scores(*ROWS, None, ONE),
            "expected_attention needs rotate= and queries",
        ),
        (lambda: jkv.top_tokens(jnp.zeros((1, 3)), 1, 1, 0), "max_kept"),
    ],
)
def test_missing_inputs_are_refused_by_name(call, message):
    with pytest.raises(UsageError, match=message):
        call()


ROWS, ONE = (jnp.zeros((1, 9, 2, 4)), jnp.zeros((1, 9, 2, 4))), jnp.int32([9])


@pytest.mark.parametrize("name", RULES)
def test_rules_keep_their_types_under_x64(found, name):
    with jax.enable_x64(True):
        kept = select(found, name)
    assert kept.dtype == np.int32
    np.testing.assert_array_equal(kept[..., :NUM_KEPT], found[f"kept_{name}"])
