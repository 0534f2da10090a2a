"""GroupedConfig: the sizes of a cache whose layers differ in what they keep.

Layers whose keys and values have the same life are a group: those that see everything,
and those of each window; layers with other heads are a group of their own. Such a group
has a pool. Layers that keep a state instead are groups, too. The sequences are the same
in all of them.
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

# The groups of a layer by their numbers: one, or a tuple of none, one, or one with
# blocks and one with a state.
LayerGroups: TypeAlias = int | tuple[int, ...]

# Fields in which all groups of a model agree, and all of its groups with a state.
SHARED = ("max_sequences", "max_context_length", "block_size")
KINDS: tuple[type, ...] = (CacheConfig, StateConfig)  # what a group may be
OF_STATES = ("num_snapshots", "snapshot_every", "max_pending")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Sizes of a cache for a model whose layers differ in what they keep.

    Args:
      groups: a `CacheConfig` for each group of layers that attend, a `StateConfig` for
        each group of layers with a state, in any order. All have the same
        `max_sequences`, `max_context_length`, `block_size`; those with a state also the
        same `num_snapshots`, `snapshot_every`, `max_pending`.
      layer_groups: the group of each layer of the model, by its number in `groups`;
        `()` for a layer that keeps nothing, a tuple of two for one that attends and has
        a state. A tuple of one means its number.
      prefix_caching: index full blocks by their tokens, as in a `CacheConfig`, so that
        a prompt goes on from what all groups have of an earlier one. Takes 4 bytes a
        token and 116 a block (128 with a sliding window) of the first group that sees
        furthest, 4 more for each other group, and 12 a block of the others. Groups with
        a state need `num_snapshots` and `snapshot_every`, and 4 bytes more for each
        token that a sequence may have.
      keep_classes: classes of cached blocks in each group, as in a `CacheConfig`.

    Raises:
      ValueError: for groups that cannot work together, saying what to change.

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
        self._check_states()
        if any(group.prefix_caching for group in self.block_groups):
            if len(self.groups) > 1:
                raise ValueError(
                    "groups of layers have one prefix index together: leave "
                    "prefix_caching out of the groups, and give it to the whole, as in "
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
                    f"prefix_caching with a state needs copies of it to go on from: "
                    f"give StateConfig num_snapshots and snapshot_every, a multiple of "
                    f"block_size (got {group.num_snapshots} and {group.snapshot_every})"
                )

    def _check_layers(self) -> None:
        """Reject layers whose groups there are not, and groups without their layers."""
        named = [group for layer in self.groups_of_layers for group in layer]
        if not self.groups or not set(named) <= {*range(len(self.groups))}:
            raise ValueError(
                f"layer_groups must name one of {len(self.groups)} groups for each "
                f"layer, by its number, or () for none, got {self.layer_groups}"
            )
        for layer, groups in enumerate(self.groups_of_layers):
            kinds = [self.groups[i].sizes.kind for i in groups]
            for kind in kinds:
                if kinds.count(kind) > 1:
                    raise ValueError(
                        f"a layer can be in at most one group with {kind}, and "
                        f"layer_groups puts layer {layer} in {groups}"
                    )
        for i, group in enumerate(self.groups):
            if group.num_layers != named.count(i):
                raise ValueError(
                    f"group {i} has num_layers {group.num_layers}, but layer_groups "
                    f"gives it {named.count(i)} layers"
                )

    @property
    def groups_of_layers(self) -> tuple[tuple[int, ...], ...]:
        """The groups of each layer of the model, as `Cache.layer_groups` has them."""
        return tuple(
            each if isinstance(each, tuple) else (each,) for each in self.layer_groups
        )

    @property
    def block_groups(self) -> tuple[CacheConfig, ...]:
        """The groups with blocks, in their order."""
        return tuple(each for each in self.groups if isinstance(each, CacheConfig))

    @property
    def state_groups(self) -> tuple[StateConfig, ...]:
        """The groups with a state, in their order."""
        return tuple(each for each in self.groups if isinstance(each, StateConfig))

    @property
    def max_sequences(self) -> int:
        """Sequences open at one time, S."""
        return self.groups[0].max_sequences

    @property
    def max_context_length(self) -> int:
        """Tokens that one sequence may have."""
        return self.groups[0].max_context_length

    @property
    def block_size(self) -> int:
        """Tokens per block, T."""
        return self.groups[0].block_size

    @property
    def sizes(self) -> tuple[AnySizes, ...]:
        """The fields of each group as `jkv.config.layout` takes them."""
        return tuple(
            group.sizes._replace(keep_classes=self.keep_classes)
            if isinstance(group, CacheConfig)
            else group.sizes
            for group in self.groups
        )

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every array of the cache, by its path in the cache."""
        arrays = lay_out(self.sizes, self.prefix_caching)
        return {name: array.struct for name, array in arrays.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache, equal to the sum of the arrays' `nbytes`."""
        arrays = lay_out(self.sizes, self.prefix_caching)
        return count_bytes(arrays.values())

    @property
    def storage_bytes(self) -> int:
        """Bytes of keys and values of all groups, with their scales, and of states.

        Snapshots of states are among them.
        """
        stored = (each.lay_out_storage(self.prefix_caching) for each in self.sizes)
        return sum(count_bytes(each.values()) for each in stored)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of everything else."""
        return self.bytes - self.storage_bytes

    def __str__(self) -> str:
        """Say it in human units: two lines for each group, and two for the whole."""
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
        """Return a configuration whose pools never refuse for want of blocks.

        It has a group for each different window; the one that sees furthest is the
        first.

        Args:
          max_context_length: as `CacheConfig.for_context_length` has it, like
            `max_sequences` and `budget_bytes`.
          layer_windows: the window of each layer of the model, None for all tokens.
          step_tokens: the most tokens that one `append` adds to a sequence.
          prefix_caching: index full blocks by their tokens.
          **sizes: the other fields of `CacheConfig`, the same for all groups.

        Raises:
          ValueError: as there.
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

        The folder's config.json tells which layers have a window, which have other
        heads than the rest, and which have a state, beside what
        `CacheConfig.from_model` reads of it. There is a group for each different window
        and each kind of heads; those that see furthest come first, those with a state
        last. States are summed in float32 and otherwise of the model's dtype; the names
        of their arrays are those of `jkv.config.state_readings`.

        Args:
          folder: where config.json lies.
          max_sequences: sequences of the longest context, as `for_context_length` has
            it, like `budget_bytes`, `step_tokens` and `prefix_caching`.
          max_pending: of layers with a state: tokens that may be taken back.
          num_snapshots: of the same, with prefix caching: copies that are kept.
          snapshot_every: of the same: the lengths at which copies are made.
          **overrides: fields of `CacheConfig`, instead of what the model says. With
            `num_layers` there are groups for so many layers with keys and values, and
            none for states.

        Raises:
          FileNotFoundError: without a config.json.
          ValueError: as `for_context_length`, for a model of unknown sizes, or for
            fields of states where the model has none.
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
                f"{folder}: {', '.join(of_states)} are for layers with a state, and "
                f"there are none"
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
    """Return a configuration as groups: one of all layers, if it knows of none."""
    if isinstance(config, GroupedConfig):
        return config
    return GroupedConfig(groups=(config,), layer_groups=(0,) * config.num_layers)
