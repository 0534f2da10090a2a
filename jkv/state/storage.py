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
    """Sizes of a group's pools that a batch and its cache share."""

    num_layers: int  # L
    num_blocks: int  # N
    num_kv_heads: int  # K
    head_dim: int  # D
    value_head_dim: int  # Dv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockStorage:
    """Keys and values in the blocks of one group of layers."""

    kind = "blocks"

    # [L, N, K, T, D]; bfloat16 and fp8 as bits, int4 in pairs, [..., D / 2]
    key_pool: jax.Array
    # [L, N, K, T, Dv], likewise; None: the first Dv elements of the keys
    value_pool: jax.Array | None
    # u16[L, N, K, T], bfloat16 bits of the scales of int8, fp8 and int4 elements.
    key_scales: jax.Array | None
    value_scales: jax.Array | None  # u16[L, N, K, T], likewise
    # The dtype that the bits of keys encode; static, as the arrays' dtype may differ.
    dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    # Likewise of values.
    value_dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    # Static, as the packing hides it from the shapes.
    head_dim: int = dataclasses.field(metadata={"static": True})  # D
    value_head_dim: int = dataclasses.field(metadata={"static": True})  # Dv
    # Static: True if `value_pool` is None because keys contain the values.
    values_in_keys: bool = dataclasses.field(metadata={"static": True})
    # Sharding of keys and values over a mesh, or None; static, as a step is compiled
    # for it. Each head is stored `sharding.copies` times, side by side.
    sharding: StorageSharding | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @property
    def formats(self) -> Formats:
        """Storage formats of keys and values."""
        return formats_of(self.dtype, self.value_dtype)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays by field name, each [L, N, K, T, ...].

        Moves of blocks apply to all of them.
        """
        arrays = {name: getattr(self, name) for name in STORAGE_NAMES}
        return {name: array for name, array in arrays.items() if array is not None}

    def with_arrays(self, arrays: dict[str, Any]) -> Self:
        """Return the storage with other arrays or placeholders."""
        return dataclasses.replace(self, **arrays)

    def encoded_dtype(self, path: str) -> np.dtype[Any] | None:
        """Return the dtype that the bits of an array encode, if it differs."""
        return self.formats.encoded_dtype(path) if path in STORAGE_NAMES else None

    def with_sharding(self, sharding: StorageSharding | None) -> Self:
        """Return the storage with the sharding of another mesh."""
        return dataclasses.replace(self, sharding=sharding)

    def implied_sizes(self, metadata: Metadata, group: BlockGroup) -> Sizes:
        """Return the sizes that some of the arrays imply for all others."""
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
            pruning=metadata.sequences.pruned.is_there,
        )

    def divide(
        self, mesh: jax.sharding.Mesh, heads: str | None, context: str | None
    ) -> Divided:
        """Return the sharding of the arrays over a mesh."""
        size = self.key_pool.shape[3]
        return divide_pools(self.num_kv_heads, size, self.arrays, mesh, heads, context)

    @property
    def divided(self) -> dict[str, DividedAxes]:
        """The axes of each array that a mesh may shard."""
        return dict.fromkeys(self.arrays, POOL)

    @property
    def num_layers(self) -> int:
        """Number of layers stored, L; 0 without storage."""
        return self.key_pool.shape[0]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, N."""
        return self.key_pool.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of kv heads of the model, K; of the device inside `shard_map`."""
        return self.key_pool.shape[2] // copies_of(self.sharding)

    @property
    def sizes(self) -> GroupSizes:
        """Sizes that the batches planned on the group share."""
        return GroupSizes(
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
        )
