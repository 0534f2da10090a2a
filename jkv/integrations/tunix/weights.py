"""Weights of a rollout: the trainer's arrays, or a copy on another mesh."""

import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import reshard


def put_module(model: nnx.Module, mesh: Mesh | None, dtype: Any | None) -> nnx.Module:
    """Return the model, or a copy on `mesh` or in `dtype` if these differ.

    Without a mesh the model stays in place; without a dtype it keeps its own. A copy is
    sharded by the model's annotations.
    """
    if dtype is not None:
        graph, state = nnx.split(model)
        cast = jax.tree.map(partial(_cast, dtype=dtype), state)
        pairs = zip(jax.tree.leaves(cast), jax.tree.leaves(state), strict=True)
        if any(new is not old for new, old in pairs):
            model = nnx.merge(graph, cast)
    if mesh is None or mesh.empty:
        return model
    return reshard.reshard_model_to_mesh(model, mesh)


def update(
    model: nnx.Module,  # updated in place
    params: Any,  # state of the trainer's model
    filter_types: tuple[Any, ...] | None,  # variables in `params`; None for all
) -> None:
    """Update a model's weights, keeping its dtypes and shardings."""
    ours = nnx.state(model) if filter_types is None else nnx.state(model, filter_types)
    given = _by_path(params)
    differing = sorted(given.keys() ^ _by_path(ours).keys())
    if differing:
        raise ValueError(
            f"params must match the model's weights; {len(differing)} are missing or "
            f"extra, such as {differing[0]}"
        )
    weights = jax.tree_util.tree_map_with_path(
        lambda path, old: _cast(given[jax.tree_util.keystr(path)], old.dtype), ours
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, ours)
    if jax.tree.map(lambda leaf: leaf.sharding, weights) != shardings:
        weights = reshard.reshard_pytree(weights, shardings)
    nnx.update(model, weights)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _cast(leaf: jax.Array, dtype: Any) -> jax.Array:
    """Cast floating-point arrays to `dtype`; return others unchanged."""
    is_other = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype
    return leaf.astype(dtype) if is_other else leaf


class Version:
    """A counter of weight changes, by identity of the arrays.

    A trainer that shares its weights with the rollout updates them without notice. JAX
    arrays are immutable, so changed weights are other arrays. Only weak references are
    kept.
    """

    def __init__(self) -> None:
        self.number = 0
        self._seen: list[weakref.ref[jax.Array]] = []

    def look_at(self, weights: nnx.State[Any, Any]) -> int:
        """Return the version of the weights, incremented if they changed."""
        leaves = jax.tree.leaves(weights)
        pairs = zip(self._seen, leaves, strict=False)
        is_same = len(self._seen) == len(leaves)
        if not (is_same and all(seen() is leaf for seen, leaf in pairs)):
            self.number += 1
            self._seen = [weakref.ref(leaf) for leaf in leaves]
        return self.number

    def forget(self) -> None:
        """Treat the next weights as changed."""
        self._seen = []
