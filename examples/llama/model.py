"""The Llama family as plain functions over a paged cache.

Symbols: `R` token rows in the batch, `E` hidden size, `H` query heads, `K` key-value
heads, `D` head dim, `V` vocabulary, `L` layers, `B` requests.

The layers run in one ``lax.scan`` whose carry holds the cache: as a carry its arrays
are written in place, while as scanned inputs and outputs the whole pool would be
copied on every call.
"""

import dataclasses

import jax
import jax.numpy as jnp

import jkv

from .checkpoint import Params
from .config import LlamaConfig
from .rope import rotate, turns

# A window that no position reaches, for full layers between windowed ones.
NO_WINDOW = 2**30


@dataclasses.dataclass(frozen=True)
class Llama:
    """A model of the Llama family: its static settings, called with its parameters.

    Hashable and without arrays, so jit can close over it or take it as static.
    """

    config: LlamaConfig

    @property
    def cache_fields(self) -> dict[str, int]:
        """The fields of ``jkv.CacheConfig`` that the model decides."""
        return {
            "num_layers": self.config.num_layers,
            "num_kv_heads": self.config.num_kv_heads,
            "head_dim": self.config.head_dim,
        }

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
        *,
        all_rows: bool = False,
    ) -> tuple[jax.Array, jkv.Cache]:
        """Run the tokens of a batch through the model, storing their keys and values.

        The caller has appended the rows to the cache (``jkv.append``) and commits the
        batch afterwards. Activations have the parameters' dtype.

        Args:
            params: what ``load`` returned.
            tokens: i32[R], packed as the batch's rows are; invalid rows may hold
                anything. An id outside the vocabulary makes its sequence NaN.
            cache: the cache that ``append`` returned.
            batch: the batch that ``append`` returned.
            all_rows: return logits for every row, not for each request's last.

        Returns:
            f32[B, V] logits (zeros for a request without rows) or, with ``all_rows``,
            f32[R, V]; and the cache with the rows written.
        """
        config = self.config
        hidden = _embed(params["embedding"], tokens, batch.valid)  # [R, E]
        rotation = turns(config.rope, config.head_dim, batch.positions, hidden.dtype)

        def run_layer(carry, scanned):
            hidden, cache = carry
            layer, weights, window = scanned
            window = config.windows[0] if window is None else window
            normed = _rms_norm(hidden, weights["attention_norm"], config.norm_epsilon)
            queries, keys, values = _project(config, weights, normed, rotation)
            cache = jkv.write(cache, layer, batch, keys, values)
            heads = jkv.attend(cache, layer, batch, queries, window=window)
            heads = heads.reshape(hidden.shape[0], -1)
            hidden = hidden + _linear(heads, weights, "output")
            normed = _rms_norm(hidden, weights["mlp_norm"], config.norm_epsilon)
            return (hidden + _feed_forward(weights, normed), cache), None

        layers = jnp.arange(config.num_layers, dtype=jnp.int32)
        scanned = (layers, params["layers"], _layer_windows(config))
        (hidden, cache), _ = jax.lax.scan(run_layer, (hidden, cache), scanned)
        if not all_rows:
            # Requests without rows point past the end: filled with zeros.
            hidden = jnp.take(
                hidden, batch.last_rows, axis=0, mode="fill", fill_value=0
            )
        hidden = _rms_norm(hidden, params["final_norm"], config.norm_epsilon)
        head = params["embedding" if config.tied else "head"]
        logits = jnp.einsum(
            "re,ve->rv", hidden, head, preferred_element_type=jnp.float32
        )
        return logits, cache


def _embed(embedding: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Look up token rows; ids outside the vocabulary give NaN, invalid rows zeros."""
    # A negative index would wrap around, so it is moved past the end.
    outside = (tokens < 0) | (tokens >= embedding.shape[0])
    index = jnp.where(outside, embedding.shape[0], tokens)
    rows = jnp.take(embedding, index, axis=0, mode="fill", fill_value=jnp.nan)
    return jnp.where(valid[:, None], rows, jnp.zeros_like(rows))


def _project(
    config: LlamaConfig,
    weights: dict[str, jax.Array],
    normed: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return turned queries [R, H, D] and keys [R, K, D], and values [R, K, D]."""
    shape = (normed.shape[0], -1, config.head_dim)
    queries = _linear(normed, weights, "query").reshape(shape)
    keys = _linear(normed, weights, "key").reshape(shape)
    values = _linear(normed, weights, "value").reshape(shape)
    if config.has_qk_norm:
        queries = _rms_norm(queries, weights["query_norm"], config.norm_epsilon)
        keys = _rms_norm(keys, weights["key_norm"], config.norm_epsilon)
    return rotate(queries, *rotation), rotate(keys, *rotation), values


def _feed_forward(weights: dict[str, jax.Array], normed: jax.Array) -> jax.Array:
    """Apply the gated perceptron: down(silu(gate(x)) * up(x))."""
    gate = jax.nn.silu(_linear(normed, weights, "gate"))
    return _linear(gate * _linear(normed, weights, "up"), weights, "down")


def _linear(x: jax.Array, weights: dict[str, jax.Array], name: str) -> jax.Array:
    """Multiply rows [R, in] by a matrix [out, in] and add its bias if it has one."""
    product = jnp.einsum("ri,oi->ro", x, weights[name])
    bias = weights.get(f"{name}_bias")
    return product if bias is None else product + bias[None, :]


def _rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Scale to unit root mean square over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)
    return normed * jnp.expand_dims(weight, range(x.ndim - 1))


def _layer_windows(config: LlamaConfig) -> jax.Array | None:
    """Return the windows to scan over, i32[L], or None when all layers are alike."""
    if len(set(config.windows)) == 1:
        return None
    windows = [NO_WINDOW if window is None else window for window in config.windows]
    return jnp.asarray(windows, jnp.int32)
