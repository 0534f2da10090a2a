"""init: a fresh cache."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.layout import ArrayLayout, lay_out_metadata, lay_out_storage
from jkv.sharding.heads import copies_of
from jkv.state import Cache, Metadata
from jkv.storage import fields
from jkv.storage.placement import Placement, choose_placements, place


def init(
    config: CacheConfig,
    *,
    storage: bool = True,
    device: Placement = None,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Cache:
    """Return a fresh cache: every block free, no sequence open.

    Args:
      config: the sizes.
      storage: False leaves the K/V arrays empty (zero layers): the same verbs run on
        the metadata alone, to simulate a schedule or to test one.
      device: where the arrays go, a device or a sharding; default JAX's own choice.
      mesh: devices that the cache lies on, instead of `device`. The cache remembers it,
        so the verbs work with and without `jax.set_mesh`.
      heads: the mesh axis over which the kv heads of keys and values are spread. The
        metadata, and everything if it is None, is on every device. Where the axis has
        more devices than there are kv heads, each head is held several times.
      context: the mesh axis over which the tokens of each block are spread, so that a
        sequence lies on all of its devices: each attends to its part. The block size
        must be a multiple of their number.
      pools: the mesh axis of which each rank has a pool of these sizes, with metadata
        of its own: `generate` deals prompts to them, `over_pools` calls verbs on them.

    Returns:
      A `Cache`. Free blocks and sequence ids stand in the order 0, 1, 2, ...

    Raises:
      ValueError: if the devices of an axis cannot share the kv heads, or the tokens of
        a block, evenly, or for arguments that exclude each other.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=4,
      ...     max_sequences=2, max_context_length=16), storage=False)
      >>> int(jkv.num_free_blocks(cache)), cache.keys.size
      (4, 0)
    """
    sizes = config.sizes if storage else config.sizes._replace(num_layers=0)
    axes = {"heads": heads, "context": context, "pools": pools}
    where = choose_placements(config, device, mesh, **axes)
    copies = copies_of(where.sharding)
    stored = sizes._replace(num_kv_heads=sizes.num_kv_heads * copies)
    ranks = () if where.pools is None else (where.pools.num_ranks,)
    storage_arrays = {
        name: jnp.zeros((*ranks, *pool.shape), pool.dtype, device=where.storage)
        for name, pool in lay_out_storage(stored).items()
    }
    # Under jit, what numpy makes would become constants of the program.
    traced = isinstance(storage_arrays["keys"], jax.core.Tracer)
    numpy = jnp if traced else np
    arrays = {
        name: numpy.broadcast_to(_fill(array, numpy), (*ranks, *array.shape))
        for name, array in lay_out_metadata(sizes).items()
    }
    put = jax.device_put if traced else place
    arrays = put(arrays, where.metadata)
    constants: dict[str, Any] = {
        "block_size": config.block_size,
        "max_context_length": config.max_context_length,
    }
    if config.sliding_window is not None:
        constants["window.length"] = config.sliding_window
        constants["window.num_sink_tokens"] = config.num_sink_tokens
    return Cache(
        metadata=fields.build(Metadata, arrays | constants),
        keys=storage_arrays["keys"],
        values=storage_arrays.get("values"),
        key_scales=storage_arrays.get("key_scales"),
        value_scales=storage_arrays.get("value_scales"),
        dtype=sizes.dtype,
        latent_value_dim=sizes.value_head_dim if sizes.values_in_keys else None,
        sharding=where.sharding,
        pools=where.pools,
    )


def _fill(array: ArrayLayout, numpy: ModuleType) -> Any:
    """Make an array as a fresh cache has it, in numpy or in `jax.numpy`."""
    if isinstance(array.fill, range):
        return numpy.arange(len(array.fill), dtype=array.dtype)
    return numpy.broadcast_to(numpy.asarray(array.fill, array.dtype), array.shape)
