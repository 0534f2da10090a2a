"""Replacement of weights for compiled programs: same shapes, same placement."""

from typing import Any

import jax
import numpy as np

from jkv.sharding.storage_sharding import is_shared
from jkv.status import UsageError
from jkv.storage.leaves import put, put_numpy


def replace_weights(name: str, old: Any, new: Any) -> Any:
    """Return the new weights with the placement of the old ones."""
    check_weights(name, old, new)
    paths, _ = jax.tree_util.tree_flatten_with_path(old)
    leaves = [
        _put_like(name + jax.tree_util.keystr(path), leaf, each)
        for (path, leaf), each in zip(paths, jax.tree.leaves(new), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def check_weights(
    name: str,  # argument name for errors
    old: Any,  # a pytree, in use
    new: Any,  # a pytree of the same structure, shapes and dtypes
) -> None:
    """Raise for the first difference in structure, shape or dtype."""
    olds, news = (
        {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        for leaves, _ in map(jax.tree_util.tree_flatten_with_path, (old, new))
    )
    for path in sorted(olds.keys() ^ news.keys()):
        others = "the new weights" if path in olds else "the engine's weights"
        raise UsageError(f"{name}{path} is missing in {others}; pass the same tree")
    structure: Any = jax.tree.structure(old)
    new_structure: Any = jax.tree.structure(new)
    if structure != new_structure:
        raise UsageError(
            f"{name} must have the structure of the engine's weights, {structure}, got "
            f"{new_structure}; pass the same tree"
        )
    for path, leaf in olds.items():
        expected, got = jax.typeof(leaf), jax.typeof(news[path])
        if _describe(expected) != _describe(got):
            raise UsageError(f"{name}{path} must be {expected}, got {got}; cast it")


def _put_like(name: str, old: Any, new: Any) -> Any:
    """Return an array with the sharding of another, as a copy if it differs."""
    if isinstance(old, jax.Array) and old.committed:
        has_all = not is_shared(new)
        if is_shared(old.sharding) and has_all:
            return put(np.asarray(new), old.sharding)
        return jax.device_put(new, old.sharding)
    if isinstance(new, jax.Array) and new.committed:
        raise UsageError(
            f"{name} must be uncommitted like the engine's weights, got one committed "
            f"to {new.sharding}, which would recompile the programs; create the engine "
            f"with weights placed there by jax.device_put"
        )
    return put_numpy(new, None) if isinstance(old, jax.Array) else new


def _describe(kind: Any) -> tuple[Any, ...]:
    return kind.shape, kind.dtype, kind.weak_type
