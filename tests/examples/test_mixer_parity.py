"""Layers with a state against the modules of transformers, on random weights.

The modules compute whole texts, as their models do without a cache.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained.mixers import mamba2, short_convolution
from pretrained.parts import StateSpace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOLERANCE = 2e-5
HIDDEN, EPSILON, LENGTH = 24, 1e-3, 40
SIZES = dict(num_heads=6, head_dim=8, num_groups=2, state_dim=5, window=4)

MAMBA = dict(
    mamba_n_heads=6,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_d_state=5,
    mamba_chunk_size=16,
    rms_norm_eps=EPSILON,
)
FALCON = MAMBA | dict(
    mamba_d_ssm=48,
    ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.9],
    ssm_in_multiplier=1.25,
    mamba_rms_norm=True,
)
FALCON_SCALES = dict(scales=(0.7, 1.3, 0.8, 1.2, 0.9), input_scale=1.25)
PLAIN = dict(num_heads=6, head_dim=8, n_groups=2, state_size=5, layer_norm_epsilon=1e-3)

# What the module is made of, and what its layer is here.
CASES = {
    "bamba": ("bamba", "BambaConfig", "BambaMixer", MAMBA, {}),
    "granite": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridMambaLayer",
        MAMBA | dict(mamba_proj_bias=True, time_step_limit=[0.1, 1.0]),
        dict(has_bias=True, has_output_bias=True, step_limits=(0.1, 1.0)),
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHMamba2Mixer",
        dict(
            mamba_num_heads=6,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=5,
            time_step_min=0.5,
            layer_norm_epsilon=EPSILON,
            layers_block_type=["linear_attention"],
        ),
        dict(step_limits=(0.5, float("inf"))),
    ),
    "mamba2": (
        "mamba2",
        "Mamba2Config",
        "Mamba2Mixer",
        PLAIN | dict(use_conv_bias=False),
        dict(has_conv_bias=False),
    ),
    "falcon_h1": (
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        FALCON | dict(mamba_norm_before_gate=True),
        FALCON_SCALES | dict(norm="before"),
    ),
    "falcon_h1_after": (
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        FALCON | dict(mamba_norm_before_gate=False),
        FALCON_SCALES | dict(norm="after"),
    ),
    "falcon_h1_without": (
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        FALCON | dict(mamba_rms_norm=False),
        FALCON_SCALES | dict(norm=None),
    ),
}


def make_module(folder, config_name, name, settings):
    """Return a module of transformers with random weights, and those in numpy."""
    path = f"transformers.models.{folder}."
    modeling = importlib.import_module(f"{path}modeling_{folder}")
    configuration = importlib.import_module(f"{path}configuration_{folder}")
    config = getattr(configuration, config_name)(hidden_size=HIDDEN, **settings)
    torch.manual_seed(0)
    module = getattr(modeling, name)(config, layer_idx=0).eval()
    if folder == "falcon_h1":
        module.register_buffer("mup_vector", modeling.compute_mup_vector(config))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module, {n: p.detach().numpy() for n, p in module.named_parameters()}


def cut_weights(sizes, given):
    """Return the weights of a layer here, cut out of the module's."""
    heads, inner = sizes.num_heads, sizes.num_heads * sizes.head_dim
    shared = sizes.num_groups * sizes.state_dim
    ends = np.cumsum([inner, inner, shared, shared, heads])
    weights = {
        f"mixer_{name}{suffix}": part
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
        if f"in_proj.{kind}" in given
        for name, part in zip(
            ("gate", "x", "b", "c", "dt"),
            np.split(given[f"in_proj.{kind}"], ends[:-1]),
            strict=True,
        )
    }
    shapes = dict(x=(heads, -1), b=(sizes.num_groups, -1), c=(sizes.num_groups, -1))
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        if f"conv1d.{kind}" in given:
            kernels = np.split(given[f"conv1d.{kind}"], ends[1:-2] - inner)
            for (name, shape), kernel in zip(shapes.items(), kernels, strict=True):
                kernel = kernel[:, 0].T if kernel.ndim > 1 else kernel
                shape = (*kernel.shape[:-1], *shape)
                weights[f"conv_{name}{suffix}"] = kernel.reshape(shape)
    names = dict(
        decay="A_log",
        step_bias="dt_bias",
        skip="D",
        mixer_norm="norm.weight",
        mixer_output="out_proj.weight",
        mixer_output_bias="out_proj.bias",
    )
    return weights | {n: given[name] for n, name in names.items() if name in given}


def measure_error(actual, expected):
    """Return the largest difference, relative to the largest number expected."""
    return np.abs(actual - expected).max() / np.abs(expected).max()


def wrong_sizes(sizes):
    """Yield mistakes that a layer shows."""
    for wrong in (dict(norm="before"), dict(norm="after"), dict(norm=None)):
        if wrong["norm"] != sizes.norm:
            yield dataclasses.replace(sizes, **wrong)
    if sizes.step_limits != (0.0, float("inf")):
        yield dataclasses.replace(sizes, step_limits=(0.0, float("inf")))
    if sizes.input_scale != 1:
        yield dataclasses.replace(sizes, input_scale=1.0)
        yield dataclasses.replace(sizes, scales=sizes.scales[::-1])


@pytest.mark.parametrize("case", CASES)
def test_mamba_layers(case):
    *names, settings, fields = CASES[case]
    module, given = make_module(*names, settings)
    sizes = StateSpace(**SIZES, **fields)
    weights = cut_weights(sizes, given)
    x = np.random.default_rng(1).standard_normal((LENGTH, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)[None])[0].numpy()

    gates, inputs = mamba2.project(sizes, weights, jnp.asarray(x))
    rule, chunk_rule = mamba2.make_rules(sizes, weights)
    past = dict(past_x=(3, 6, 8), past_b=(3, 2, 5), past_c=(3, 2, 5))
    state = {name: jnp.zeros(shape) for name, shape in past.items()}
    state["memory"] = jnp.zeros((6, 8, 5))
    _, in_chunk = jax.jit(chunk_rule)(state, inputs, jnp.int32(LENGTH))
    _, by_token = jax.jit(lambda *given: jax.lax.scan(rule, *given))(state, inputs)
    for outputs in (in_chunk, by_token):
        rows = mamba2.gather_heads(sizes, EPSILON, weights, outputs, gates)
        assert measure_error(rows, expected) < TOLERANCE
    if sizes.norm is None:
        weights["mixer_norm"] = np.ones(48, np.float32)
    for wrong in wrong_sizes(sizes):
        gates, inputs = mamba2.project(wrong, weights, jnp.asarray(x))
        _, outputs = mamba2.make_rules(wrong, weights)[1](
            state, inputs, jnp.int32(LENGTH)
        )
        rows = mamba2.gather_heads(wrong, EPSILON, weights, outputs, gates)
        assert measure_error(rows, expected) > 100 * TOLERANCE, wrong


def test_convolutions_between_gates():
    settings = dict(conv_L_cache=4, conv_bias=True, full_attn_idxs=[])
    module, given = make_module("lfm2", "Lfm2Config", "Lfm2ShortConv", settings)
    x = np.random.default_rng(1).standard_normal((LENGTH, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)[None])[0].numpy()

    weights = {
        f"mixer_{name}{suffix}": part
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
        for name, part in zip(
            ("first", "second", "row"),
            np.split(given[f"in_proj.{kind}"], 3),
            strict=True,
        )
    }
    gates, inputs = short_convolution.project(weights, jnp.asarray(x))
    rule = short_convolution.make_rules(
        given["conv.weight"][:, 0].T, given["conv.bias"]
    )[1]
    _, outputs = rule({"past": jnp.zeros((3, HIDDEN))}, inputs, jnp.int32(LENGTH))
    rows = (outputs * gates) @ given["out_proj.weight"].T + given["out_proj.bias"][None]
    assert measure_error(rows, expected) < TOLERANCE
