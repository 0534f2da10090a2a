"""The cache as a value: metadata, and the large arrays of keys, values and states.

Symbols in shape comments as in `jkv.state.metadata`.
"""

import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import numpy as np

from jkv.config.counts import human_bytes
from jkv.config.layout import Sizes
from jkv.formats.format import STORAGE_NAMES, Formats
from jkv.formats.table import FORMATS
from jkv.sharding.storage_sharding import (
    POOL,
    Divided,
    DividedAxes,
    PoolSharding,
    StorageSharding,
    copies_of,
    divide_pools,
)
from jkv.state.batch import StepSizes
from jkv.state.metadata import BlockGroup, Metadata
from jkv.status import UsageError


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
        return Formats(FORMATS[self.dtype], FORMATS[self.value_dtype])

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
            observed_queries=group.observed.width,
            num_query_heads=group.observed.num_heads,
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


@runtime_checkable
class Device(Protocol):
    """The interface of a `jax.Device`, which is not typed."""

    @property
    def id(self) -> int:
        """Index among the devices of its platform."""

    @property
    def platform(self) -> str:
        """Platform name, such as "cpu" or "gpu"."""

    def memory_stats(self) -> dict[str, int] | None:
        """Return the device's memory statistics, if it has any."""


class GroupLayer(NamedTuple):
    """A layer as its group and its index in the group; verbs accept it as a layer."""

    group: int  # static index in the configuration
    layer: int | jax.Array  # i32[] or int; may be traced


class Role(enum.Enum):
    """The effect of a public function, for interceptors."""

    PLANS = enum.auto()  # a step
    WRITES = enum.auto()  # rows of a step to a layer
    READS = enum.auto()  # a layer, for a step
    WRITES_STATE = enum.auto()  # state of a layer, for a step
    READS_STATE = enum.auto()  # state of a layer, for a step
    OBSERVES = enum.auto()  # queries of a step in a layer
    COMMITS = enum.auto()  # a step
    CHECKS = enum.auto()  # the cache; raises faults found
    SETS_DEBUG = enum.auto()  # sets the interceptor of debug mode


class Interceptor(Protocol):
    """Runs the public functions called on a cache, each in its own way.

    Debug mode checks the call and its result; scoring gives each layer of a model the
    whole pool of its group.
    """

    def call(
        self,
        function: Callable[..., Any],
        cache: "Cache",
        given: tuple[tuple[Any, ...], dict[str, Any]],
        role: Role | None,
        /,
    ) -> Any:
        """Run a function on this cache; return its result."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache:
    """A paged key/value cache. Create one with `init`; every verb returns a new one.

    Example:
      >>> import jkv
      >>> jkv.init(jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=4, block_size=4,
      ...     max_sequences=2, max_context_length=16))
      Cache(2 layers, 1 kv heads, head dim 8, bfloat16, 1.3 KiB)
        blocks     4 of 4 free, 4 tokens each
        sequences  0 of 2 open, 0 tokens, at most 16 each
    """

    metadata: Metadata  # blocks of each sequence
    storage: tuple[Any, ...]  # by group: a `BlockStorage` or a `StateStorage`
    # Static: the groups of each layer of the model: none, one, or one with blocks and
    # one with a state. A group stores its layers in this order.
    layer_groups: tuple[tuple[int, ...], ...] = dataclasses.field(
        metadata={"static": True}
    )
    # The sharding of several pools, one per rank of a mesh axis; every array then has a
    # leading axis of ranks, so it is static. None for one cache.
    pools: PoolSharding | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    interceptor: Interceptor | None = None  # of debug mode, or of scoring

    def with_metadata(self, metadata: Metadata) -> Self:
        """Return the cache with other metadata; the same object if unchanged."""
        if metadata is self.metadata:
            return self
        return dataclasses.replace(self, metadata=metadata)

    @property
    def block_storage(self) -> tuple[BlockStorage, ...]:
        """Keys and values of each group with blocks."""
        return tuple(self.storage[number] for number in self.metadata.block_numbers)

    def with_storage(self, storage: tuple[Any, ...]) -> Self:
        """Return the cache with other storage; the same object if unchanged."""
        if all(new is old for new, old in zip(storage, self.storage, strict=True)):
            return self
        return dataclasses.replace(self, storage=storage)

    def with_group_storage(self, group: int, storage: Any) -> Self:
        """Return the cache with other storage of one group."""
        before, behind = self.storage[:group], self.storage[group + 1 :]
        return self.with_storage((*before, storage, *behind))

    def follow(self, metadata: Metadata, moves: tuple[Any, ...]) -> Self:
        """Return the cache with new metadata and its storage after the moves.

        `moves` has one entry per part; it is empty if nothing moves. Outside jit
        unmoved storage is not copied.
        """
        storage = list(self.storage)
        for part, of_part in zip(metadata.parts, moves, strict=bool(moves)):
            for number in () if of_part is None else part.numbers:
                storage[number] = part.follow(storage[number], of_part)
        return self.with_metadata(metadata).with_storage(tuple(storage))

    def find_layer(self, layer: Any) -> GroupLayer:
        """Return the group and index of a layer's keys and values.

        Args:
          layer: int, index in the model; or a `GroupLayer`, which is returned. May be
            traced with one group.

        Raises:
          UsageError: if the layer is traced and there are several groups, is out of
            range, or has no keys and values.
        """
        found = self._list_groups(layer)
        for each in found:
            if each.group in self.metadata.block_numbers:
                return each
        state = "; it keeps a state, for read_state and write_state"
        raise UsageError(
            f"layer {layer} keeps no keys and values: layer_groups names no group "
            f"with blocks for it{state * bool(found)}"
        )

    def find_state(self, layer: Any) -> GroupLayer:
        """Return the group and index of a layer's state, as `find_layer`.

        Raises:
          UsageError: if the layer has no state, and as `find_layer`.
        """
        for each in self._list_groups(layer):
            if each.group in self.metadata.state_numbers:
                return each
        raise UsageError(
            f"layer {layer} keeps no state: layer_groups names no group with a "
            f"state (jkv.StateConfig) for it"
        )

    def _list_groups(self, layer: Any) -> tuple[GroupLayer, ...]:
        """Return the group and index of a layer in each of its groups."""
        if isinstance(layer, tuple):
            return (layer,) if isinstance(layer, GroupLayer) else layer
        # With one group for all layers the model's index is the group's, traced or not.
        first = self.layer_groups[0] if self.layer_groups else ()
        if len(first) == 1 and set(self.layer_groups) == {first}:
            return (GroupLayer(first[0], layer),)
        number = self._known(layer)
        groups = self.layer_groups[number]
        return tuple(GroupLayer(each, self._count(each, number)) for each in groups)

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Return the model's numbers of the layers of a group, in order."""
        return tuple(i for i, of in enumerate(self.layer_groups) if group in of)

    def _known(self, layer: Any) -> int:
        """Return the index of a layer; refuse traced and out-of-range ones."""
        if not hasattr(layer, "__index__") or isinstance(layer, jax.core.Tracer):
            raise UsageError(
                "layer must be an int in a cache with several groups, got an array or "
                "another type; in a scan over periods of layers pass "
                "cache.find_periodic(layer, period, step)"
            )
        number, known = int(layer), range(len(self.layer_groups))
        if number not in known:
            raise UsageError(f"layer must be in 0..{len(known) - 1}, got {number}")
        return number

    def _count(self, group: int, layer: int) -> int:
        """Count the layers of a group before a layer."""
        return sum(groups.count(group) for groups in self.layer_groups[:layer])

    def find_periodic(
        self, layer: int, period: int, step: int | jax.Array
    ) -> GroupLayer | tuple[GroupLayer, ...]:
        """Return layer `step * period + layer` in a scan over periods of layers.

        Args:
          layer: int, 0 to period-1, of the first period.
          period: int, number of layers after which the groups repeat.
          step: i32[] or int, index of the period; may be traced.

        Returns:
          The layer in its group; for a layer in two groups, both.

        Raises:
          UsageError: if the groups do not repeat after `period`, or the layer has no
            storage.
        """
        groups = self.layer_groups
        pattern = groups[:period]
        repeated = (pattern * (-(-len(groups) // max(len(pattern), 1))))[: len(groups)]
        if not 0 <= layer < period or repeated != groups:
            raise UsageError(
                f"period and layer must match the groups of the layers; {groups} "
                f"do not repeat after {period}, or layer {layer} is not in "
                f"0..{period - 1}"
            )
        found = tuple(
            GroupLayer(
                each, self._count(each, layer) + step * self._count(each, period)
            )
            for each in groups[layer]
        )
        if not found:  # raises
            return self.find_layer(layer)
        return found[0] if len(found) == 1 else found

    def with_layers(self, layer_groups: tuple[tuple[int, ...], ...]) -> Self:
        """Return the cache with the layers of one model, numbered from 0.

        For a model that shares the cache with another, as a drafter does. No other
        layer may be in the groups of these.

        Args:
          layer_groups: the groups of each layer, as in `Cache.layer_groups`.
        """
        return dataclasses.replace(self, layer_groups=layer_groups)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model; 0 without storage."""
        is_stored = any(each.num_layers for each in self.storage)
        return len(self.layer_groups) if is_stored else 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, N, with one group."""
        return self._only_storage("num_blocks").num_blocks

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads of the model, K, with one group."""
        return self._only_storage("num_kv_heads").num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a key, D, with one group."""
        return self._only_storage("head_dim").head_dim

    @property
    def value_head_dim(self) -> int:
        """Size of a value, Dv, with one group."""
        return self._only_storage("value_head_dim").value_head_dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of keys and values, with one group."""
        return self._only_storage("dtype").dtype

    @property
    def sharding(self) -> StorageSharding | None:
        """Sharding of keys and values over a mesh, or None, with one group."""
        return self._only_storage("sharding").sharding

    @property
    def block_size(self) -> int:
        """Tokens per block, T."""
        return self.metadata.block_size

    @property
    def max_sequences(self) -> int:
        """Maximum number of open sequences, S."""
        return self.metadata.max_sequences

    @property
    def max_blocks_per_sequence(self) -> int:
        """Maximum number of blocks of a sequence in a group, M."""
        return self.metadata.max_blocks_per_sequence

    @property
    def max_context_length(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.metadata.max_context_length

    @property
    def sizes(self) -> StepSizes:
        """Sizes that the batches planned on the cache share."""
        return StepSizes(
            groups=tuple(each.sizes for each in self.storage),
            block_size=self.block_size,
            max_sequences=self.max_sequences,
            max_context_length=self.max_context_length,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; `CacheConfig.bytes` if there is storage."""
        arrays = jax.tree.leaves((self.metadata, self.storage))
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)

    @property
    def devices(self) -> set[Device]:
        """Devices that hold the storage."""
        arrays = [next(iter(each.arrays.values())) for each in self.storage]
        return set().union(*(array.devices() for array in arrays))

    def occupancy(self) -> str:
        """Describe the free blocks and open sequences in one line (host only)."""
        blocks, sequences, _ = self._use()
        return f"{', '.join(blocks)}, {sequences}"

    def __repr__(self) -> str:
        """Describe the cache in a few lines; without counts if traced or deleted.

        JAX may replace the arrays by shapes, specs, `None`, or arrays with another
        axis. If the result is not a cache, its leaves are listed.
        """
        with contextlib.suppress(Exception):
            # Stacked caches have a leading axis, which would shift the sizes.
            if all(len(each.key_pool.shape) == 5 for each in self.block_storage):
                if len(self.metadata.sequences.rows.shape) == 2:
                    return self._describe()
        return self._list_arrays()

    def _only_storage(self, name: str) -> BlockStorage:
        """Return the storage of the only group with blocks; refuse several groups."""
        used = frozenset[int]().union(*self.layer_groups)
        found = [self.storage[n] for n in self.metadata.block_numbers if n in used]
        num_groups = len(found)
        if num_groups != 1:
            raise UsageError(
                f"cache.{name} needs one group of layers with blocks, this cache has "
                f"{num_groups}; use cache.storage[i].{name}"
            )
        only: BlockStorage = found[0]
        return only

    def _list_arrays(self) -> str:
        """Describe each leaf, array or not, in a line."""
        leaves = jax.tree_util.tree_leaves_with_path(self)
        lines = [
            f"  {jax.tree_util.keystr(path, simple=True, separator='.')}: "
            f"{_describe_leaf(leaf)}"
            for path, leaf in leaves
        ]
        return "\n".join([f"Cache({len(leaves)} leaves)", *lines])

    def _describe(self) -> str:
        """Describe the size of the cache and, if concrete, its occupancy."""
        layers = f"{self.num_layers} layers" if self.num_layers else "no storage"
        kinds = [
            f"{each.num_kv_heads} kv heads, head dim {each.head_dim}, {each.formats}"
            for each in self.block_storage
        ]
        kinds += ["states"] * self.metadata.has_states
        size = human_bytes(self.nbytes)
        head = f"Cache({layers}, {' and '.join(dict.fromkeys(kinds))}, {size})"
        if not all(map(_is_concrete, jax.tree.leaves(self.metadata))):
            return head
        blocks, sequences, num_tokens = self._use()
        each = f"{self.block_size} tokens each"
        if len(self.storage) == 1 and blocks:
            lines = [f"  blocks     {blocks[0].replace(' blocks', '')}, {each}"]
        else:
            kept = [of_group.kind for of_group in self.storage]
            for number, used in zip(self.metadata.block_numbers, blocks, strict=True):
                kept[number] = f"{used.replace(' blocks', '')}, {each}"
            lines = [
                f"  group {i}    {what}, {of_group.num_layers} layers"
                for i, (what, of_group) in enumerate(
                    zip(kept, self.storage, strict=True)
                )
            ]
        used = sequences.replace(" sequences", "")
        most = f"at most {self.max_context_length} each"
        lines.append(f"  sequences  {used}, {num_tokens} tokens, {most}")
        return "\n".join([head, *lines])

    def _use(self) -> tuple[list[str], str, int]:
        """Describe free blocks by group and open sequences, and count tokens."""
        meta = self.metadata
        counts, is_open, lengths = jax.device_get(
            (
                [group.free_blocks.count for group in meta.block_groups],
                meta.is_open,
                meta.context_lengths,
            )
        )
        blocks = [
            f"{count} of {group.num_blocks} blocks free"
            for count, group in zip(counts, meta.block_groups, strict=True)
        ]
        sequences = f"{is_open.sum()} of {self.max_sequences} sequences open"
        return blocks, sequences, int(lengths.sum(dtype=np.int64))


def _describe_leaf(leaf: Any) -> str:
    """Return an array's dtype and shape, or the repr of another leaf."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}{list(shape)}"
    return repr(leaf)


def _is_concrete(array: Any) -> bool:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return not array.is_deleted()
    return isinstance(array, np.ndarray)
