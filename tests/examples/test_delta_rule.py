"""Both forms of the gated delta rule, compared with a plain loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained.mixers.convolution import convolve_piece, convolve_token
from pretrained.mixers.delta_rule import (
    Tokens,
    correct_once,
    correct_piece,
    invert_unit_triangle,
)
from support.jax_versions import few

H, C, D, V = 3, 64, 16, 12

once = jax.jit(lambda memory, tokens: jax.lax.scan(correct_once, memory, tokens))
piece = jax.jit(correct_piece)


def draw_tokens(seed, rates, most=1.0):
    """Draw a state matrix and tokens in float64, with 1 or D decay rates per head."""
    generator = np.random.default_rng(seed)
    keys = generator.normal(size=(C, H, D))
    tokens = Tokens(
        queries=generator.normal(size=(C, H, D)) * D**-0.5,
        keys=keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        values=generator.normal(size=(C, H, V)),
        decays=-np.abs(generator.normal(size=(C, H, rates))),
        strengths=most * generator.uniform(size=(C, H)),
    )
    return generator.normal(size=(H, D, V)), tokens


def correct_plainly(memory, tokens):
    """Return the matrix after the tokens, and their outputs."""
    outputs = np.zeros((C, H, V))
    for t in range(C):
        for h in range(H):
            key, query = tokens.keys[t, h], tokens.queries[t, h]
            faded = memory[h] * np.exp(tokens.decays[t, h])[:, None]
            lacking = tokens.values[t, h] - key @ faded
            memory[h] = faded + tokens.strengths[t, h] * np.outer(key, lacking)
            outputs[t, h] = query @ memory[h]
    return memory, outputs


def as_float32(memory, tokens):
    return jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), (memory, tokens))


# The largest decays underflow many times over: neither form may overflow.
@pytest.mark.parametrize("rates", few([1, D], D))
@pytest.mark.parametrize(
    "scale, most", few([(0.01, 1.0), (1.0, 2.0), (200.0, 2.0)], (1.0, 2.0))
)
def test_both_forms_equal_a_plain_loop(rates, scale, most):
    memory, tokens = draw_tokens(rates, rates, most)
    tokens = tokens._replace(decays=tokens.decays * scale)
    expected = correct_plainly(memory.copy(), tokens)
    given = as_float32(memory, tokens)
    # The chunk's decays are differences of sums, rounded like the sums.
    tolerance = 1e-5 * max(1.0, scale)
    for got, limit in ((once(*given), 1e-5), (piece(*given), tolerance)):
        for array, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=0, atol=limit)
        # A missing token is detected.
        assert np.abs(got[1][:-1] - expected[1][1:]).max() > 0.1


@pytest.mark.one_end
def test_masked_tokens_have_no_effect():
    """With strength and decay 0, a token changes nothing, whatever its key."""
    memory, tokens = draw_tokens(5, 1)
    past = np.arange(C) >= 23
    tokens = tokens._replace(
        decays=np.where(past[:, None, None], 0, tokens.decays),
        strengths=np.where(past[:, None], 0, tokens.strengths),
    )
    expected = correct_plainly(memory.copy(), tokens)
    after, outputs = piece(*as_float32(memory, tokens))
    np.testing.assert_allclose(after, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs[:23], expected[1][:23], rtol=0, atol=1e-5)


@pytest.mark.one_end
def test_equal_keys_are_solved_accurately():
    """With equal keys, powers of the triangle reach 1e17, its inverse stays at 1."""
    memory, tokens = draw_tokens(6, 1)
    keys = np.broadcast_to(tokens.keys[:1], tokens.keys.shape)
    tokens = tokens._replace(
        keys=keys, decays=tokens.decays * 0, strengths=tokens.strengths * 0 + 1
    )
    expected = correct_plainly(memory.copy(), tokens)
    after, outputs = piece(*as_float32(memory, tokens))
    np.testing.assert_allclose(after, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs, expected[1], rtol=0, atol=1e-5)


@pytest.mark.one_end
def test_triangles_are_inverted():
    below = np.tril(np.random.default_rng(7).normal(size=(2, 8, 8)), -1)
    inverse = invert_unit_triangle(jnp.asarray(below, jnp.float32))
    np.testing.assert_allclose(
        inverse, np.linalg.inv(np.eye(8) + below), rtol=1e-4, atol=1e-4
    )


@pytest.mark.one_end
@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_chunked_convolution_equals_token_by_token(count):
    generator = np.random.default_rng(8)
    past, x = generator.normal(size=(3, 2, 5)), generator.normal(size=(9, 2, 5))
    weight = generator.normal(size=(2, 5, 4))
    past, x, weight = (jnp.asarray(a, jnp.float32) for a in (past, x, weight))
    x = x.at[count:].set(0)
    after, sums = convolve_piece(past, x, weight, jnp.int32(count))
    for i in range(count):
        window = np.concatenate([past, x[i : i + 1]])
        expected = np.einsum("khd,hdk->hd", window, weight)
        past, total = convolve_token(past, x[i], weight)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(sums[i], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(after, past)
