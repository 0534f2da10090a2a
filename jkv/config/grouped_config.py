"""GroupedConfig: the sizes of caches that together serve one model.

Layers whose keys and values have the same life are a group: those that see everything,
and those of each window. A group is a cache of its own, with a pool of its own.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from jkv.config.cache_config import CacheConfig
from jkv.config.huggingface import read_sizes
from jkv.config.units import human_bytes, parse_bytes

# In what the groups of a model agree.
SHARED = ("max_sequences", "max_context_length", "block_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Sizes of a cache for a model whose layers differ in their windows.

    Args:
      groups: a `CacheConfig` for each group of layers, the one that sees furthest
        first. All have the same `max_sequences`, `max_context_length`, `block_size`.
      layer_groups: the group of each layer of the model, by its place in `groups`.

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

    groups: tuple[CacheConfig, ...]
    layer_groups: tuple[int, ...]

    def __post_init__(self) -> None:
        """Reject groups that do not belong together."""
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "layer_groups", tuple(self.layer_groups))
        counts = [self.layer_groups.count(i) for i in range(len(self.groups))]
        if not counts or sum(counts) != len(self.layer_groups):
            raise ValueError(
                f"layer_groups must name one of {len(self.groups)} groups for each "
                f"layer, by its place, got {self.layer_groups}"
            )
        for i, (group, count) in enumerate(zip(self.groups, counts, strict=True)):
            if group.num_layers != count:
                raise ValueError(
                    f"group {i} has num_layers {group.num_layers}, but layer_groups "
                    f"gives it {count} layers"
                )
            if group.prefix_caching:
                raise ValueError(
                    "groups of layers cannot find prompts again yet: leave "
                    "prefix_caching out, or keep all layers in one CacheConfig"
                )
        for name in SHARED:
            values = [getattr(group, name) for group in self.groups]
            if len(set(values)) > 1:
                raise ValueError(f"all groups need the same {name}, got {values}")

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
    def bytes(self) -> int:
        """Bytes of all groups, equal to the sum of the arrays' `nbytes`."""
        return sum(group.bytes for group in self.groups)

    def __str__(self) -> str:
        """Say it in human units, group by group."""
        described = [f"group {i}: {group}" for i, group in enumerate(self.groups)]
        return "\n".join([*described, f"{human_bytes(self.bytes)} in all"])

    @classmethod
    def for_context_length(
        cls,
        max_context_length: int,
        *,
        layer_windows: Sequence[int | None],
        max_sequences: int | None = None,
        budget: int | str | None = None,
        step_tokens: int = 512,
        **sizes: Any,
    ) -> Self:
        """Return a configuration whose pools never refuse for want of blocks.

        Args:
          max_context_length: tokens each sequence may hold.
          layer_windows: the window of each layer of the model, None for all tokens.
          max_sequences: sequences that may all be that long at once, none shared.
          budget: for as many such sequences as fit these bytes, or text such as "40GB".
          step_tokens: the most tokens that one `append` adds to a sequence.
          **sizes: the other fields of `CacheConfig`, the same for all groups.

        Returns:
          The configuration, a group for each different window.

        Raises:
          ValueError: unless either `max_sequences` or `budget` is given; if not even
            one sequence fits, or for a size that cannot work.
        """
        if (max_sequences is None) == (budget is None):
            raise ValueError("give max_sequences or budget, and not both")
        sizes["max_context_length"] = max_context_length
        if max_sequences is not None:
            return cls._fit(max_sequences, layer_windows, step_tokens, sizes)
        assert budget is not None
        # Bytes are linear in the number of sequences: two points give the line.
        limit = parse_bytes(budget)
        one, two = (
            cls._fit(count, layer_windows, step_tokens, sizes).bytes for count in (1, 2)
        )
        if one > limit:
            raise ValueError(
                f"one sequence of {max_context_length} tokens takes {one} bytes, the "
                f"budget is {limit}; raise the budget, or lower max_context_length"
            )
        count = 1 + (limit - one) // (two - one)
        return cls._fit(count, layer_windows, step_tokens, sizes)

    @classmethod
    def from_model(
        cls,
        folder: str | Path,
        *,
        max_sequences: int | None = None,
        budget: int | str | None = None,
        step_tokens: int = 512,
        **overrides: Any,
    ) -> Self:
        """Return the configuration for a Hugging Face checkpoint.

        The folder's config.json tells which layers have a window, beside what
        `CacheConfig.from_model` reads of it.

        Args:
          folder: where config.json lies.
          max_sequences: sequences of the longest context, as for `for_context_length`.
          budget: bytes for as many as fit, or text such as "40GB".
          step_tokens: the most tokens that one `append` adds to a sequence.
          **overrides: fields of `CacheConfig`, instead of what the model says.

        Returns:
          The configuration, a group for each different window.

        Raises:
          FileNotFoundError: without a config.json.
          ValueError: as `for_context_length`, or for a model of unknown sizes.
        """
        fields, _, layer_windows = read_sizes(folder, overrides)
        sizes = dict(fields | overrides)
        del sizes["num_layers"]
        return cls.for_context_length(
            sizes.pop("max_context_length"),
            layer_windows=layer_windows,
            max_sequences=max_sequences,
            budget=budget,
            step_tokens=step_tokens,
            **sizes,
        )

    @classmethod
    def _fit(
        cls,
        max_sequences: int,
        layer_windows: Sequence[int | None],
        step_tokens: int,
        sizes: dict[str, Any],
    ) -> Self:
        """Return the configuration with blocks for so many sequences."""
        windows = order_windows(layer_windows)
        layers = tuple(windows.index(window) for window in layer_windows)
        groups = []
        for i, window in enumerate(windows):
            group = CacheConfig(
                num_layers=layers.count(i),
                num_blocks=1,
                max_sequences=max_sequences,
                sliding_window=window,
                **sizes,
            )
            blocks = max_sequences * group.most_blocks(step_tokens)
            groups.append(dataclasses.replace(group, num_blocks=blocks))
        return cls(groups=tuple(groups), layer_groups=layers)


def order_windows(layer_windows: Sequence[int | None]) -> list[int | None]:
    """Return the different windows of layers, the one that sees furthest first."""
    different = set(layer_windows)
    finite = sorted((window for window in different if window), reverse=True)
    return [None, *finite] if None in different else [*finite]
