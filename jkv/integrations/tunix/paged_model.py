"""A tunix model as a `jkv.Model`, with paged attention in its own layers.

The model runs its own `__call__`: embedding, norms, MLPs or experts, residuals, head.
Two parts of the merged copy are replaced: the attention of every layer, and the last
norm, which receives only the rows whose logits are needed. The rows of a step are a
batch of sequences of one token, [R, 1], with their positions. The replaced attention
follows the `Attention` of each architecture in its projections, norms, rotary embedding
and output.

    R  token rows, a batch of R sequences of one token each
    E  width of the model
    H, K, D  query heads, kv heads, head dim
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

import jkv

# Queries [R, 1, H, D], keys and values [R, 1, K, D].
Projections = tuple[jax.Array, jax.Array, jax.Array]


class Params(NamedTuple):
    """Arguments of a model step besides the tokens."""

    weights: nnx.State[Any, Any]  # the trainer's arrays
    temperature: jax.Array | float  # f32[], divisor of the logits


class PagedModel:
    """A model's graph definition; the weights are passed with every call.

    Jitted loops take it as a static argument, hashed by identity, since the
    configurations of tunix's models are not hashable.
    """

    def __init__(self, graph: nnx.GraphDef[Any]) -> None:
        self._graph = graph
        self._model = jkv.model_of(self._run, rows="batch")

    def __call__(
        self, params: Params, tokens: jax.Array, cache: jkv.Cache, batch: jkv.Batch
    ) -> tuple[jax.Array, jkv.Cache]:
        """Run one step of the model, as a `jkv.Model`."""
        logits, cache = self._model(params.weights, tokens, cache, batch)
        return logits / params.temperature, cache

    def _run(
        self,
        weights: nnx.State[Any, Any],
        tokens: jax.Array,  # i32[R, 1]
        positions: jax.Array,  # i32[R, 1]
        step: jkv.Step,
    ) -> jax.Array:
        """Run the module with the attention of each layer replaced."""
        module = nnx.merge(self._graph, weights)
        known = find_architecture(module)
        for layer in module.layers:
            # Rematerialization would trace the layer separately; no gradients are
            # needed here.
            layer.config = dataclasses.replace(layer.config, remat_config=None)
            layer.attn = functools.partial(known.attend, layer.attn, step)
        norm = module.final_norm
        module.final_norm = lambda hidden: norm(step.last(hidden)[:, None])
        logits: jax.Array = module(tokens, positions, None, None)[0]
        return logits

    def configure(
        self, weights: nnx.State[Any, Any], dtype: Any | None, **sizes: Any
    ) -> jkv.CacheConfig:
        """Return a one-block configuration with the model's shapes."""

        def project(weights: nnx.State[Any, Any]) -> Projections:
            module = nnx.merge(self._graph, weights)
            architecture = find_architecture(module)
            token = jnp.zeros((1, 1), jnp.int32)
            hidden = module.embedder.encode(token)
            return architecture.project(module.layers[0].attn, hidden, token)

        _, keys, _ = jax.eval_shape(project, weights)
        return jkv.CacheConfig(
            num_layers=len(nnx.merge(self._graph, weights).layers),
            num_kv_heads=keys.shape[2],
            head_dim=keys.shape[3],
            dtype=dtype or keys.dtype,
            num_blocks=1,
            max_sequences=1,
            max_context_length=1,
            **sizes,
        )


class Architecture(NamedTuple):
    """Projections and output around the attention of an architecture."""

    # attention, hidden [R, 1, E], positions i32[R, 1] -> projections.
    project: Callable[[Any, jax.Array, jax.Array], Projections]
    # attention -> function from heads [R, 1, H, D] to [R, 1, E].
    output: Callable[[Any], Callable[[jax.Array], jax.Array]]
    # attention -> options of `jkv.attend`.
    options: Callable[[Any], dict[str, Any]]

    def attend(
        self,
        attention: Any,  # the layer's attention, called with the same arguments
        step: jkv.Step,
        hidden: jax.Array,  # [R, 1, E]
        positions: jax.Array,  # i32[R, 1]
        *_dense: object,
        **_packing: object,
    ) -> tuple[None, jax.Array]:
        """Return the results of a layer's attention, from the cache."""
        rows = self.project(attention, hidden, positions)
        heads = step.attend(*rows, **self.options(attention))
        return None, self.output(attention)(heads)


def find_architecture(module: Any) -> Architecture:
    """Return the architecture of a model; raise for an unsupported one."""
    for known, architecture in _ARCHITECTURES.items():
        if isinstance(module, known):
            return architecture
    names = ", ".join(known.__name__ for known in _ARCHITECTURES)
    raise ValueError(
        f"rollout_actor must be one of {names} of tunix.models, got "
        f"{type(module).__module__}.{type(module).__qualname__}; use another "
        f"rollout_engine"
    )


def _of_projections(model: ModuleType) -> Architecture:
    """Return the architecture of Qwen3, with query and key norms, or Llama3."""

    def project(attention: Any, hidden: jax.Array, positions: jax.Array) -> Projections:
        queries, keys = attention.q_proj(hidden), attention.k_proj(hidden)
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        # Without the configured `rope_theta`, as in tunix's models.
        size = attention.head_dim
        queries, keys = (
            model.apply_rope(each, positions, head_dim=size) for each in (queries, keys)
        )
        return queries, keys, attention.v_proj(hidden)

    return Architecture(project, lambda a: a.o_proj, lambda a: dict(scale=a.scale))


def _project_gemma(
    attention: Any, hidden: jax.Array, positions: jax.Array
) -> Projections:
    queries, keys, values = _split_gemma(attention, hidden)
    size = attention.head_dim
    queries = gemma.apply_rope(queries, positions, head_dim=size)
    keys = gemma.apply_rope(keys, positions, head_dim=size)
    return queries, keys, values


def _project_gemma3(
    attention: Any, hidden: jax.Array, positions: jax.Array
) -> Projections:
    queries, keys, values = _split_gemma(attention, hidden)
    rotary = dict(
        head_dim=attention.head_dim,
        base_frequency=attention.rope_base_frequency,
        scale_factor=attention.rope_scale_factor,
    )
    queries = gemma3.apply_rope(attention._query_norm(queries), positions, **rotary)
    keys = gemma3.apply_rope(attention._key_norm(keys), positions, **rotary)
    return queries, keys, values


def _split_gemma(attention: Any, hidden: jax.Array) -> Projections:
    if attention.use_qkv_einsum:
        queries, keys, values = attention.qkv_einsum(hidden)
    else:
        queries = attention.q_einsum(hidden)
        keys, values = attention.kv_einsum(hidden)
    return queries, keys, values


def _gemma_options(attention: Any) -> dict[str, Any]:
    return dict(
        scale=attention.head_dim**-0.5,
        window=_gemma_window(attention),
        soft_cap=attention.attn_logits_soft_cap,
    )


def _gemma3_options(attention: Any) -> dict[str, Any]:
    return dict(scale=attention.query_pre_attn_scalar, window=_gemma_window(attention))


def _gemma_window(attention: Any) -> int | None:
    is_local = attention.attn_type.name == "LOCAL_SLIDING"
    return attention.sliding_window_size if is_local else None


_ARCHITECTURES: dict[type, Architecture] = {
    qwen3.Qwen3: _of_projections(qwen3),
    llama3.Llama3: _of_projections(llama3),
    gemma.Gemma: Architecture(
        _project_gemma, lambda a: a.attn_vec_einsum, _gemma_options
    ),
    gemma3.Gemma3: Architecture(
        _project_gemma3, lambda a: a.attn_vec_einsum, _gemma3_options
    ),
}
