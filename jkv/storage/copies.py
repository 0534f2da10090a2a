"""Copies of whole blocks in storage: the tails of sequences that part ways."""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import lazy_chex as chex
from jkv.metadata.tails import BlockCopies
from jkv.sharding.loops import fori_loop
from jkv.state import Cache, Metadata


def with_copies(cache: Cache, metadata: Metadata, copies: BlockCopies | None) -> Cache:
    """Return the cache with new metadata and the tail blocks copied, if there are any.

    Outside jit there is no pass over the storage if nothing is to be copied.
    """
    cache = cache.with_metadata(metadata)
    if copies is None or cache.num_layers == 0:
        return cache
    if not isinstance(copies.target, jax.core.Tracer):
        if not np.any(np.asarray(copies.target) < cache.num_blocks):
            return cache
    return cache.with_storage(_copy_blocks(cache.storage, copies))


@jax.jit
def _copy_blocks(
    storage: dict[str, jax.Array], copies: BlockCopies
) -> dict[str, jax.Array]:
    """Copy blocks in all layers; every source is read before any target is written."""
    chex.assert_equal_shape([copies.source, copies.target])
    chex.assert_type([copies.source, copies.target], jnp.int32)
    chex.assert_equal_shape_prefix(list(storage.values()), 4)

    def copy(pool: jax.Array) -> jax.Array:
        blocks = pool.at[:, copies.source].get(mode="clip")
        return pool.at[:, copies.target].set(blocks, mode="drop")

    # A loop of no or one trip, as a call with nothing to copy is common. Unlike a
    # conditional it leaves the storage in place.
    any_copy = jnp.any(copies.target < storage["keys"].shape[1]).astype(jnp.int32)
    return fori_loop(
        jnp.int32(0),
        any_copy,
        lambda _, pools: jax.tree.map(copy, pools),
        storage,
    )
