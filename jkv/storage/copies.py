"""Copies of whole blocks in storage: the tails of sequences that part ways."""

import jax
import jax.numpy as jnp

from jkv.metadata.tails import BlockCopies
from jkv.state import Cache, Metadata


def with_copies(cache: Cache, metadata: Metadata, copies: BlockCopies | None) -> Cache:
    """Return the cache with new metadata and the tail blocks copied."""
    cache = cache.with_metadata(metadata)
    if copies is None:
        return cache
    traced = isinstance(copies.target, jax.core.Tracer)
    if cache.num_layers == 0 or not (
        traced or bool(jnp.any(copies.target < cache.num_blocks))
    ):
        return cache  # outside jit: no pass over the storage where nothing is copied
    return cache.with_storage(_copy_blocks(cache.storage, copies))


@jax.jit
def _copy_blocks(
    storage: dict[str, jax.Array], copies: BlockCopies
) -> dict[str, jax.Array]:
    """Copy blocks in all layers; every source is read before any target is written."""

    def copy(pool: jax.Array) -> jax.Array:
        blocks = pool.at[:, copies.source].get(mode="clip")
        return pool.at[:, copies.target].set(blocks, mode="drop")

    # A loop of no or one trip, as a call with nothing to copy is common. Unlike a
    # conditional it leaves the storage in place.
    any_copy = jnp.any(copies.target < storage["keys"].shape[1]).astype(jnp.int32)
    return jax.lax.fori_loop(
        jnp.int32(0),
        any_copy,
        lambda _, pools: jax.tree.map(copy, pools),
        storage,
    )
