"""Recurrent layers, compared with the modules of transformers on random weights.

The modules compute whole sequences, as their models do without a cache.
"""

import dataclasses
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained.layers import linear
from pretrained.mixers import mamba2, short_convolution
from pretrained.parts import Convolution, StateSpace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOLERANCE = 2e-5
HIDDEN, EPSILON, LENGTH = 24, 1e-3, 40
SIZES = dict(num_heads=6, head_dim=8, num_groups=2, state_dim=5)

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

PROJECTIONS = ("gate", "x", "b", "c", "step")

MAMBA_NAMES = {f"mamba_{name}": "in_proj.weight" for name in PROJECTIONS}
MAMBA_NAMES |= {f"mamba_{name}_taps": "conv1d.weight" for name in "xbc"}
MAMBA_NAMES |= dict(
    mamba_rate="A_log",
    mamba_offset="dt_bias",
    mamba_skip="D",
    mamba_norm="norm.weight",
    mamba_output="out_proj.weight",
)

SHORT_NAMES = {f"short_{name}": "in_proj.weight" for name in ("first", "second", "x")}
SHORT_NAMES |= dict(short_taps="conv.weight", short_output="out_proj.weight")

# The module's parts in transformers, and the layer here.
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
        dict(has_taps_bias=False),
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
    """Return a module of transformers with random weights, and these in numpy."""
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


def cut_weights(table, given, names):
    """Return the parameters that a table of sources slices from a module's.

    Parameters of one tensor are concatenated in it.
    """
    weights, ends = {}, {}
    for parameter, source in table.items():
        name = names.get(parameter) or names[parameter.removesuffix("_bias")].replace(
            "weight", "bias"
        )
        start = ends.get(name, 0)
        ends[name] = start + source.shape[0]
        weights[parameter] = given[name][start : ends[name]]
        assert weights[parameter].shape == source.shape
    assert {name: len(given[name]) for name in ends} == ends
    return weights


def measure_error(actual, expected):
    """Return the largest difference, relative to the largest number expected."""
    return np.abs(actual - expected).max() / np.abs(expected).max()


def wrong_sizes(sizes):
    """Yield mistakes that a layer detects."""
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
    config = SimpleNamespace(state_space=sizes, hidden_size=HIDDEN)
    weights = cut_weights(mamba2.list_tensors(config), given, MAMBA_NAMES)
    x = np.random.default_rng(1).standard_normal((LENGTH, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)[None])[0].numpy()

    gates, inputs = mamba2.project(sizes, weights, jnp.asarray(x))
    rules, past = mamba2.Rules(sizes, weights), sizes.width - 1
    state = {f"past_{n}": jnp.zeros((past, *inputs[n].shape[1:])) for n in "xbc"}
    state["memory"] = jnp.zeros((sizes.num_heads, sizes.head_dim, sizes.state_dim))
    _, in_piece = jax.jit(rules.read_piece)(state, inputs, jnp.int32(LENGTH))
    _, by_token = jax.jit(lambda *given: jax.lax.scan(rules.read_token, *given))(
        state, inputs
    )
    for outputs in (in_piece, by_token):
        rows = mamba2.gather_heads(sizes, EPSILON, weights, outputs, gates)
        assert measure_error(rows, expected) < TOLERANCE
    if sizes.norm is None:
        weights["mamba_norm"] = np.ones(48, np.float32)
    for wrong in wrong_sizes(sizes):
        gates, inputs = mamba2.project(wrong, weights, jnp.asarray(x))
        _, outputs = jax.jit(rules.read_piece)(state, inputs, jnp.int32(LENGTH))
        rows = mamba2.gather_heads(wrong, EPSILON, weights, outputs, gates)
        assert measure_error(rows, expected) > 100 * TOLERANCE, wrong


def test_gated_convolutions():
    settings = dict(conv_L_cache=4, conv_bias=True, full_attn_idxs=[])
    module, given = make_module("lfm2", "Lfm2Config", "Lfm2ShortConv", settings)
    x = np.random.default_rng(1).standard_normal((LENGTH, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)[None])[0].numpy()

    config = SimpleNamespace(
        convolution=Convolution(width=4, has_bias=True), hidden_size=HIDDEN
    )
    weights = cut_weights(short_convolution.list_tensors(config), given, SHORT_NAMES)
    gates, inputs = short_convolution.project(weights, jnp.asarray(x))
    rules = short_convolution.Rules(weights)
    state = {"past": jnp.zeros((3, HIDDEN))}
    _, outputs = rules.read_piece(state, inputs, jnp.int32(LENGTH))
    rows = linear(outputs * gates, weights, "short_output")
    assert measure_error(rows, expected) < TOLERANCE
