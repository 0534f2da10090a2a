"""Copies of kv heads: where a mesh axis has more devices than the model has of them."""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.sharding.resharding import spread
from jkv.sharding.storage_sharding import StorageSharding


def copies_of(sharding: StorageSharding | None) -> int:
    """Return how often a pool, as it is seen here, holds the same head."""
    if sharding is None or sharding.heads not in sharding.open_axes:
        return 1
    return sharding.copies


def heads_on_device(sharding: StorageSharding | None, num_stored: int) -> int:
    """Return how many kv heads a device has of those stored in a pool as seen here."""
    if sharding is None or sharding.heads not in sharding.open_axes:
        return num_stored
    return num_stored // int(sharding.mesh.shape[sharding.heads])


def with_copies_of_heads(
    sharding: StorageSharding | None, array: jax.Array, head_axis: int
) -> jax.Array:
    """Return an array with each head as often as the pool has it, side by side."""
    copies = copies_of(sharding)
    return array if copies == 1 else jnp.repeat(array, copies, axis=head_axis)


def without_copies_of_heads(
    sharding: StorageSharding | None, array: Any, head_axis: int
) -> Any:
    """Return an array, of JAX or numpy, with each head once, and then whole."""
    copies = copies_of(sharding)
    if sharding is None or sharding.heads is None or copies == 1:
        return array
    if isinstance(array, jax.Array):
        array = spread(array, sharding.mesh, sharding.heads, None)
    return array[(slice(None),) * head_axis + (slice(None, None, copies),)]
