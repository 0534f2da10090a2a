"""Tree search over dense arrays: a branch clones its whole sequence.

Includes a step of the bundled model in plain JAX over rows of such arrays.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from support.paths import EXAMPLES

LAYERS, HEADS, DIM, BASE, EPSILON = 4, 2, 32, 10_000.0, 1e-5


class ClonedSequences(NamedTuple):
    """Sequences in dense arrays, one row each; a row is never reused.

    At most S sequences of C tokens, in L layers with K heads of D.
    """

    keys: jax.Array  # f32[S, L, C, K, D]
    values: jax.Array  # f32[S, L, C, K, D]
    lengths: jax.Array  # i32[S]
    count: jax.Array  # i32[], rows in use

    @classmethod
    def open(cls, model, params, prompt, *, num_sequences, max_length, count):
        """Compute a prompt in the first row, and clone it for all sequences, i32[B]."""
        none = jnp.zeros((num_sequences, LAYERS, max_length, HEADS, DIM))
        sequences = cls(none, none, jnp.zeros(num_sequences, jnp.int32), jnp.int32(1))

        def read(sequences, token):
            return sequences.extend(model, params, jnp.zeros(1, jnp.int32), token[None])

        sequences, logits = jax.lax.scan(read, sequences, prompt)
        sequences, rows = sequences.branch(jnp.zeros(count, jnp.int32))
        return sequences, rows, jnp.repeat(logits[-1], count, axis=0)

    def branch(self, rows):
        opens = rows >= 0
        new = self.count + jnp.cumsum(opens, dtype=jnp.int32) - 1
        to = jnp.where(opens, new, self.lengths.shape[0])
        copied = (
            array.at[to].set(array[rows], mode="drop")
            for array in (self.keys, self.values, self.lengths)
        )
        count = self.count + opens.sum(dtype=jnp.int32)
        return ClonedSequences(*copied, count), jnp.where(opens, new, -1)

    def extend(self, model, params, rows, tokens):
        places = self.lengths[rows]
        logits, keys, values = model(
            params, tokens, self.keys[rows], self.values[rows], places
        )
        to = jnp.where(rows >= 0, rows, self.lengths.shape[0])
        return ClonedSequences(
            self.keys.at[to, :, places].set(keys, mode="drop"),
            self.values.at[to, :, places].set(values, mode="drop"),
            self.lengths.at[to].add(1, mode="drop"),
            self.count,
        ), logits

    def cut(self, rows, counts):
        to = jnp.where(rows >= 0, rows, self.lengths.shape[0])
        return self._replace(lengths=self.lengths.at[to].add(-counts, mode="drop"))

    def drop(self, rows):
        """Keep the rows: dense arrays release nothing."""
        del rows
        return self


def read_weights():
    """Return the bundled model's weights by their Hugging Face names, f32."""
    stored = load_file(EXAMPLES / "models" / "pydoc" / "model.safetensors")
    return {name: jnp.asarray(x, jnp.float32) for name, x in stored.items()}


def dense_step(weights, tokens, keys, values, places):
    """Run one token of each sequence through the bundled model.

    Args:
        weights: as `read_weights` returns.
        tokens: i32[B].
        keys, values: f32[B, L, C, K, D], of the previous tokens.
        places: i32[B], the number of previous tokens.

    Returns:
        f32[B, V] logits, and the tokens' keys and values, f32[B, L, K, D].
    """
    B = tokens.shape[0]
    x = weights["model.embed_tokens.weight"][tokens]
    is_past = jnp.arange(keys.shape[2], dtype=jnp.int32)[None] < places[:, None]
    is_seen = jnp.pad(is_past, ((0, 0), (0, 1)), constant_values=True)[:, None, None]
    new = []
    for layer in range(LAYERS):
        named = functools.partial(_named, weights, f"model.layers.{layer}.")
        h = _norm(x, named("input_layernorm"))
        q, k, v = (
            (h @ named(f"self_attn.{n}_proj").T).reshape(B, -1, DIM) for n in "qkv"
        )
        q, k = _turn(q, places).reshape(B, HEADS, -1, DIM), _turn(k, places)
        all_keys = jnp.concatenate([keys[:, layer], k[:, None]], axis=1)
        all_values = jnp.concatenate([values[:, layer], v[:, None]], axis=1)
        scores = jnp.einsum("bkgd,bckd->bkgc", q, all_keys) / np.float32(DIM**0.5)
        shares = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
        mixed = jnp.einsum("bkgc,bckd->bkgd", shares, all_values).reshape(B, -1)
        x = x + mixed @ named("self_attn.o_proj").T
        h = _norm(x, named("post_attention_layernorm"))
        gate = jax.nn.silu(h @ named("mlp.gate_proj").T)
        x = x + (gate * (h @ named("mlp.up_proj").T)) @ named("mlp.down_proj").T
        new.append((k, v))
    x = _norm(x, weights["model.norm.weight"])
    logits = x @ weights["model.embed_tokens.weight"].T
    return logits, *(jnp.stack(arrays, axis=1) for arrays in zip(*new, strict=True))


def _named(weights, prefix, name):
    return weights[f"{prefix}{name}.weight"]


def _norm(x, weight):
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + EPSILON) * weight[None]


def _turn(x, places):
    """Rotate pairs (i, i + D/2) of x f32[B, heads, D] by their positions."""
    half = x.shape[-1] // 2
    speeds = np.float32(BASE) ** -(np.arange(half, dtype=np.float32) / half)
    angles = (places.astype(jnp.float32)[:, None] * speeds[None])[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
