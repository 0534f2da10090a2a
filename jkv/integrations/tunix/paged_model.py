"""A model of tunix as a `jkv.Model`: its own layers, whose attention reads pages.

The model runs its own `__call__`: embedding, norms, perceptrons or experts, residuals,
head. Two things of the copy that a trace merges are exchanged: the attention of every
layer, and the last norm, which is handed only the rows whose logits are asked for. The
rows of a step are texts of one token to the model, [R, 1]; `positions` says where each
stands.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jkv
from jkv.integrations.tunix.attention import Architecture, find_architecture


class Params(NamedTuple):
    """What a step of the model needs beside the tokens."""

    weights: nnx.State[Any, Any]  # the trainer's own arrays
    temperature: jax.Array | float  # f32[], logits are divided by it


class Pages(NamedTuple):
    """What a layer of the model keeps of a token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Any

    def configure(self, cache_dtype: Any | None, **sizes: Any) -> jkv.CacheConfig:
        """Return a configuration, in the model's own dtype unless another is given."""
        fields = self._asdict() | {"dtype": cache_dtype or self.dtype}
        return jkv.CacheConfig(**fields, **sizes)


class PagedModel:
    """The graph of a model; the weights come with every call.

    A jitted loop takes it as a static argument by its identity: the configurations of
    tunix's models have no hash.
    """

    def __init__(self, graph: nnx.GraphDef[Any]) -> None:
        self._graph = graph

    def __call__(
        self, params: Params, tokens: jax.Array, cache: jkv.Cache, batch: jkv.Batch
    ) -> tuple[jax.Array, jkv.Cache]:
        """Run the model once, as `jkv.Model`."""
        module = nnx.merge(self._graph, params.weights)
        step = _Step(cache, batch)
        _exchange_attention(module, step)
        norm = module.final_norm
        module.final_norm = lambda hidden: norm(
            jnp.take(hidden, batch.last_rows, axis=0, mode="clip")
        )
        logits, _ = module(tokens[:, None], batch.positions[:, None], None, None)
        return logits[:, 0].astype(jnp.float32) / params.temperature, step.cache

    def find_pages(self, weights: nnx.State[Any, Any]) -> Pages:
        """Return what the layers keep of a token; the model's own shapes tell it."""

        def project(weights: nnx.State[Any, Any]) -> tuple[jax.Array, ...]:
            module = nnx.merge(self._graph, weights)
            architecture = find_architecture(module)
            token = jnp.zeros((1, 1), jnp.int32)
            hidden = module.embedder.encode(token)
            return architecture.project(module.layers[0].attn, hidden, token)

        _, keys, _ = jax.eval_shape(project, weights)
        num_layers = len(nnx.merge(self._graph, weights).layers)
        return Pages(num_layers, keys.shape[2], keys.shape[3], keys.dtype)


class _Step:
    """The cache on its way through the layers of one trace."""

    def __init__(self, cache: jkv.Cache, batch: jkv.Batch) -> None:
        self.cache = cache
        self.batch = batch

    def attend(
        self, layer: int, projections: tuple[jax.Array, ...], options: dict[str, Any]
    ) -> jax.Array:
        queries, keys, values = (rows[:, 0] for rows in projections)
        self.cache = jkv.write(self.cache, layer, self.batch, keys, values)
        heads = jkv.attend(self.cache, layer, self.batch, queries, **options)
        return heads[:, None]


class _PagedAttention:
    """What a layer calls in place of its attention, with the same arguments."""

    def __init__(
        self, attention: Any, architecture: Architecture, layer: int, step: _Step
    ) -> None:
        self._attention = attention
        self._architecture = architecture
        self._layer = layer
        self._step = step

    def __call__(
        self,
        hidden: jax.Array,  # [R, 1, E]
        positions: jax.Array,  # i32[R, 1]
        *_dense: object,
        **_packing: object,
    ) -> tuple[None, jax.Array]:
        attention, architecture = self._attention, self._architecture
        projections = architecture.project(attention, hidden, positions)
        options = architecture.options(attention)
        heads = self._step.attend(self._layer, projections, options)
        return None, architecture.output(attention)(heads)


def _exchange_attention(module: Any, step: _Step) -> None:
    architecture = find_architecture(module)
    for i, layer in enumerate(module.layers):
        # Nothing is differentiated, and a rematerialised layer is a trace of its own,
        # which the cache cannot leave.
        layer.config = dataclasses.replace(layer.config, remat_config=None)
        layer.attn = _PagedAttention(layer.attn, architecture, i, step)
