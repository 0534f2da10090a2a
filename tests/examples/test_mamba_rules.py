"""Mamba 2 and short convolutions: both forms against a plain loop in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained.mixers import mamba2, short_convolution
from pretrained.parts import StateSpace

C = 16  # tokens of a chunk
# Four heads in two groups, and steps that both limits cut.
SIZES = StateSpace(
    num_heads=4,
    head_dim=3,
    num_groups=2,
    state_dim=5,
    window=4,
    step_limits=(0.2, 1.5),
)
TOLERANCE = 2e-5


def draw(rng, shapes, dtype=np.float32):
    return {
        name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()
    }


def draw_layer(rng):
    """Return weights, a state and the inputs of a chunk."""
    window, channels = (SIZES.window,), dict(x=(4, 3), b=(2, 5), c=(2, 5))
    weights = draw(rng, {f"conv_{n}": window + shape for n, shape in channels.items()})
    weights |= draw(rng, {f"conv_{n}_bias": shape for n, shape in channels.items()})
    weights |= draw(rng, dict(decay=(4,), step_bias=(4,), skip=(4,)))
    state = draw(rng, {f"past_{n}": (3, *shape) for n, shape in channels.items()})
    state |= draw(rng, dict(memory=(4, 3, 5)))
    inputs = draw(rng, {n: (C, *shape) for n, shape in channels.items()})
    return weights, state, inputs | draw(rng, dict(dt=(C, 4)))


def follow_plainly(weights, state, inputs, count):
    """Return the state after `count` tokens and their outputs, token by token."""
    state = {name: array.astype(np.float64) for name, array in state.items()}
    outputs = []
    for token in range(count):
        read = {}
        for name in "xbc":
            window = [*state[f"past_{name}"], inputs[name][token]]
            total = weights[f"conv_{name}_bias"] + sum(
                row * kernel
                for row, kernel in zip(window, weights[f"conv_{name}"], strict=True)
            )
            read[name] = total / (1 + np.exp(-total))
            state[f"past_{name}"] = np.stack(window[1:])
        steps = np.log1p(np.exp(inputs["dt"][token] + weights["step_bias"]))
        steps = np.minimum(np.maximum(steps, 0.2), 1.5)
        output = np.zeros((4, 3))
        for head in range(4):
            group = head // 2
            kept = np.exp(-np.exp(weights["decay"][head]) * steps[head])
            value = read["x"][head]
            memory = kept * state["memory"][head]
            memory = memory + steps[head] * np.outer(value, read["b"][group])
            state["memory"][head] = memory
            output[head] = memory @ read["c"][group] + weights["skip"][head] * value
        outputs.append(output)
    return state, np.stack(outputs) if outputs else np.zeros((0, 4, 3))


@pytest.fixture(scope="module")
def layer():
    return draw_layer(np.random.default_rng(0))


@pytest.fixture(scope="module")
def chunk_rule(layer):
    return jax.jit(mamba2.make_rules(SIZES, layer[0])[1])


def spoil(inputs, count):
    """Return inputs with NaN behind their tokens."""
    late = np.arange(C) >= count
    return {
        name: np.where(np.expand_dims(late, tuple(range(1, rows.ndim))), np.nan, rows)
        for name, rows in inputs.items()
    }


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE, rtol=TOLERANCE),
        actual,
        expected,
    )


@pytest.mark.parametrize("count", [0, 1, 2, 7, C])
def test_a_chunk_is_its_tokens_one_by_one(layer, chunk_rule, count):
    weights, state, inputs = layer
    state_after, outputs = chunk_rule(state, spoil(inputs, count), jnp.int32(count))
    expected_state, expected = follow_plainly(weights, state, inputs, count)
    assert_close(state_after, expected_state)
    assert_close(outputs[:count], expected)
    if not count:
        jax.tree.map(np.testing.assert_array_equal, state_after, state)


def test_the_rule_of_one_token(layer):
    weights, state, inputs = layer
    rule = mamba2.make_rules(SIZES, weights)[0]
    state_after, outputs = jax.jit(lambda *given: jax.lax.scan(rule, *given))(
        state, inputs
    )
    expected_state, expected = follow_plainly(weights, state, inputs, C)
    assert_close(state_after, expected_state)
    assert_close(outputs, expected)


def test_what_a_chunk_depends_on(layer, chunk_rule):
    """Each part of the state and each input changes what comes out or stays."""
    _, state, inputs = layer
    whole = chunk_rule(state, inputs, jnp.int32(C))
    for name in state:
        other = chunk_rule(state | {name: state[name] + 1}, inputs, jnp.int32(C))
        assert np.abs(other[1] - whole[1]).max() > 100 * TOLERANCE, name
    for name, rows in inputs.items():
        moved = rows.copy()
        moved[-1] += 1
        after, outputs = chunk_rule(state, inputs | {name: moved}, jnp.int32(C))
        np.testing.assert_array_equal(outputs[:-1], whole[1][:-1])
        assert np.abs(outputs[-1] - whole[1][-1]).max() > 100 * TOLERANCE, name
        kept = "memory" if name == "dt" else f"past_{name}"
        assert np.abs(after[kept] - whole[0][kept]).max() > 100 * TOLERANCE, name


def test_a_long_decay_is_not_a_difference_of_sums():
    """Behind tokens that forget everything, the last ones are as exact as alone."""
    rng = np.random.default_rng(1)
    weights, state, inputs = draw_layer(rng)
    weights["decay"] = np.full(4, 9.0, np.float32)  # sums of a chunk reach 100,000
    inputs["dt"][-2:] = -9.0
    sizes = StateSpace(
        num_heads=4, head_dim=3, num_groups=2, state_dim=5, window=4, step_limits=(0, 9)
    )
    rule, chunk_rule = mamba2.make_rules(sizes, weights)
    after, outputs = jax.jit(chunk_rule)(state, inputs, jnp.int32(C))
    expected = jax.jit(lambda *given: jax.lax.scan(rule, *given))(state, inputs)
    assert_close((after, outputs), expected)


@pytest.mark.parametrize("count", [0, 1, 9, C])
def test_convolutions_of_a_chunk(count):
    rng = np.random.default_rng(2)
    kernel, bias = draw(rng, dict(kernel=(3, 6), bias=(6,))).values()
    state, inputs = draw(rng, dict(past=(2, 6))), draw(rng, dict(row=(C, 6)))
    rule, chunk_rule = short_convolution.make_rules(kernel, bias)
    after, outputs = chunk_rule(state, spoil(inputs, count), jnp.int32(count))

    tokens = np.concatenate([state["past"], inputs["row"]])
    expected = [(tokens[i : i + 3] * kernel).sum(0) + bias for i in range(count)]
    assert_close(outputs[:count], np.reshape(expected, (count, 6)))
    np.testing.assert_array_equal(after["past"], tokens[count : count + 2])
    for token in range(count):
        row = {"row": inputs["row"][token]}
        state, output = rule(state, row)
        np.testing.assert_array_equal(output, outputs[token])
    np.testing.assert_array_equal(state["past"], after["past"])


def test_forms_agree_in_half_precision():
    """Both round what the convolution lets through, and nothing else."""
    rng = np.random.default_rng(3)
    weights, state, inputs = draw_layer(rng)
    half = {name: jnp.asarray(rows, jnp.bfloat16) for name, rows in inputs.items()}
    rule, chunk_rule = mamba2.make_rules(SIZES, weights)
    after, outputs = jax.jit(chunk_rule)(state, half, jnp.int32(C))
    expected = jax.jit(lambda *given: jax.lax.scan(rule, *given))(state, half)
    assert outputs.dtype == after["memory"].dtype == jnp.float32
    assert_close((after, outputs), expected)
