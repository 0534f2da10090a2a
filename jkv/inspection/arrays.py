"""The arrays of a cache by name."""

import jax

from jkv.state import Cache


def named_arrays(cache: Cache) -> dict[str, jax.Array]:
    """Return the arrays of metadata and storage by their names in a configuration."""
    parts = {"metadata": cache.metadata, "storage": cache.storage}
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): array
        for path, array in jax.tree_util.tree_leaves_with_path(parts)
    }
