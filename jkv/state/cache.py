"""The cache as a value: the metadata, and the large arrays of keys and values.

Symbols in shape comments as in `jkv.state.ownership`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from inspect import BoundArguments
from typing import Any, Protocol, Self

import jax
import numpy as np

from jkv.config.dtypes import STORAGE_NAMES
from jkv.config.units import human_bytes
from jkv.sharding.heads import copies_of
from jkv.sharding.pools import PoolSharding
from jkv.sharding.storage_sharding import StorageSharding
from jkv.state.batch import StepSizes
from jkv.state.ownership import Metadata, Ring


class Device(Protocol):
    """A `jax.Device`, which type checkers do not know: it is not written in Python."""

    @property
    def id(self) -> int:
        """Number among the devices of its platform."""
        ...

    @property
    def platform(self) -> str:
        """Such as "cpu" or "gpu"."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """Return the device's account of its memory, if it keeps one."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache:
    """A paged key/value cache. Make one with `init`; every verb returns a new one.

    Example:
      >>> import jkv
      >>> jkv.init(jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=4, block_size=4,
      ...     max_sequences=2, max_context_length=16))
      Cache(2 layers, 1 kv heads, head dim 8, bfloat16, 1.3 KiB)
        blocks     4 of 4 free, 4 tokens each
        sequences  0 of 2 open, 0 tokens, at most 16 each
    """

    metadata: Metadata  # who owns which block
    keys: jax.Array  # [L, N, K, T, D], bfloat16 and fp8 as their bits
    # [L, N, K, T, Dv], likewise; None: they are the first Dv elements of the keys
    values: jax.Array | None
    # u16[L, N, K, T], bits of bfloat16: what int8 and fp8 elements are multiplied by.
    key_scales: jax.Array | None
    value_scales: jax.Array | None  # u16[L, N, K, T], likewise
    # The dtype that the stored bits mean; static, as the arrays' own may be another.
    dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    # Dv of values that lie in the keys, else None; static, as no shape tells it.
    latent_value_dim: int | None = dataclasses.field(metadata={"static": True})
    # How keys and values lie on a mesh, None where they do not; static, as a step is
    # compiled for it. The arrays hold each head `sharding.copies` times, side by side.
    sharding: StorageSharding | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    # Of which mesh axis each rank has a pool; static, as every array then has one axis
    # more, that of ranks. None for one pool.
    pools: PoolSharding | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @property
    def storage(self) -> dict[str, jax.Array]:
        """The arrays beside the metadata by field name, each [L, N, K, T, ...].

        Whoever moves blocks moves them in all of these.
        """
        arrays = {name: getattr(self, name) for name in STORAGE_NAMES}
        return {name: array for name, array in arrays.items() if array is not None}

    def with_metadata(self, metadata: Metadata) -> "Cache":
        """Return the cache with other metadata; itself if they are its own."""
        if metadata is self.metadata:
            return self
        return dataclasses.replace(self, metadata=metadata)

    def with_storage(self, storage: dict[str, jax.Array]) -> Self:
        """Return the cache with other arrays beside the metadata."""
        return dataclasses.replace(self, **storage)  # type: ignore[arg-type]

    @property
    def groups(self) -> "tuple[Cache, ...]":
        """The cache of each group of layers: itself, unless it is a `GroupedCache`."""
        return (self,)

    def with_groups(self, groups: "tuple[Cache, ...]") -> "Cache":
        """Return the cache with other groups."""
        (cache,) = groups
        return cache

    def enter(self, function: Callable[..., Any], given: BoundArguments) -> Any:
        """Call a public function that was given this cache, one of a derived class."""
        return function(*given.args, **given.kwargs)

    @property
    def num_layers(self) -> int:
        """Layers stored, L; 0 for a cache without storage."""
        return self.keys.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, N."""
        return self.metadata.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block, T."""
        return self.metadata.block_size

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of the model, K; inside `shard_map` those of the device."""
        return self.keys.shape[2] // copies_of(self.sharding)

    @property
    def head_dim(self) -> int:
        """Size of one key, D."""
        return self.keys.shape[4]

    @property
    def value_head_dim(self) -> int:
        """Size of one value, Dv."""
        if self.latent_value_dim is not None:
            return self.latent_value_dim
        assert self.values is not None
        return self.values.shape[4]

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open at one time, S."""
        return self.metadata.max_sequences

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks one sequence can have, M."""
        return self.metadata.max_blocks_per_sequence

    @property
    def max_context_length(self) -> int:
        """Tokens one sequence can have."""
        return self.metadata.max_context_length

    @property
    def sizes(self) -> StepSizes:
        """The sizes in which the cache and the batches planned on it agree."""
        num_layers, num_blocks, _, _, head_dim = self.keys.shape
        return StepSizes(
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=head_dim,
            value_head_dim=self.value_head_dim,
            max_sequences=self.max_sequences,
            max_context_length=self.max_context_length,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; `CacheConfig.bytes` when there is storage."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(self))

    @property
    def devices(self) -> set[Device]:
        """Devices that hold the K/V arrays."""
        return self.keys.devices()

    def occupancy(self) -> str:
        """Say in one line how full the cache is (host only)."""
        free, is_open, _ = self._use()
        return (
            f"{free.count} of {self.num_blocks} blocks free, "
            f"{is_open.sum()} of {self.max_sequences} sequences open"
        )

    def __repr__(self) -> str:
        """Fit one screen at any size; a traced or deleted cache shows no counts.

        JAX puts anything in the place of arrays: shapes, specs, `None`, arrays with an
        axis more. What then makes no sense as a cache is shown array by array.
        """
        with contextlib.suppress(Exception):
            # An axis more, as stacked caches have, would shift the sizes.
            if len(self.keys.shape) == 5 and len(self.metadata.block_tables.shape) == 2:
                return self._describe()
        return self._list_arrays()

    def _list_arrays(self) -> str:
        """Say of each array or what is in its place what it is, a line each."""
        leaves = jax.tree_util.tree_leaves_with_path(self)
        lines = [
            f"  {jax.tree_util.keystr(path, simple=True, separator='.')}: "
            f"{_describe_leaf(leaf)}"
            for path, leaf in leaves
        ]
        return "\n".join([f"Cache({len(leaves)} leaves)", *lines])

    def _describe(self) -> str:
        """Say how large the cache is and, if its counts can be had, how full."""
        layers = f"{self.num_layers} layers" if self.num_layers else "no storage"
        heads = f"{self.num_kv_heads} kv heads, head dim {self.head_dim}"
        size = human_bytes(self.nbytes)
        head = f"Cache({layers}, {heads}, {self.dtype.name}, {size})"
        if not all(map(_is_concrete, jax.tree.leaves(self.metadata))):
            return head
        free, is_open, lengths = self._use()
        return (
            f"{head}\n"
            f"  blocks     {free.count} of {self.num_blocks} free, "
            f"{self.block_size} tokens each\n"
            f"  sequences  {is_open.sum()} of {self.max_sequences} open, "
            f"{lengths.sum(dtype=np.int64)} tokens, "
            f"at most {self.max_context_length} each"
        )

    def _use(self) -> tuple[Ring, np.ndarray, np.ndarray]:
        """Fetch the ring of free blocks, bool[S] open rows and i32[S] lengths."""
        meta = self.metadata
        return jax.device_get((meta.free_blocks, meta.is_open, meta.context_lengths))


def _describe_leaf(leaf: Any) -> str:
    """Say an array's dtype and shape; of anything else, what it says of itself."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}{list(shape)}"
    return repr(leaf)


def _is_concrete(array: Any) -> bool:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return not array.is_deleted()
    return isinstance(array, np.ndarray)
