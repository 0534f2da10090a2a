"""The weights of a rollout: the trainer's own, or a copy of them somewhere else."""

import weakref
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.rl import reshard
from tunix.rl import utils as rl_utils


def adopt(model: nnx.Module, mesh: Mesh | None, dtype: Any | None) -> nnx.Module:
    """Return the model itself if it stands where it should, else a copy.

    Args:
      model: the trainer's.
      mesh: where rollouts run; None, or a mesh without devices, is where the model is.
      dtype: of the weights; None is the dtype they have.

    Returns:
      `model`, or one with its own arrays, placed as their annotations say.
    """
    graph, state = nnx.split(model)
    given = {leaf.dtype for leaf in jax.tree.leaves(state)}
    if mesh is None or mesh.empty or rl_utils.get_pytree_mesh_info(state) == mesh:
        mesh = None
    if mesh is None and (dtype is None or given == {np.dtype(dtype)}):
        return model
    if dtype is not None:
        state = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
    if mesh is not None:
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec or PartitionSpec()),
            nnx.get_partition_spec(state),
        )
        state = reshard.reshard_pytree(state, shardings)
    return nnx.merge(graph, state)


def update(
    model: nnx.Module, params: Any, filter_types: tuple[Any, ...] | None
) -> None:
    """Give a model new weights, in the dtypes and the places of its own.

    Args:
      model: changed in place.
      params: state of the trainer's model.
      filter_types: which variables `params` has; None is all.

    Raises:
      ValueError: if they are not those of this model.
    """
    ours = nnx.state(model) if filter_types is None else nnx.state(model, filter_types)
    if str(jax.tree.structure(ours)) != str(jax.tree.structure(params)):
        raise ValueError(
            f"the new weights are not those of the model: it has "
            f"{jax.tree.structure(ours)}, got {jax.tree.structure(params)}"
        )
    params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, ours)
    old, new = ([a.sharding for a in jax.tree.leaves(t)] for t in (ours, params))
    if old != new:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, ours)
        params = reshard.reshard_pytree(params, shardings)
    nnx.update(model, params)


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
