"""How the layers of a model become groups, and how many blocks each group needs.

`GroupedConfig` hands its classmethods on to `fit_context_length`, and is itself handed
to it as `make`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jkv.config.cache_config import CacheConfig
from jkv.config.layer_heads import Heads
from jkv.config.layer_windows import order_windows
from jkv.config.sizing import Weighed, fit_either

Config = TypeVar("Config", bound=Weighed)


class LayerSizes(NamedTuple):
    """What decides the group of a layer."""

    window: int | None  # None: it sees all tokens
    heads: Heads | None  # None: those of all layers


def fit_context_length(
    make: Callable[..., Config],
    layers: Sequence[LayerSizes],
    sizes: dict[str, Any],
    *,
    max_sequences: int | None,
    budget: int | str | None,
    step_tokens: int,
    prefix_caching: bool,
) -> Config:
    """Return one that never lacks blocks: `GroupedConfig.for_context_length`.

    Args:
      make: what takes the fields of a `GroupedConfig`.
      layers: each layer of the model.
      sizes: fields of `CacheConfig` that are the same for all groups.
      max_sequences: sequences that may all be of the longest context.
      budget: for as many of them as fit these bytes, or text such as "40GB".
      step_tokens: the most tokens that one `append` adds to a sequence.
      prefix_caching: index full blocks by their tokens.
    """

    def fit_sequences(count: int) -> Config:
        groups, layer_groups = _make_groups(layers, count, step_tokens, sizes)
        return make(
            groups=groups, layer_groups=layer_groups, prefix_caching=prefix_caching
        )

    return fit_either(fit_sequences, sizes["max_context_length"], max_sequences, budget)


def _make_groups(
    layers: Sequence[LayerSizes],
    max_sequences: int,
    step_tokens: int,
    sizes: dict[str, Any],
) -> tuple[tuple[CacheConfig, ...], tuple[int, ...]]:
    """Return the groups, those that see furthest first, and the group of each layer."""
    windows = order_windows([layer.window for layer in layers])
    kinds = sorted(dict.fromkeys(layers), key=lambda kind: windows.index(kind.window))
    layer_groups = tuple(kinds.index(layer) for layer in layers)
    groups = []
    for i, kind in enumerate(kinds):
        group = CacheConfig(
            num_layers=layer_groups.count(i),
            num_blocks=1,
            max_sequences=max_sequences,
            sliding_window=kind.window,
            **sizes | (kind.heads._asdict() if kind.heads else {}),
        )
        blocks = max_sequences * group.most_blocks(step_tokens)
        groups.append(dataclasses.replace(group, num_blocks=blocks))
    return tuple(groups), layer_groups
