"""Building blocks of the model: matrix products, norms and the gated MLP."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from .config import DecoderConfig

Weights = Mapping[str, jax.Array]  # parameters of one layer

# Elements of the largest array that a loop copies per layer: norms and biases.
MOST_COPIED = 2**16

# Matrices with the same input; joined, they are one product.
JOINED = ("query", "key", "value"), ("gate", "up")

# Maximum rows of a product with the matrix on its left side.
FEW_ROWS = 32


class Layers:
    """Parameters of equal layers for a loop, with separate arrays for each layer.

    A loop over a stack would copy each layer's matrices out of it. Here each matrix has
    a branch of its own, which reads it in place.
    """

    def __init__(self, layers: Sequence[Weights]) -> None:
        """Stack the small arrays."""
        self.each = layers
        self.stacks = {
            name: jnp.stack([layer[name] for layer in layers])
            for name, array in layers[0].items()
            if array.size <= MOST_COPIED
        }

    def at(self, index: jax.Array) -> "LayerAt":
        """Return the layer of a traced index, i32[]."""
        return LayerAt(self, index)


class LayerAt(Mapping[str, jax.Array]):
    """One of several layers, by traced index; reading a large array copies it."""

    def __init__(self, layers: Layers, index: jax.Array) -> None:
        """Store the layers and the index, i32[]."""
        self._layers, self._index = layers, index

    def __getitem__(self, name: str) -> jax.Array:
        """Return an array of the layer."""
        if name in self._layers.stacks:
            return self._layers.stacks[name][self._index]
        if name not in self._layers.each[0]:
            raise KeyError(name)
        branches = [lambda each=each: each[name] for each in self._layers.each]
        return jax.lax.switch(self._index, branches)

    def __contains__(self, name: object) -> bool:
        """True if the layers have an array of this name."""
        return name in self._layers.each[0]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._layers.each[0])

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._layers.each[0])

    def multiply(self, x: jax.Array, name: str) -> jax.Array:
        """Multiply rows [R, in] by a matrix [out, in], read in place."""
        if name in self._layers.stacks:
            return multiply(x, self[name])
        branches = [
            functools.partial(multiply, matrix=each[name]) for each in self._layers.each
        ]
        return jax.lax.switch(self._index, branches, x)


def multiply(
    x: jax.Array, matrix: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Multiply rows [R, in] by a matrix [out, in], with sums in `dtype`.

    XLA's CPU runtime rearranges the right side of each product, which for a matrix and
    few rows costs more than the product. The barrier keeps XLA from moving the matrix
    back to that side.
    """
    if 1 < len(x) <= FEW_ROWS and jax.default_backend() == "cpu":
        product = jnp.einsum("oi,ri->or", matrix, x, preferred_element_type=dtype)
        return jax.lax.optimization_barrier(product).T
    return jnp.einsum("ri,oi->ro", x, matrix, preferred_element_type=dtype)


def embed(embedding: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Look up embeddings: NaN for ids outside the vocabulary, zeros if not `valid`."""
    # Past the end, since a negative index would wrap around.
    outside = (tokens < 0) | (tokens >= embedding.shape[0])
    index = jnp.where(outside, embedding.shape[0], tokens)
    rows = jnp.take(embedding, index, axis=0, mode="fill", fill_value=jnp.nan)
    return jnp.where(valid[:, None], rows, jnp.zeros_like(rows))


def linear(x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """Multiply rows [R, in] by a matrix [out, in] and add its bias, if any."""
    if isinstance(weights, LayerAt):
        product = weights.multiply(x, name)
    else:
        product = multiply(x, weights[name])
    bias = weights.get(f"{name}_bias")
    return product if bias is None else product + bias[None, :]


def linear_each(
    x: jax.Array, weights: Weights, shares: Mapping[str, int]
) -> dict[str, jax.Array]:
    """Apply ``linear`` for several matrices, as one product if they are joined.

    Args:
        x: [R, in].
        weights: the layer's parameters.
        shares: relative number of outputs of each matrix, by name.
    """
    if (joined := join_names(shares)) not in weights:
        return {name: linear(x, weights, name) for name in shares if name in weights}
    rows, of_all = linear(x, weights, joined), sum(shares.values())
    ends = itertools.accumulate(shares.values())
    cuts = [rows.shape[1] * end // of_all for end in ends]
    return dict(zip(shares, jnp.split(rows, cuts[:-1], axis=1), strict=True))


def join_names(names: Iterable[str]) -> str:
    """Return the parameter name of joined matrices."""
    return "_".join(names)


def norm(config: DecoderConfig, x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """Apply the norm `name` over the last axis; return `x` if the layer has none.

    RMSNorm in float32. Centred norms subtract the mean first, and may add a bias. The
    weights may have axes for heads before the last one.
    """
    if name not in weights:
        return x
    wide, weight = x.astype(jnp.float32), weights[name]
    epsilon, offset = config.norm_epsilon, config.norm_offset
    if config.post_norm_epsilon is not None and name.endswith("post_norm"):
        epsilon = config.post_norm_epsilon
    if config.final_norm_offset is not None and name == "final_norm":
        offset = config.final_norm_offset
    if config.has_centred_norms:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = scale_to_unit(wide, epsilon)
    weight = jnp.expand_dims(weight, range(x.ndim - weight.ndim))
    if (bias := weights.get(f"{name}_bias")) is not None:
        # Rounded once, after the sum.
        bias = jnp.expand_dims(bias, range(x.ndim - 1)).astype(jnp.float32)
        return (normed * weight.astype(jnp.float32) + bias).astype(x.dtype)
    if offset:
        # Rounded once, after the product: weights are near 0, not near 1.
        weight = weight.astype(jnp.float32) + offset
        return (normed * weight).astype(x.dtype)
    return normed.astype(x.dtype) * weight


def norm_plainly(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Scale to unit root mean square over the last axis, without weights."""
    normed = scale_to_unit(x.astype(jnp.float32), config.norm_epsilon)
    return normed.astype(x.dtype)


def scale_to_unit(wide: jax.Array, epsilon: float) -> jax.Array:
    """Scale f32[...] to unit root mean square over the last axis."""
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(mean_square + epsilon)


def perceptron(
    config: DecoderConfig, x: jax.Array, weights: Weights, prefix: str = ""
) -> jax.Array:
    """Apply the gated MLP, down(activation(gate(x)) * up(x)).

    Without gates: down(activation(up(x))).
    """
    gate_scale, scale = config.mlp_scales
    shares = {f"{prefix}gate": 1, f"{prefix}up": 1}
    gate, up = map(linear_each(x, weights, shares).get, shares)
    gate = gate if gate is None else gate * gate_scale
    hidden = activate(config, gate, up)
    return linear(hidden, weights, f"{prefix}down") * scale


def activate(config: DecoderConfig, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """Return the input of an MLP's last matrix.

    Args:
        config: the model's configuration.
        gate: output of the gate projection; None without gates.
        up: output of the up projection.
    """
    if gate is None:
        return bend(config, up)
    if config.swiglu_limits:
        slope, bound = config.swiglu_limits
        gate, up = jnp.minimum(gate, bound), jnp.clip(up, -bound, bound)
        return gate * jax.nn.sigmoid(slope * gate) * (up + 1)
    return bend(config, gate) * up


def cap(x: jax.Array, bound: float | None) -> jax.Array:
    """Bound values to (-bound, bound) by tanh; None for no bound."""
    return x if bound is None else bound * jnp.tanh(x / bound)


def bend(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Apply the activation function."""
    if config.activation == "gelu_pytorch_tanh":
        return jax.nn.gelu(x, approximate=True)
    if config.activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.silu(x)
