"""Gated short convolutions of LFM2 (https://arxiv.org/abs/2511.23404).

A causal convolution per channel between two gates; gates and rows are projections of
the layer's input. The newest inputs of the convolution are the whole state.

Symbols: `R` rows, `E` hidden size, `C` tokens of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..config import DecoderConfig
from ..layers import Weights, linear
from ..sources import Source, list_whole
from .convolution import convolve_piece, convolve_token
from .mixer import Fold, Mixer

# Tokens of a chunk. The work per token does not depend on it.
CHUNK = 64

# Parts of the input projection, in the order of the tensor's rows.
PROJECTED = ("first", "second", "x")


def apply(
    config: DecoderConfig, weights: Weights, x: jax.Array, fold: Fold
) -> tuple[jax.Array, Any]:
    """Apply a layer to rows, as `Mixer.apply`."""
    del config
    gates, inputs = project(weights, x)
    rules = Rules(weights)
    rows, states = fold(
        rules.read_token, inputs, chunk_rule=rules.read_piece, chunk_size=CHUNK
    )
    return linear(rows.astype(x.dtype) * gates, weights, "short_output"), states


class Rules:
    """The recurrence of one sequence, by token and by chunk."""

    def __init__(self, weights: Weights) -> None:
        """Store the convolution's weights and bias."""
        self._taps = weights["short_taps"][:, 0]
        self._bias = weights.get("short_taps_bias", jnp.zeros(1, jnp.float32))

    def read_token(
        self, state: dict[str, jax.Array], given: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after a token, and the output, f32[E]."""
        past, sums = convolve_token(state["past"], given["x"], self._taps)
        return {"past": past}, sums + self._bias.astype(jnp.float32)

    def read_piece(
        self,
        state: dict[str, jax.Array],
        given: dict[str, jax.Array],
        count: jax.Array,
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after `count` tokens of a chunk, and outputs f32[C, E]."""
        past, sums = convolve_piece(state["past"], given["x"], self._taps, count)
        return {"past": past}, sums + self._bias.astype(jnp.float32)[None]


def project(weights: Weights, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the second gate, [R, E], and the convolution's input ``x``, f32[R, E]."""
    first, second, opened = (linear(x, weights, f"short_{n}") for n in PROJECTED)
    return second, {"x": (first * opened).astype(jnp.float32)}


def list_tensors(config: DecoderConfig) -> dict[str, Source]:
    """Return the sources of the parameters."""
    sizes, hidden = config.convolution, config.hidden_size
    names = *(f"short_{name}" for name in PROJECTED), "short_output"
    table = list_whole(
        **dict.fromkeys(names, (hidden, hidden)), short_taps=(hidden, 1, sizes.width)
    )
    if sizes.has_bias:
        biases = (f"{name}_bias" for name in table)
        table |= list_whole(**dict.fromkeys(biases, (hidden,)))
    return table


SHORT_CONVOLUTION = Mixer(list_tensors, apply)
