"""The attention of tunix's models, over pages: what each architecture does around it.

Everything but the attention of a layer is the model's own code (`paged_model`). What
is written out here follows the `Attention` of each model: its projections and norms,
its rotary embedding with the arguments it is called with there, and its output.

    R  token rows, a batch of R texts of one token each
    E  width of the model
    H, K, D  query heads, kv heads, head dim
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

# Queries [R, 1, H, D], keys and values [R, 1, K, D].
Projections = tuple[jax.Array, jax.Array, jax.Array]


class Architecture(NamedTuple):
    """What stands before and after the attention in the layers of a model."""

    # Of the module, hidden [R, 1, E] and positions i32[R, 1].
    project: Callable[[Any, jax.Array, jax.Array], Projections]
    # Of the module: from heads [R, 1, H, D] to [R, 1, E].
    output: Callable[[Any], Callable[[jax.Array], jax.Array]]
    # Of the module: what `jkv.attend` is told.
    options: Callable[[Any], dict[str, Any]]


def find_architecture(module: Any) -> Architecture:
    """Return what is known of a model, or say which ones are."""
    for known, architecture in _ARCHITECTURES.items():
        if isinstance(module, known):
            return architecture
    names = ", ".join(known.__name__ for known in _ARCHITECTURES)
    raise ValueError(
        f"JkvRollout runs {names} of tunix.models; got {type(module).__module__}."
        f"{type(module).__qualname__}: use another rollout_engine for it"
    )


def _project_qwen3(
    attention: Any, hidden: jax.Array, positions: jax.Array
) -> Projections:
    queries = attention.q_norm(attention.q_proj(hidden))
    keys = attention.k_norm(attention.k_proj(hidden))
    # As in the model, which does not hand its `rope_theta` on.
    size = attention.head_dim
    queries = qwen3.apply_rope(queries, positions, head_dim=size)
    keys = qwen3.apply_rope(keys, positions, head_dim=size)
    return queries, keys, attention.v_proj(hidden)


def _project_llama3(
    attention: Any, hidden: jax.Array, positions: jax.Array
) -> Projections:
    size = attention.head_dim
    queries = llama3.apply_rope(attention.q_proj(hidden), positions, head_dim=size)
    keys = llama3.apply_rope(attention.k_proj(hidden), positions, head_dim=size)
    return queries, keys, attention.v_proj(hidden)


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
    qwen3.Qwen3: Architecture(
        _project_qwen3, lambda a: a.o_proj, lambda a: dict(scale=a.scale)
    ),
    llama3.Llama3: Architecture(
        _project_llama3, lambda a: a.o_proj, lambda a: dict(scale=a.scale)
    ),
    gemma.Gemma: Architecture(
        _project_gemma, lambda a: a.attn_vec_einsum, _gemma_options
    ),
    gemma3.Gemma3: Architecture(
        _project_gemma3, lambda a: a.attn_vec_einsum, _gemma3_options
    ),
}
