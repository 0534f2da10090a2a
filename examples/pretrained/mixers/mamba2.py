"""Layers of Mamba 2: Granite 4, Nemotron-H, Falcon-H1, Bamba, and Mamba2 itself.

Values, keys and queries go through a short convolution each, and its newest inputs are
a part of the state; the heads' memories are the other. All have arrays of their own in
it, so that devices can share the heads: keys and queries, which groups of heads have in
common, are on every device.

Symbols as in `state_space.py`; `R` rows, `E` hidden size, `K` tokens that the
convolution sees.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..config import DecoderConfig
from ..layers import Weights, linear, scale_to_unit
from ..parts import StateSpace
from ..sources import Shape, Source, list_whole
from .convolution import convolve_piece, convolve_token
from .mixer import Fold, Mixer
from .state_space import Tokens, remember_piece, remember_token

# Tokens of a piece: products of 64 x 64 fill the matrix units of a GPU.
CHUNK = 64

CONVOLVED = ("x", "b", "c")

# Parts of the first projection, in the order that tensors have.
PROJECTED = ("gate", *CONVOLVED, "step")


def apply(
    config: DecoderConfig, weights: Weights, x: jax.Array, fold: Fold
) -> tuple[jax.Array, Any]:
    """Send rows through a layer: see `Mixer`."""
    sizes = config.state_space
    gates, inputs = project(sizes, weights, x)
    rules = Rules(sizes, weights)
    heads, states = fold(
        rules.read_token, inputs, chunk_rule=rules.read_piece, chunk_size=CHUNK
    )
    return gather_heads(sizes, config.norm_epsilon, weights, heads, gates), states


class Rules:
    """The rule for one sequence, in its two forms."""

    def __init__(self, sizes: StateSpace, weights: Weights) -> None:
        """Read tokens with the weights of a layer."""
        self._sizes = sizes
        self._weights = weights

    def read_token(
        self, state: dict[str, jax.Array], given: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after a token, and its output, f32[H, P]."""
        past, read = {}, {}
        for name in CONVOLVED:
            old, taps = state[f"past_{name}"], self._find_taps(name)
            past[f"past_{name}"], sums = convolve_token(old, given[name], taps)
            read[name] = self._activate(name, sums)
        token = Tokens(**read, step=given["step"], rate=self._find_rate())
        memory, output = remember_token(state["memory"], token)
        return past | {"memory": memory}, self._skip(output, read["x"])

    def read_piece(
        self,
        state: dict[str, jax.Array],
        given: dict[str, jax.Array],
        count: jax.Array,
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after the first tokens of a piece, and outputs [C, H, P]."""
        past, read = {}, {}
        for name in CONVOLVED:
            old, taps = state[f"past_{name}"], self._find_taps(name)
            new, sums = convolve_piece(old, given[name], taps, count)
            past[f"past_{name}"], read[name] = new, self._activate(name, sums)
        # Past the count steps are zeros: such a token changes nothing.
        tokens = Tokens(**read, step=given["step"], rate=self._find_rate())
        memory, outputs = remember_piece(state["memory"], tokens)
        return past | {"memory": memory}, self._skip(outputs, read["x"])

    def _find_taps(self, name: str) -> jax.Array:
        """Return the convolution's weights, [heads or groups, dim, K]."""
        stored = self._weights[f"mamba_{name}_taps"]
        return stored.reshape(*_list_heads(self._sizes)[name], self._sizes.width)

    def _find_rate(self) -> jax.Array:
        """Return the rate of each head's decay, f32[H]."""
        return -jnp.exp(self._weights["mamba_rate"].astype(jnp.float32))

    def _activate(self, name: str, sums: jax.Array) -> jax.Array:
        """Return the activation of a convolution's sums, of a token or a piece."""
        bias = self._weights.get(f"mamba_{name}_taps_bias")
        if bias is not None:
            heads = bias.astype(jnp.float32).reshape(_list_heads(self._sizes)[name])
            sums = sums + jnp.expand_dims(heads, range(sums.ndim - heads.ndim))
        return jax.nn.silu(sums)

    def _skip(self, outputs: jax.Array, x: jax.Array) -> jax.Array:
        """Add the share of the values that passes by the memory."""
        skip = self._weights["mamba_skip"].astype(jnp.float32)[:, None]
        return outputs + x * jnp.expand_dims(skip, range(x.ndim - skip.ndim))


def project(
    sizes: StateSpace, weights: Weights, x: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the gates of rows, and the rule's inputs.

    Args:
        sizes: of the layer.
        weights: of the layer.
        x: [R, E].

    Returns:
        [R, H, P]; and of each row, in float32, ``x`` [H, P], ``b`` and ``c`` [G, N]
        before their convolutions, and ``step`` [H].
    """
    heads = _list_heads(sizes)
    shapes = {"gate": heads["x"], **heads, "step": (sizes.num_heads,)}
    scaled = x * sizes.input_scale
    rows = {
        name: (linear(scaled, weights, f"mamba_{name}") * scale).reshape(
            -1, *shapes[name]
        )
        for name, scale in zip(PROJECTED, sizes.scales, strict=True)
    }
    gates = rows.pop("gate")
    inputs = {name: array.astype(jnp.float32) for name, array in rows.items()}
    offset = weights["mamba_offset"].astype(jnp.float32)[None]
    steps = jax.nn.softplus(inputs["step"] + offset)
    return gates, inputs | {"step": jnp.clip(steps, *sizes.step_limits)}


def gather_heads(
    sizes: StateSpace,
    epsilon: float,
    weights: Weights,
    outputs: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Gate and norm the rule's output, and project it to the hidden size.

    Args:
        sizes: of the layer.
        epsilon: added to the mean square of a norm.
        weights: of the layer.
        outputs: f32[R, H, P].
        gates: [R, H, P], from `project`.

    Returns:
        [R, E], of the gates' dtype.
    """
    opened = jax.nn.silu(gates.astype(jnp.float32))
    heads = outputs if sizes.norm == "before" else outputs * opened
    if sizes.norm is not None:
        grouped = heads.reshape(heads.shape[0], sizes.num_groups, -1)
        weight = weights["mamba_norm"].astype(jnp.float32)
        heads = scale_to_unit(grouped, epsilon).reshape(heads.shape)
        heads = heads * weight.reshape(1, *heads.shape[1:])
    if sizes.norm == "before":
        heads = heads * opened
    rows = heads.reshape(heads.shape[0], -1).astype(gates.dtype)
    return linear(rows, weights, "mamba_output") * sizes.output_scale


def list_tensors(config: DecoderConfig) -> dict[str, Source]:
    """Return where the parameters come from."""
    sizes, hidden = config.state_space, config.hidden_size
    channels = {name: a * b for name, (a, b) in _list_heads(sizes).items()}
    inner, heads = channels["x"], (sizes.num_heads,)
    rows = {"gate": inner, **channels, "step": sizes.num_heads}
    shapes: dict[str, Shape] = {f"mamba_{n}": (rows[n], hidden) for n in PROJECTED}
    shapes |= {f"mamba_{n}_taps": (channels[n], 1, sizes.width) for n in CONVOLVED}
    shapes |= dict(mamba_rate=heads, mamba_offset=heads, mamba_skip=heads)
    shapes |= dict(mamba_output=(hidden, inner))
    if sizes.norm is not None:
        shapes |= dict(mamba_norm=(inner,))
    if sizes.has_bias:
        shapes |= {f"mamba_{n}_bias": (rows[n],) for n in PROJECTED}
    if sizes.has_taps_bias:
        shapes |= {f"mamba_{n}_taps_bias": (channels[n],) for n in CONVOLVED}
    if sizes.has_output_bias:
        shapes |= dict(mamba_output_bias=(hidden,))
    return list_whole(**shapes)


MAMBA2 = Mixer(list_tensors, apply)


def _list_heads(sizes: StateSpace) -> dict[str, tuple[int, int]]:
    """Return heads and their dim, or groups and theirs, of the convolved rows."""
    shared = sizes.num_groups, sizes.state_dim
    return dict(x=(sizes.num_heads, sizes.head_dim), b=shared, c=shared)
