"""init: a fresh cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.dtypes import STORAGE_NAMES
from jkv.state import Cache, Metadata, PrefixIndex, Ring


def init(
    config: CacheConfig,
    *,
    storage: bool = True,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> Cache:
    """Return a fresh cache: every block free, no sequence open.

    Args:
      config: the sizes.
      storage: False leaves the K/V arrays empty (zero layers): the same verbs run on
        the metadata alone, to simulate a schedule or to test one.
      device: where the arrays go, a device or a sharding; default JAX's own choice.

    Returns:
      A `Cache`. Free blocks and sequence ids stand in the order 0, 1, 2, ...

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=4,
      ...     max_sequences=2, max_context_length=16), storage=False)
      >>> int(jkv.num_free_blocks(cache)), cache.keys.size
      (4, 0)
    """
    arrays = config.arrays

    def full(name: str, value: int | bool = 0) -> jax.Array:
        shape, dtype = arrays[name].shape, arrays[name].dtype
        return jnp.full(shape, value, dtype, device=device)

    def pool(name: str) -> Any:
        if name not in arrays:
            return None
        shape, dtype = arrays[name].shape, arrays[name].dtype
        return jnp.zeros(shape if storage else (0, *shape[1:]), dtype, device=device)

    def ring(name: str, size: int) -> Ring:
        room = arrays[f"{name}.ids"].shape[0]
        return Ring(
            ids=jnp.arange(room, dtype=jnp.int32, device=device),
            bounds=jnp.array([0, size, size, size], jnp.int32, device=device),
        )

    def prefix_index() -> PrefixIndex:
        arange = jnp.arange(config.num_blocks, dtype=jnp.int32, device=device)
        return PrefixIndex(
            buckets=full("prefix.buckets", config.num_blocks),
            children=full("prefix.children", config.num_blocks),
            hashes=full("prefix.hashes"),
            parents=full("prefix.parents", config.num_blocks),
            salts=full("prefix.salts"),
            positions=arange,
            committed=full("prefix.committed"),
            sequence_salts=full("prefix.sequence_salts"),
            epochs=full("prefix.epochs"),
        )

    metadata = Metadata(
        block_tables=full("block_tables", config.num_blocks),
        context_lengths=full("context_lengths"),
        num_mapped_blocks=full("num_mapped_blocks"),
        is_open=full("is_open", False),
        reference_counts=full("reference_counts"),
        free_blocks=ring("free_blocks", config.num_blocks),
        free_sequences=ring("free_sequences", config.max_sequences),
        created=full("created"),
        last_used=full("last_used"),
        num_uses=full("num_uses"),
        counters=full("counters"),
        tokens=full("tokens", -1) if "tokens" in arrays else None,
        prefix=prefix_index() if config.prefix_caching else None,
        block_size=config.block_size,
        max_context_length=config.max_context_length,
    )
    return Cache(
        metadata=metadata,
        **{name: pool(name) for name in STORAGE_NAMES},
        dtype=np.dtype(config.dtype),
        latent_value_dim=config.value_head_dim if config.values_in_keys else None,
    )
