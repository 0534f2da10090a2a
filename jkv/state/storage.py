"""The large arrays: keys and values of one group of layers.

Symbols in shape comments as in `jkv.state.metadata`.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jkv.config.layout import Sizes
from jkv.formats.format import STORAGE_NAMES, Formats
from jkv.formats.table import formats_of
from jkv.sharding.storage_sharding import (
    POOL,
    Divided,
    DividedAxes,
    StorageSharding,
    copies_of,
    divide_pools,
)
from jkv.state.metadata import BlockGroup, Metadata


class GroupSizes(NamedTuple):
    """The sizes of a group's pools, in which a batch and its cache agree."""

    num_layers: int  # L
    num_blocks: int  # N
    num_kv_heads: int  # K
    head_dim: int  # D
    value_head_dim: int  # Dv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockStorage:
    """The keys and values in the blocks of one group of layers."""

    kind = "blocks"

    # [L, N, K, T, D], bfloat16 and fp8 as their bits, int4 in pairs, [..., D / 2]
    key_pool: jax.Array
    # [L, N, K, T, Dv], likewise; None: they are the first Dv elements of the keys
    value_pool: jax.Array | None
    # u16[L, N, K, T], bits of bfloat16: what elements of int8, fp8 and int4 are
    # multiplied by.
    key_scales: jax.Array | None
    value_scales: jax.Array | None  # u16[L, N, K, T], likewise
    # The dtype that the stored bits of keys mean; static, as the arrays' own may be
    # another.
    dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    # Likewise that of values.
    value_dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    # Static, as no shape tells how many numbers a format packs into a row.
    head_dim: int = dataclasses.field(metadata={"static": True})  # D
    value_head_dim: int = dataclasses.field(metadata={"static": True})  # Dv
    # Static: whether `value_pool` is None because values are the first of the keys.
    values_in_keys: bool = dataclasses.field(metadata={"static": True})
    # How keys and values lie on a mesh, None where they do not; static, as a step is
    # compiled for it. The arrays hold each head `sharding.copies` times, side by side.
    sharding: StorageSharding | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @property
    def formats(self) -> Formats:
        """How rows of keys and of values are stored."""
        return formats_of(self.dtype, self.value_dtype)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays by field name, each [L, N, K, T, ...].

        What moves blocks moves them in all of these.
        """
        arrays = {name: getattr(self, name) for name in STORAGE_NAMES}
        return {name: array for name, array in arrays.items() if array is not None}

    def with_arrays(self, arrays: dict[str, Any]) -> Self:
        """Return the storage with other arrays, or with what stands for arrays."""
        return dataclasses.replace(self, **arrays)

    def meaning(self, path: str) -> np.dtype[Any] | None:
        """Return what the bits of an array mean, where they mean another dtype."""
        return self.formats.meaning(path) if path in STORAGE_NAMES else None

    def with_sharding(self, sharding: StorageSharding | None) -> Self:
        """Return the storage as it lies on another mesh."""
        return dataclasses.replace(self, sharding=sharding)

    def implied_sizes(self, metadata: Metadata, group: BlockGroup) -> Sizes:
        """Return the sizes that a few of the arrays tell of all the others."""
        return Sizes(
            num_layers=self.num_layers,
            num_kv_heads=self.key_pool.shape[2],  # with copies on a mesh
            head_dim=self.head_dim,
            num_blocks=self.num_blocks,
            max_sequences=metadata.max_sequences,
            max_context_length=metadata.max_context_length,
            block_size=metadata.block_size,
            value_head_dim=self.value_head_dim,
            values_in_keys=self.values_in_keys,
            dtype=self.dtype,
            value_dtype=self.value_dtype,
            record_tokens=metadata.tokens is not None,
            sliding_window=group.window.length,
            num_sink_tokens=group.window.num_sink_tokens,
            keep_classes=len(group.free_blocks.by_class),
        )

    def divide(
        self, mesh: jax.sharding.Mesh, heads: str | None, context: str | None
    ) -> Divided:
        """Return how the arrays would lie on a mesh."""
        size = self.key_pool.shape[3]
        return divide_pools(self.num_kv_heads, size, self.arrays, mesh, heads, context)

    @property
    def divided(self) -> dict[str, DividedAxes]:
        """Which axes of each array a mesh may divide."""
        return dict.fromkeys(self.arrays, POOL)

    @property
    def num_layers(self) -> int:
        """Layers stored, L; 0 without storage."""
        return self.key_pool.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, N."""
        return self.key_pool.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of the model, K; inside `shard_map` those of the device."""
        return self.key_pool.shape[2] // copies_of(self.sharding)

    @property
    def sizes(self) -> GroupSizes:
        """The sizes in which the group and the batches planned on it agree."""
        return GroupSizes(
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
        )
