"""Mamba 2 and short convolutions: both forms, compared with a plain loop in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained.mixers import mamba2, short_convolution
from pretrained.parts import StateSpace
from support.jax_versions import few

C = 16  # tokens of a chunk
SIZES = StateSpace(num_heads=4, head_dim=3, num_groups=2, state_dim=5)
CHANNELS = dict(x=(4, 3), b=(2, 5), c=(2, 5))
TOLERANCE = 2e-5


def draw(rng, shapes):
    return {n: rng.standard_normal(shape, np.float32) for n, shape in shapes.items()}


def draw_layer(rng):
    """Draw weights, a state and the inputs of a chunk."""
    sizes = {name: int(np.prod(shape)) for name, shape in CHANNELS.items()}
    weights = draw(rng, {f"mamba_{n}_taps": (sizes[n], 1, 4) for n in sizes})
    weights |= draw(rng, {f"mamba_{n}_taps_bias": (sizes[n],) for n in sizes})
    weights |= draw(rng, dict(mamba_rate=(4,), mamba_skip=(4,)))
    state = draw(rng, {f"past_{n}": (3, *shape) for n, shape in CHANNELS.items()})
    state |= draw(rng, dict(memory=(4, 3, 5)))
    inputs = draw(rng, {n: (C, *shape) for n, shape in CHANNELS.items()})
    return weights, state, inputs | {"step": rng.random((C, 4), np.float32)}


def follow_plainly(weights, state, inputs, count):
    """Return the state after `count` tokens and their outputs, token by token."""
    state = {name: array.astype(np.float64) for name, array in state.items()}
    outputs = np.zeros((count, 4, 3))
    for token in range(count):
        read = {}
        for name, shape in CHANNELS.items():
            window = [*state[f"past_{name}"], inputs[name][token]]
            taps = weights[f"mamba_{name}_taps"].reshape(*shape, 4)
            total = weights[f"mamba_{name}_taps_bias"].reshape(shape)
            total = total + sum(row * taps[..., i] for i, row in enumerate(window))
            read[name] = total / (1 + np.exp(-total))
            state[f"past_{name}"] = np.stack(window[1:])
        for head in range(4):
            step, value = inputs["step"][token, head], read["x"][head]
            kept = np.exp(-np.exp(weights["mamba_rate"][head]) * step)
            memory = kept * state["memory"][head]
            memory = memory + step * np.outer(value, read["b"][head // 2])
            state["memory"][head] = memory
            skipped = weights["mamba_skip"][head] * value
            outputs[token, head] = memory @ read["c"][head // 2] + skipped
    return state, outputs


@pytest.fixture(scope="module")
def layer():
    return draw_layer(np.random.default_rng(0))


@pytest.fixture(scope="module")
def read_piece(layer):
    return jax.jit(mamba2.Rules(SIZES, layer[0]).read_piece)


def cut(inputs, count):
    """Return inputs with zeros after the first tokens, as the fold passes them."""
    return {
        name: np.concatenate([rows[:count], np.zeros_like(rows[count:])])
        for name, rows in inputs.items()
    }


def scan(rules, *given):
    return jax.jit(lambda *given: jax.lax.scan(rules.read_token, *given))(*given)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE, rtol=TOLERANCE),
        actual,
        expected,
    )


@pytest.mark.parametrize("count", few([0, 1, 2, 7, C], 7))
def test_a_chunk_equals_token_by_token(layer, read_piece, count):
    weights, state, inputs = layer
    state_after, outputs = read_piece(state, cut(inputs, count), jnp.int32(count))
    expected_state, expected = follow_plainly(weights, state, inputs, count)
    assert_close(state_after, expected_state)
    assert_close(outputs[:count], expected)
    if not count:
        jax.tree.map(np.testing.assert_array_equal, state_after, state)


@pytest.mark.one_end
def test_the_single_token_rule(layer):
    weights, state, inputs = layer
    state_after, outputs = scan(mamba2.Rules(SIZES, weights), state, inputs)
    expected_state, expected = follow_plainly(weights, state, inputs, C)
    assert_close(state_after, expected_state)
    assert_close(outputs, expected)


@pytest.mark.one_end
def test_each_input_of_a_chunk_matters(layer, read_piece):
    """Each part of the state and each input changes an output or the new state."""
    _, state, inputs = layer
    whole = read_piece(state, inputs, jnp.int32(C))
    for name in state:
        other = read_piece(state | {name: state[name] + 1}, inputs, jnp.int32(C))
        assert np.abs(other[1] - whole[1]).max() > 100 * TOLERANCE, name
    for name, rows in inputs.items():
        moved = rows.copy()
        moved[-1] += 1
        after, outputs = read_piece(state, inputs | {name: moved}, jnp.int32(C))
        np.testing.assert_array_equal(outputs[:-1], whole[1][:-1])
        assert np.abs(outputs[-1] - whole[1][-1]).max() > 100 * TOLERANCE, name
        kept = "memory" if name == "step" else f"past_{name}"
        assert np.abs(after[kept] - whole[0][kept]).max() > 100 * TOLERANCE, name


@pytest.mark.one_end
def test_long_decays_are_not_differences_of_sums():
    """After tokens that erase the state, the last ones are as accurate as alone."""
    weights, state, inputs = draw_layer(np.random.default_rng(1))
    weights["mamba_rate"] = np.full(4, 9.0, np.float32)  # sums reach 100,000
    inputs["step"][-2:] = 1e-4
    rules = mamba2.Rules(SIZES, weights)
    after, outputs = jax.jit(rules.read_piece)(state, inputs, jnp.int32(C))
    assert_close((after, outputs), scan(rules, state, inputs))


@pytest.mark.parametrize("count", few([0, 1, 9, C], 9))
def test_chunked_convolutions(count):
    rng = np.random.default_rng(2)
    weights = draw(rng, dict(short_taps=(6, 1, 3), short_taps_bias=(6,)))
    state, inputs = draw(rng, dict(past=(2, 6))), draw(rng, dict(x=(C, 6)))
    rules = short_convolution.Rules(weights)
    after, outputs = rules.read_piece(state, cut(inputs, count), jnp.int32(count))

    tokens = np.concatenate([state["past"], inputs["x"]])
    taps, bias = weights["short_taps"][:, 0].T, weights["short_taps_bias"]
    expected = [(tokens[i : i + 3] * taps).sum(0) + bias for i in range(count)]
    assert_close(outputs[:count], np.reshape(expected, (count, 6)))
    np.testing.assert_array_equal(after["past"], tokens[count : count + 2])
    inputs = {"x": inputs["x"][:count]}
    state, by_token = jax.lax.scan(rules.read_token, state, inputs)
    assert_close(by_token, outputs[:count])
    np.testing.assert_array_equal(state["past"], after["past"])
