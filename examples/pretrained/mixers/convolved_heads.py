"""Convolved queries, keys and values (https://arxiv.org/abs/2510.04476).

Queries and keys pass two convolutions: per channel, then over the channels of a head.
The mean of a query's and its key's projections is added, and both sums are scaled to
the same length. Half of the values are the previous token's. The newest inputs of all
three are the state.

Symbols: `R` rows, `E` hidden size, `H` query heads, `K` key-value heads, `D` head dim,
`W` tokens of the state, `C` tokens of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..config import DecoderConfig
from ..layers import Weights, linear, multiply
from ..sources import Source, list_whole
from .mixer import Fold, Mixer

# Tokens of a chunk. The work per token does not depend on it.
CHUNK = 64

CONVOLVED = ("query", "key")


def apply(
    config: DecoderConfig, weights: Weights, x: jax.Array, fold: Fold
) -> tuple[dict[str, jax.Array], Any]:
    """Return queries, keys and values of a layer, as `Mixer.apply`."""
    heads = _list_heads(config)
    given = {
        name: linear(x, weights, f"convolved_{name}").astype(jnp.float32)
        for name in CONVOLVED
    }
    given = {name: rows.reshape(-1, *heads[name]) for name, rows in given.items()}
    # The bias is added later, as zeros precede the first token.
    late = multiply(x, weights["convolved_late"]).astype(jnp.float32)
    rules = Rules(config, weights)
    read, states = fold(
        rules.read_token,
        given | {"value": late},
        chunk_rule=rules.read_piece,
        chunk_size=CHUNK,
    )
    sharing = config.num_heads // config.num_kv_heads
    shared = (given["query"] + jnp.repeat(given["key"], sharing, axis=1)) / 2
    of_keys = shared.reshape(-1, config.num_kv_heads, sharing, config.head_dim)
    key = _scale_to_root(config, read["key"] + of_keys.mean(axis=2))
    key = key * weights["convolved_scale"].astype(jnp.float32)[None, :, None]
    late = read["value"].astype(x.dtype)
    if (bias := weights.get("convolved_late_bias")) is not None:
        late = late + bias[None, :]
    newest = linear(x, weights, "convolved_newest")
    rows = dict(query=_scale_to_root(config, read["query"] + shared), key=key)
    rows = {n: each.reshape(len(x), -1).astype(x.dtype) for n, each in rows.items()}
    return rows | {"value": jnp.concatenate([newest, late], axis=-1)}, states


class Rules:
    """The recurrence of one sequence, by token and by chunk."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        """Store the configuration and the layer's parameters."""
        self._config = config
        self._weights = weights

    def read_token(
        self, state: dict[str, jax.Array], given: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the state after a token, its convolved heads and delayed value."""
        piece = {name: array[None] for name, array in given.items()}
        state, outputs = self.read_piece(state, piece, jnp.int32(1))
        return state, {name: array[0] for name, array in outputs.items()}

    def read_piece(
        self,
        state: dict[str, jax.Array],
        given: dict[str, jax.Array],
        count: jax.Array,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the state after `count` tokens of a chunk, and each one's outputs."""
        past, outputs = {}, {}
        for name, rows in given.items():
            old = state[f"past_{name}"]
            window = jnp.concatenate([old, rows.astype(old.dtype)])
            past[f"past_{name}"] = jax.lax.dynamic_slice_in_dim(
                window, count, len(old), axis=0
            )
            outputs[name] = (
                self._convolve(name, window.astype(jnp.float32))
                if name in CONVOLVED
                else window[len(old) - 1 : -1].astype(jnp.float32)
            )
        return past, outputs

    def _convolve(self, name: str, window: jax.Array) -> jax.Array:
        """Convolve f32[W + C, heads, D] to f32[C, heads, D]."""
        heads, dim = window.shape[1:]
        first, second = self._config.convolved_heads.widths
        taps, taps_bias, mix, mix_bias = (
            self._weights[f"convolved_{name}_{part}"].astype(jnp.float32)
            for part in ("taps", "taps_bias", "mix", "mix_bias")
        )
        taps, mix = taps.reshape(heads, dim, first), mix.reshape(heads, dim, dim, -1)
        size = len(window) - first + 1
        each = sum(window[i : i + size] * taps[None, ..., i] for i in range(first))
        each = each + taps_bias.reshape(1, heads, dim)
        size = size - second + 1
        parts = (
            jnp.einsum("chi,hoi->cho", each[i : i + size], mix[..., i])
            for i in range(second)
        )
        return sum(parts) + mix_bias.reshape(1, heads, dim)


def list_tensors(config: DecoderConfig) -> dict[str, Source]:
    """Return the sources of the parameters."""
    hidden, dim = config.hidden_size, config.head_dim
    first, second = config.convolved_heads.widths
    half = config.num_kv_heads * dim // 2
    table = list_whole(
        convolved_newest=(half, hidden),
        convolved_late=(half, hidden),
        convolved_scale=(config.num_kv_heads,),
    )
    for name, (heads, _) in _list_heads(config).items():
        channels = heads * dim
        table |= list_whole(
            **{
                f"convolved_{name}": (channels, hidden),
                f"convolved_{name}_taps": (channels, 1, first),
                f"convolved_{name}_taps_bias": (channels,),
                f"convolved_{name}_mix": (channels, dim, second),
                f"convolved_{name}_mix_bias": (channels,),
            }
        )
    if config.has_qkv_bias:
        for name in ("query", "key", "newest", "late"):
            channels = table[f"convolved_{name}"].shape[0]
            table |= list_whole(**{f"convolved_{name}_bias": (channels,)})
    return table


CONVOLVED_HEADS = Mixer(list_tensors, apply, feeds_attention=True)


def _list_heads(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return the number of heads and the head dim of convolved rows."""
    dim = config.head_dim
    return dict(query=(config.num_heads, dim), key=(config.num_kv_heads, dim))


def _scale_to_root(config: DecoderConfig, heads: jax.Array) -> jax.Array:
    """Scale f32[..., D] to the length ``sqrt(D)``."""
    length = jnp.sqrt((heads * heads).sum(axis=-1, keepdims=True))
    least = jnp.finfo(heads.dtype).eps
    return heads * (config.head_dim**0.5 / jnp.maximum(length, least))
