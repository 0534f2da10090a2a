"""Mamba 2 layers: Granite 4, Nemotron-H, Falcon-H1, Bamba, and Mamba2 itself.

Values, keys and queries pass a short convolution each. The state is the newest inputs
of these and a matrix per head, in separate arrays, so that heads can be sharded over
devices; keys and queries, shared by groups of heads, are replicated.

Symbols as in `state_space.py`; `R` rows, `E` hidden size, `K` kernel size.
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

# Tokens of a chunk: products of 64 x 64 fill the matrix units of a GPU.
CHUNK = 64

CONVOLVED = ("x", "b", "c")

# Parts of the input projection, in the order of the tensor's rows.
PROJECTED = ("gate", *CONVOLVED, "step")


def apply(
    config: DecoderConfig, weights: Weights, x: jax.Array, fold: Fold
) -> tuple[jax.Array, Any]:
    """Apply a layer to rows, as `Mixer.apply`."""
    sizes = config.state_space
    gates, inputs = project(sizes, weights, x)
    rules = Rules(sizes, weights)
    heads, states = fold(
        rules.read_token, inputs, chunk_rule=rules.read_piece, chunk_size=CHUNK
    )
    return gather_heads(sizes, config.norm_epsilon, weights, heads, gates), states


class Rules:
    """The recurrence of one sequence, by token and by chunk."""

    def __init__(self, sizes: StateSpace, weights: Weights) -> None:
        """Store the sizes and the layer's parameters."""
        self._sizes = sizes
        self._weights = weights

    def read_token(
        self, state: dict[str, jax.Array], given: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after a token, and the output, f32[H, P]."""
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
        """Return the state after `count` tokens of a chunk, and outputs [C, H, P]."""
        past, read = {}, {}
        for name in CONVOLVED:
            old, taps = state[f"past_{name}"], self._find_taps(name)
            new, sums = convolve_piece(old, given[name], taps, count)
            past[f"past_{name}"], read[name] = new, self._activate(name, sums)
        # From `count` on, steps are zeros: no change of the matrix.
        tokens = Tokens(**read, step=given["step"], rate=self._find_rate())
        memory, outputs = remember_piece(state["memory"], tokens)
        return past | {"memory": memory}, self._skip(outputs, read["x"])

    def _find_taps(self, name: str) -> jax.Array:
        """Return the weights of the convolution, [heads or groups, dim, K]."""
        stored = self._weights[f"mamba_{name}_taps"]
        return stored.reshape(*_list_heads(self._sizes)[name], self._sizes.width)

    def _find_rate(self) -> jax.Array:
        """Return each head's decay rate, f32[H], below 0."""
        return -jnp.exp(self._weights["mamba_rate"].astype(jnp.float32))

    def _activate(self, name: str, sums: jax.Array) -> jax.Array:
        """Add the bias, if any, to a convolution's sums, and apply SiLU."""
        bias = self._weights.get(f"mamba_{name}_taps_bias")
        if bias is not None:
            heads = bias.astype(jnp.float32).reshape(_list_heads(self._sizes)[name])
            sums = sums + jnp.expand_dims(heads, range(sums.ndim - heads.ndim))
        return jax.nn.silu(sums)

    def _skip(self, outputs: jax.Array, x: jax.Array) -> jax.Array:
        """Add the skip connection from the values, with a factor per head."""
        skip = self._weights["mamba_skip"].astype(jnp.float32)[:, None]
        return outputs + x * jnp.expand_dims(skip, range(x.ndim - skip.ndim))


def project(
    sizes: StateSpace, weights: Weights, x: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the gates of rows, and the inputs of the recurrence.

    Args:
        sizes: the layer's sizes.
        weights: the layer's parameters.
        x: [R, E].

    Returns:
        The gates, [R, H, P]; and ``x`` f32[R, H, P], ``b`` and ``c`` f32[R, G, N],
        all before their convolutions, and ``step`` f32[R, H].
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
    """Gate and norm the recurrence's output, and project it to the hidden size.

    Args:
        sizes: the layer's sizes.
        epsilon: added to the mean square in the norm.
        weights: the layer's parameters.
        outputs: f32[R, H, P].
        gates: [R, H, P], from `project`.

    Returns:
        [R, E], in the gates' dtype.
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
    """Return the sources of the parameters."""
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
    """Return the number of heads or groups, and their dim, of convolved rows."""
    shared = sizes.num_groups, sizes.state_dim
    return dict(x=(sizes.num_heads, sizes.head_dim), b=shared, c=shared)
