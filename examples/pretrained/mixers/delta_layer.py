"""Layers with the gated delta rule: Qwen3-Next, OLMo Hybrid, Kimi Linear, Ling 3.

Queries, keys and values pass a short convolution each. The state is the newest inputs
of these and a matrix per head. Queries, keys and values have separate arrays in it, so
that heads can be sharded over devices.

Symbols: `R` rows, `E` hidden size, `G` key heads, `H` heads of the state, `D` and `V`
components of a key and a value, `K` kernel size, `C` tokens of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import DecoderConfig
from ..layers import Weights, linear
from ..parts import DeltaRule
from ..sources import Source, list_whole
from .convolution import convolve_piece, convolve_token
from .delta_rule import Tokens, correct_once, correct_piece
from .mixer import Fold, Mixer

# Tokens of a chunk: products of 64 x 64 fill the matrix units of a GPU, and the
# triangular system of a chunk costs less than its products.
CHUNK = 64

# Added to the squared length of queries and keys before they are scaled to length 1.
LENGTH_EPSILON = 1e-6

CONVOLVED = ("query", "key", "value")


def apply(
    config: DecoderConfig, weights: Weights, x: jax.Array, fold: Fold
) -> tuple[jax.Array, Any]:
    """Apply a layer to rows, as `Mixer.apply`."""
    sizes = config.delta_rule
    inputs = _project(sizes, weights, x)
    rules = _Rules(sizes, weights)
    heads, states = fold(
        rules.read_token, inputs, chunk_rule=rules.read_piece, chunk_size=CHUNK
    )
    gate = linear(_squeeze(weights, x, "delta_gate"), weights, "delta_gate")
    normed = _norm_heads(sizes, weights, heads, gate.reshape(heads.shape))
    return linear(normed.reshape(x.shape[0], -1), weights, "delta_output"), states


class _Rules:
    """The recurrence of one sequence, by token and by chunk."""

    def __init__(self, sizes: DeltaRule, weights: Weights) -> None:
        self._sizes = sizes
        self._weights = weights

    def read_token(
        self, state: dict[str, jax.Array], given: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after a token, and the output, f32[H, V]."""
        past, convolved = {}, {}
        for name in CONVOLVED:
            old, taps = state[f"past_{name}"], self._find_taps(name)
            new, convolved[name] = convolve_token(old, given[name], taps)
            past[f"past_{name}"] = new
        token = self._make_tokens(convolved, given["decay"], given["strength"])
        memory, output = correct_once(state["memory"], token)
        return past | {"memory": memory}, output

    def read_piece(
        self,
        state: dict[str, jax.Array],
        given: dict[str, jax.Array],
        count: jax.Array,
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after `count` tokens of a chunk, and outputs [C, H, V]."""
        past, convolved = {}, {}
        for name in CONVOLVED:
            old, taps = state[f"past_{name}"], self._find_taps(name)
            new, convolved[name] = convolve_piece(old, given[name], taps, count)
            past[f"past_{name}"] = new
        # From `count` on, decay and strength are zeros: no change of the matrix.
        tokens = self._make_tokens(convolved, given["decay"], given["strength"])
        memory, outputs = correct_piece(state["memory"], tokens)
        return past | {"memory": memory}, outputs

    def _find_taps(self, name: str) -> jax.Array:
        """Return the weights of the convolution, [heads, dim, K]."""
        dim = self._sizes.value_dim if name == "value" else self._sizes.key_dim
        stored = self._weights[f"delta_{name}_taps"]
        return stored.reshape(-1, dim, self._sizes.width)

    def _make_tokens(
        self, convolved: dict[str, jax.Array], decays: jax.Array, strengths: jax.Array
    ) -> Tokens:
        """Return the delta rule's inputs of a token or a chunk."""
        query, key, value = (jax.nn.silu(convolved[name]) for name in CONVOLVED)
        sharing = self._sizes.num_heads // self._sizes.num_key_heads
        query, key = (
            jnp.repeat(_scale_to_one(array), sharing, axis=-2) for array in (query, key)
        )
        query = query * self._sizes.key_dim**-0.5
        return Tokens(query, key, value, decays, strengths)


def list_tensors(config: DecoderConfig) -> dict[str, Source]:
    """Return the sources of the parameters."""
    sizes, hidden = config.delta_rule, config.hidden_size
    keys, values = _count_channels(sizes)
    rates = keys if sizes.forgets_by_channel else sizes.num_heads
    table = list_whole(
        delta_query=(keys, hidden),
        delta_key=(keys, hidden),
        delta_value=(values, hidden),
        delta_gate=(values, sizes.gates or hidden),
        delta_strength=(sizes.num_heads, hidden),
        delta_decay=(rates, sizes.gates or hidden),
        delta_offset=(rates,),
        delta_query_taps=(keys, 1, sizes.width),
        delta_key_taps=(keys, 1, sizes.width),
        delta_value_taps=(values, 1, sizes.width),
        delta_norm=(sizes.value_dim,),
        delta_output=(hidden, values),
    )
    # One rate per head; axes of one element beside it depend on the architecture.
    stored = (sizes.num_heads,) if sizes.gates is None else (1, 1, sizes.num_heads, 1)
    table["delta_rate"] = Source((sizes.num_heads,), stored, np.ravel)
    if sizes.gates is not None:
        down = (sizes.gates, hidden)
        table |= list_whole(delta_gate_down=down, delta_decay_down=down)
    if sizes.is_grouped:
        table |= _list_grouped(sizes, hidden)
    return table


DELTA_RULE = Mixer(list_tensors, apply)


def _project(sizes: DeltaRule, weights: Weights, x: jax.Array) -> dict[str, jax.Array]:
    """Return the delta rule's inputs of each row, in float32."""
    inputs = {
        name: linear(x, weights, f"delta_{name}").reshape(x.shape[0], *heads)
        for name, heads in _list_heads(sizes).items()
    }
    # In float32 from here on: a product of many decays adds up their rounding.
    raw = linear(_squeeze(weights, x, "delta_decay"), weights, "delta_decay")
    shifted = (
        raw.astype(jnp.float32) + weights["delta_offset"].astype(jnp.float32)[None]
    )
    rates = jnp.exp(weights["delta_rate"].astype(jnp.float32))[None, :, None]
    heads = shifted.reshape(x.shape[0], sizes.num_heads, -1)
    if sizes.least_decay is None:
        inputs["decay"] = -rates * jax.nn.softplus(heads)
    else:
        inputs["decay"] = sizes.least_decay * jax.nn.sigmoid(rates * heads)
    strength = jax.nn.sigmoid(linear(x, weights, "delta_strength"))
    inputs["strength"] = strength * sizes.strength
    return {name: array.astype(jnp.float32) for name, array in inputs.items()}


def _squeeze(weights: Weights, x: jax.Array, name: str) -> jax.Array:
    """Return the input of a gate's last projection; `x` for gates of full rank."""
    down = f"{name}_down"
    return linear(x, weights, down) if down in weights else x


def _norm_heads(
    sizes: DeltaRule, weights: Weights, heads: jax.Array, gate: jax.Array
) -> jax.Array:
    """Apply RMSNorm to each head's output, [R, H, V], and the gate, in its dtype."""
    mean_square = jnp.mean(heads * heads, axis=-1, keepdims=True)
    normed = heads * jax.lax.rsqrt(mean_square + sizes.norm_epsilon)
    normed = normed * weights["delta_norm"].astype(jnp.float32)[None, None, :]
    wide = gate.astype(jnp.float32)
    opened = jax.nn.silu(wide) if sizes.gate == "silu" else jax.nn.sigmoid(wide)
    return (normed * opened).astype(gate.dtype)


def _scale_to_one(x: jax.Array) -> jax.Array:
    """Scale the last axis to the length 1."""
    square = (x * x).sum(-1, keepdims=True)
    return x * jax.lax.rsqrt(square + LENGTH_EPSILON)


def _list_heads(sizes: DeltaRule) -> dict[str, tuple[int, int]]:
    """Return the number of heads and the head dim of convolved rows."""
    keys = sizes.num_key_heads, sizes.key_dim
    return dict(query=keys, key=keys, value=(sizes.num_heads, sizes.value_dim))


def _count_channels(sizes: DeltaRule) -> tuple[int, int]:
    """Return the number of channels of keys, and of values."""
    return sizes.num_key_heads * sizes.key_dim, sizes.num_heads * sizes.value_dim


def _list_grouped(sizes: DeltaRule, hidden: int) -> dict[str, Source]:
    """Return sources of projections that are grouped by key head.

    One tensor has, for each key head, its query, its key, and the values and gates of
    its heads; another has the heads' strengths and decays.
    """
    sharing = sizes.num_heads // sizes.num_key_heads
    keys, values = sizes.key_dim, sharing * sizes.value_dim
    first = dict(
        delta_query=keys, delta_key=keys, delta_value=values, delta_gate=values
    )
    second = dict(delta_strength=sharing, delta_decay=sharing)
    table = {}
    for widths in (first, second):
        ends = np.cumsum(list(widths.values()))
        stored = (sizes.num_key_heads * int(ends[-1]), hidden)
        for (name, width), end in zip(widths.items(), ends, strict=True):

            def take(
                tensor: np.ndarray, part: slice = slice(end - width, end)
            ) -> np.ndarray:
                heads = tensor.reshape(sizes.num_key_heads, -1, hidden)
                return heads[:, part].reshape(-1, hidden)

            shape = (sizes.num_key_heads * width, hidden)
            table[name] = Source(shape, stored, take)
    return table
