"""New weights for programs that are compiled: the same shapes, at the same places."""

from typing import Any

import jax
import numpy as np

from jkv.sharding.processes import is_shared
from jkv.status import UsageError
from jkv.storage.placement import put


def replace_weights(name: str, old: Any, new: Any) -> Any:
    """Return new weights as programs take them that were compiled for the old ones."""
    check_weights(name, old, new)
    paths, _ = jax.tree_util.tree_flatten_with_path(old)
    leaves = [
        _put_like(name + jax.tree_util.keystr(path), leaf, each)
        for (path, leaf), each in zip(paths, jax.tree.leaves(new), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def check_weights(
    name: str,  # what to call them in an error
    old: Any,  # a pytree, in use
    new: Any,  # a pytree of the same structure, shapes and dtypes
) -> None:
    """Refuse weights that programs are not compiled for, by the first that differs."""
    olds, news = (
        {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        for leaves, _ in map(jax.tree_util.tree_flatten_with_path, (old, new))
    )
    for path in sorted(olds.keys() ^ news.keys()):
        others = "the new ones" if path in olds else "those of the engine"
        raise UsageError(f"{name}{path} is not among {others}")
    structure: Any = jax.tree.structure(old)
    new_structure: Any = jax.tree.structure(new)
    if structure != new_structure:
        raise UsageError(
            f"{name} must have the structure that the engine was made with, "
            f"{structure}; got {new_structure}"
        )
    for path, leaf in olds.items():
        expected, got = jax.typeof(leaf), jax.typeof(news[path])
        if _describe(expected) != _describe(got):
            raise UsageError(f"{name}{path} is {expected} in this engine, got {got}")


def _put_like(name: str, old: Any, new: Any) -> Any:
    """Return an array where another is, as a copy if it is elsewhere."""
    if isinstance(old, jax.Array) and old.committed:
        has_all = not is_shared(new)
        if is_shared(old.sharding) and has_all:
            return put(np.asarray(new), old.sharding)
        return jax.device_put(new, old.sharding)
    if isinstance(new, jax.Array) and new.committed:
        raise UsageError(
            f"{name} is committed to {new.sharding}, and the weights that the engine "
            f"was made with are not: programs would be compiled again. Make the engine "
            f"with weights that jax.device_put has put where later ones will be"
        )
    return new


def _describe(kind: Any) -> tuple[Any, ...]:
    return kind.shape, kind.dtype, kind.weak_type
