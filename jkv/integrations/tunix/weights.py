"""The weights of a rollout: the trainer's own, or a copy of them somewhere else."""

import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import reshard


def put_module(model: nnx.Module, mesh: Mesh | None, dtype: Any | None) -> nnx.Module:
    """Return the model itself if it stands where it should, else a copy.

    Without a mesh, or devices in it, that is where it is; without a dtype they have
    theirs. A copy is put where its annotations say.
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
    model: nnx.Module,  # changed in place
    params: Any,  # state of the trainer's model
    filter_types: tuple[Any, ...] | None,  # which variables `params` has; None is all
) -> None:
    """Give a model new weights, in the dtypes of its own, and where these are."""
    ours = nnx.state(model) if filter_types is None else nnx.state(model, filter_types)
    given = _by_path(params)
    differing = sorted(given.keys() ^ _by_path(ours).keys())
    if differing:
        raise ValueError(
            f"the new weights are not those of the model; {len(differing)} are in one "
            f"of the two alone, such as {differing[0]}"
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
    """Return floats in the dtype; what is no float, or has it, as it was given."""
    is_other = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype
    return leaf.astype(dtype) if is_other else leaf


class Version:
    """Tells whether weights are the arrays that they were when last asked.

    A trainer that shares its weights with the rollout changes them without a word. An
    array is immutable, so other weights are other arrays. None is kept alive here.
    """

    def __init__(self) -> None:
        self.number = 0
        self._seen: list[weakref.ref[jax.Array]] = []

    def look_at(self, weights: nnx.State[Any, Any]) -> int:
        """Return the number of the weights, another one if they have changed."""
        leaves = jax.tree.leaves(weights)
        pairs = zip(self._seen, leaves, strict=False)
        is_same = len(self._seen) == len(leaves)
        if not (is_same and all(seen() is leaf for seen, leaf in pairs)):
            self.number += 1
            self._seen = [weakref.ref(leaf) for leaf in leaves]
        return self.number

    def forget(self) -> None:
        """Take whatever comes next for other weights."""
        self._seen = []
