"""GroupedConfig: the sizes of a cache with several groups of layers.

A group holds the layers with equal heads and an equal sliding window (or full
attention), and has a pool of its own; or recurrent-state layers. All groups share the
sequences.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import jax

from jkv.config import grouping
from jkv.config.cache_config import CacheConfig
from jkv.config.counts import (
    check_classes,
    check_window,
    checked_num_blocks,
    count_bytes,
)
from jkv.config.layout import AnySizes, describe, lay_out
from jkv.config.state_config import StateConfig

# Group numbers of a layer: an int, or a tuple of none, of one, or of one with blocks
# and one with states.
LayerGroups: TypeAlias = int | tuple[int, ...]

# Fields that must agree in all groups, in all with blocks, and in all with states.
SHARED = ("max_sequences", "max_context_length", "block_size")
OF_BLOCKS = ("pruning",)
KINDS: tuple[type, ...] = (CacheConfig, StateConfig)  # allowed classes of a group
OF_STATES = ("num_snapshots", "snapshot_every", "max_pending")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Sizes of a cache for a model with several kinds of layers.

    Args:
      groups: a `CacheConfig` for each group of attention layers and a `StateConfig`
        for each group of recurrent-state layers, in any order. All have equal
        `max_sequences`, `max_context_length`, `block_size`; state groups also have
        equal `num_snapshots`, `snapshot_every`, `max_pending`.
      layer_groups: for each layer of the model, the index of its group; `()` for a
        layer without cached data, a pair for a layer with both attention and a state.
        A tuple of one is the same as its index.
      prefix_caching: index full blocks by their tokens, as in a `CacheConfig`; a prefix
        is reused as far as all groups have it cached. Takes 4 bytes per token and 116
        per block (128 with a sliding window) of the first group with the longest
        window, 4 more per block for each other group, and 12 per block of the others.
        State groups need `num_snapshots` and `snapshot_every`, and 4 more bytes per
        token of the longest context.
      keep_classes: number of retention priorities in each group, as in a `CacheConfig`.

    Raises:
      ValueError: inconsistent groups, or an invalid field.

    Example:
      >>> import jkv
      >>> config = jkv.GroupedConfig.for_context_length(
      ...     4096, max_sequences=2, layer_windows=[64, 64, None, 64], num_kv_heads=1,
      ...     head_dim=8, step_tokens=32)
      >>> [group.num_layers for group in config.groups], config.layer_groups
      ([1, 3], (1, 1, 0, 1))
      >>> [group.num_blocks for group in config.groups]
      [512, 18]
    """

    groups: tuple[CacheConfig | StateConfig, ...]
    layer_groups: tuple[LayerGroups, ...]
    prefix_caching: bool = False
    keep_classes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        layers = (
            tuple(each) if isinstance(each, Iterable) else each
            for each in self.layer_groups
        )
        object.__setattr__(self, "layer_groups", tuple(layers))
        self._check_kinds()
        self._check_layers()
        _check_same(SHARED, self.groups, "all groups")
        _check_same(OF_BLOCKS, self.block_groups, "all groups with blocks")
        self._check_states()
        if any(group.prefix_caching for group in self.block_groups):
            if len(self.groups) > 1:
                raise ValueError(
                    "prefix_caching must be set on GroupedConfig, as all groups share "
                    "one index; omit it in the groups, as in "
                    "GroupedConfig(..., prefix_caching=True)"
                )
            object.__setattr__(self, "prefix_caching", True)
            object.__setattr__(self, "keep_classes", self.block_groups[0].keep_classes)
        check_classes(self.keep_classes, self.prefix_caching and any(self.block_groups))
        for group in self.block_groups:
            checked_num_blocks(group.num_blocks, self.prefix_caching)
            check_window(
                group.sliding_window,
                group.num_sink_tokens,
                group.block_size,
                self.prefix_caching,
            )

    def _check_kinds(self) -> None:
        for group in self.groups:
            if not isinstance(group, KINDS):
                raise ValueError(
                    f"groups must be jkv.CacheConfig or jkv.StateConfig, got "
                    f"{type(group).__name__}"
                )

    def _check_states(self) -> None:
        _check_same(OF_STATES, self.state_groups, "all groups with a state")
        for group in self.state_groups:
            if self.prefix_caching and not (
                group.num_snapshots and group.snapshot_every
            ):
                raise ValueError(
                    f"num_snapshots and snapshot_every (a multiple of block_size) must "
                    f"be given to StateConfig with prefix_caching, got "
                    f"{group.num_snapshots} and {group.snapshot_every}"
                )

    def _check_layers(self) -> None:
        """Check that layer_groups and the groups' num_layers are consistent."""
        named = [group for layer in self.groups_of_layers for group in layer]
        if not self.groups or not set(named) <= {*range(len(self.groups))}:
            raise ValueError(
                f"layer_groups must name one of {len(self.groups)} groups for each "
                f"layer, by its index, or () for none, got {self.layer_groups}"
            )
        for layer, groups in enumerate(self.groups_of_layers):
            kinds = [self.groups[i].sizes.kind for i in groups]
            for kind in kinds:
                if kinds.count(kind) > 1:
                    raise ValueError(
                        f"layer_groups must put a layer in at most one group with "
                        f"{kind}, got {groups} for layer {layer}"
                    )
        for i, group in enumerate(self.groups):
            if group.num_layers != named.count(i):
                raise ValueError(
                    f"group {i} has num_layers {group.num_layers}, but layer_groups "
                    f"gives it {named.count(i)} layers"
                )

    @property
    def groups_of_layers(self) -> tuple[tuple[int, ...], ...]:
        """The groups of each layer of the model, as in `Cache.layer_groups`."""
        return tuple(
            each if isinstance(each, tuple) else (each,) for each in self.layer_groups
        )

    @property
    def block_groups(self) -> tuple[CacheConfig, ...]:
        """The groups with blocks, in order."""
        return tuple(each for each in self.groups if isinstance(each, CacheConfig))

    @property
    def state_groups(self) -> tuple[StateConfig, ...]:
        """The groups with states, in order."""
        return tuple(each for each in self.groups if isinstance(each, StateConfig))

    @property
    def max_sequences(self) -> int:
        """Most open sequences, S."""
        return self.groups[0].max_sequences

    @property
    def max_context_length(self) -> int:
        """Most tokens of one sequence."""
        return self.groups[0].max_context_length

    @property
    def block_size(self) -> int:
        """Tokens per block, T."""
        return self.groups[0].block_size

    @property
    def sizes(self) -> tuple[AnySizes, ...]:
        """The sizes of each group, as input of `jkv.config.layout`."""
        return tuple(
            group.sizes._replace(keep_classes=self.keep_classes)
            if isinstance(group, CacheConfig)
            else group.sizes
            for group in self.groups
        )

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every array of the cache, by path."""
        arrays = lay_out(self.sizes, self.prefix_caching)
        return {name: array.struct for name, array in arrays.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the cache: the sum of its arrays' `nbytes`."""
        arrays = lay_out(self.sizes, self.prefix_caching)
        return count_bytes(arrays.values())

    @property
    def storage_bytes(self) -> int:
        """Bytes of keys, values, scales and states of all groups, with snapshots."""
        stored = (each.lay_out_storage(self.prefix_caching) for each in self.sizes)
        return sum(count_bytes(each.values()) for each in stored)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the metadata: all arrays but the storage."""
        return self.bytes - self.storage_bytes

    def __str__(self) -> str:
        """Summarize the configuration in two lines per group and two for the whole."""
        return "\n".join(describe(self.sizes, self.prefix_caching, numbered=True))

    @classmethod
    def for_context_length(
        cls,
        max_context_length: int,
        *,
        layer_windows: Sequence[int | None],
        max_sequences: int | None = None,
        budget_bytes: int | str | None = None,
        step_tokens: int = 512,
        prefix_caching: bool = False,
        **sizes: Any,
    ) -> Self:
        """Return a configuration with pools that never run out of blocks.

        Makes a group for each distinct window, the longest (full attention) first.

        Args:
          max_context_length: as for `CacheConfig.for_context_length`, like
            `max_sequences` and `budget_bytes`.
          layer_windows: sliding window of each layer of the model, None for full
            attention.
          step_tokens: most tokens that one `append` adds to a sequence.
          prefix_caching: index full blocks by their tokens.
          **sizes: the other fields of `CacheConfig`, equal in all groups.

        Raises:
          ValueError: as for `CacheConfig.for_context_length`.
        """
        return grouping.fit_context_length(
            cls,
            grouping.ModelLayers(layer_windows),
            sizes | {"max_context_length": max_context_length},
            max_sequences=max_sequences,
            budget_bytes=budget_bytes,
            step_tokens=step_tokens,
            prefix_caching=prefix_caching,
        )

    @classmethod
    def from_model(
        cls,
        folder: str | Path,
        *,
        max_sequences: int | None = None,
        budget_bytes: int | str | None = None,
        step_tokens: int = 512,
        prefix_caching: bool = False,
        max_pending: int = 0,
        num_snapshots: int = 0,
        snapshot_every: int | None = None,
        **overrides: Any,
    ) -> Self:
        """Return the configuration for a Hugging Face checkpoint.

        Beside the sizes for `CacheConfig.from_model`, reads the sliding windows, heads
        and states of the layers from config.json. Makes a group for each distinct
        window and heads, the longest window first, then a group for each distinct
        state. Accumulated states are float32, others of the model's dtype; their names
        are listed in `jkv.config.state_readings`.

        Args:
          folder: folder of config.json.
          max_sequences: as for `for_context_length`, like `budget_bytes`,
            `step_tokens` and `prefix_caching`.
          max_pending: of state groups: most pending tokens.
          num_snapshots: of state groups, with prefix caching: number of snapshots.
          snapshot_every: of state groups: interval of snapshots in tokens.
          **overrides: fields of `CacheConfig` that replace the model's. `num_layers`
            is the number of attention layers, and disables groups for states.

        Raises:
          FileNotFoundError: no config.json.
          ValueError: as for `for_context_length`, a model of unknown sizes, or fields
            of states for a model without any.
        """
        from jkv.config.huggingface import read_sizes

        found = read_sizes(folder, overrides, with_states=True)
        of_states = dict(
            max_pending=max_pending,
            num_snapshots=num_snapshots,
            snapshot_every=snapshot_every,
        )
        if found.layers is None and any(of_states.values()):
            raise ValueError(
                f"{folder}: {', '.join(of_states)} need recurrent-state layers, and "
                f"there are none; omit them"
            )
        sizes = dict(found.fields | overrides)
        del sizes["num_layers"]
        layers = grouping.ModelLayers(
            found.layer_windows, found.layer_heads, found.layers, of_states
        )
        return grouping.fit_context_length(
            cls,
            layers,
            sizes,
            max_sequences=max_sequences,
            budget_bytes=budget_bytes,
            step_tokens=step_tokens,
            prefix_caching=prefix_caching,
        )


def _check_same(names: Sequence[str], groups: Sequence[object], which: str) -> None:
    for name in names:
        values = [getattr(group, name) for group in groups]
        if len(set(values)) > 1:
            raise ValueError(f"{which} need the same {name}, got {values}")


def as_grouped(config: CacheConfig | StateConfig | GroupedConfig) -> GroupedConfig:
    """Return the configuration as a `GroupedConfig` of one or more groups."""
    if isinstance(config, GroupedConfig):
        return config
    return GroupedConfig(groups=(config,), layer_groups=(0,) * config.num_layers)
