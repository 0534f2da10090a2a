"""Layers of LFM2 that look back a few tokens only (https://arxiv.org/abs/2511.23404).

Between two gates, which are products of the layer's input like the gated rows, each
channel is convolved with its last tokens. These are all of the state.

Symbols: `R` rows, `E` hidden size, `K` tokens that the convolution sees, `C` tokens of
a piece.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..config import DecoderConfig
from ..layers import Weights, linear
from ..sources import Source, list_whole
from .convolution import convolve_piece, convolve_token
from .mixer import Fold, Mixer

# Tokens of a piece. Its work is that of its tokens, however many.
CHUNK = 64

# Parts of the first projection, in the order that tensors have.
PROJECTED = ("first", "second", "x")


def apply(
    config: DecoderConfig, weights: Weights, x: jax.Array, fold: Fold
) -> tuple[jax.Array, Any]:
    """Send rows through a layer: see `Mixer`."""
    del config
    gates, inputs = project(weights, x)
    rules = Rules(weights)
    rows, states = fold(
        rules.read_token, inputs, chunk_rule=rules.read_piece, chunk_size=CHUNK
    )
    return linear(rows.astype(x.dtype) * gates, weights, "short_output"), states


class Rules:
    """The rule for one sequence, in its two forms."""

    def __init__(self, weights: Weights) -> None:
        """Read tokens with the weights of a layer."""
        self._taps = weights["short_taps"][:, 0]
        self._bias = weights.get("short_taps_bias", jnp.zeros(1, jnp.float32))

    def read_token(
        self, state: dict[str, jax.Array], given: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after a token, and its output, f32[E]."""
        past, sums = convolve_token(state["past"], given["x"], self._taps)
        return {"past": past}, sums + self._bias.astype(jnp.float32)

    def read_piece(
        self,
        state: dict[str, jax.Array],
        given: dict[str, jax.Array],
        count: jax.Array,
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the state after the first tokens of a piece, and outputs [C, E]."""
        past, sums = convolve_piece(state["past"], given["x"], self._taps, count)
        return {"past": past}, sums + self._bias.astype(jnp.float32)[None]


def project(weights: Weights, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the second gate of rows [R, E], and the rule's input: ``x`` f32[E]."""
    first, second, opened = (linear(x, weights, f"short_{n}") for n in PROJECTED)
    return second, {"x": (first * opened).astype(jnp.float32)}


def list_tensors(config: DecoderConfig) -> dict[str, Source]:
    """Return where the parameters come from."""
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
