"""Partition of a model's layers into groups, and the size of each group's pool.

`GroupedConfig` passes itself as `make`, to avoid a cyclic import.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jkv.config.cache_config import CacheConfig
from jkv.config.counts import order_windows
from jkv.config.layers import Heads, Kept, LayerState
from jkv.config.sizing import Weighed, fit_either
from jkv.config.state_config import StateConfig

Config = TypeVar("Config", bound=Weighed)


class ModelLayers(NamedTuple):
    """The layers of a model by their cached data."""

    windows: Sequence[int | None]  # of attention layers; None for full attention
    heads: Sequence[Heads] | None = None  # of attention layers, if they differ
    kept: Sequence[Kept] | None = None  # of all layers, if some have a state
    # Fields of `StateConfig` that are equal in all state groups.
    of_states: Mapping[str, Any] = {}


def fit_context_length(
    make: Callable[..., Config],  # GroupedConfig
    layers: ModelLayers,
    sizes: dict[str, Any],  # fields of `CacheConfig` that are equal in all groups
    *,
    max_sequences: int | None,  # sequences of the longest context
    # alternatively, a budget for as many as fit, in bytes or like "40GB"
    budget_bytes: int | str | None,
    step_tokens: int,  # most tokens that one `append` adds to a sequence
    prefix_caching: bool,
) -> Config:
    """Implement `GroupedConfig.for_context_length`."""

    def fit_sequences(count: int) -> Config:
        groups, numbers = _make_groups(layers, count, step_tokens, sizes)
        states = _make_state_groups(kept, count, sizes, layers.of_states)
        return make(
            groups=(*groups, *states.values()),
            layer_groups=_number_groups(kept, numbers, [*states], len(groups)),
            prefix_caching=prefix_caching,
            keep_classes=keep_classes,
        )

    kept = layers.kept or [Kept(True, None)] * len(layers.windows)
    sizes = dict(sizes)
    keep_classes = sizes.pop("keep_classes", 1)
    length = sizes["max_context_length"]
    return fit_either(fit_sequences, length, max_sequences, budget_bytes)


def _make_groups(
    layers: ModelLayers, max_sequences: int, step_tokens: int, sizes: dict[str, Any]
) -> tuple[tuple[CacheConfig, ...], tuple[int, ...]]:
    """Return the block groups, longest window first, and each layer's group."""
    ordered = order_windows(layers.windows)
    heads = layers.heads or (None,) * len(layers.windows)
    each = [*zip(layers.windows, heads, strict=False)]
    kinds = sorted(dict.fromkeys(each), key=lambda kind: ordered.index(kind[0]))
    layer_groups = tuple(map(kinds.index, each))
    groups = []
    for i, (window, own) in enumerate(kinds):
        group = CacheConfig(
            num_layers=layer_groups.count(i),
            num_blocks=1,
            max_sequences=max_sequences,
            sliding_window=window,
            **sizes | (own._asdict() if own else {}),
        )
        blocks = max_sequences * group.most_blocks(step_tokens)
        groups.append(dataclasses.replace(group, num_blocks=blocks))
    return tuple(groups), layer_groups


def _make_state_groups(
    kept: Sequence[Kept],
    max_sequences: int,
    sizes: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[LayerState, StateConfig]:
    """Return a group for each distinct state, in the order of the layers."""
    states = [layer.state for layer in kept if layer.state is not None]
    has_inputs = bool(fields.get("max_pending"))
    return {
        state: StateConfig(
            num_layers=states.count(state),
            max_sequences=max_sequences,
            max_context_length=sizes["max_context_length"],
            block_size=sizes.get("block_size", StateConfig.block_size),
            **state.as_fields(sizes["dtype"], has_inputs=has_inputs),
            **fields,
        )
        for state in dict.fromkeys(states)
    }


def _number_groups(
    kept: Sequence[Kept],  # of each layer
    layer_groups: Sequence[int],  # group of each attention layer
    states: Sequence[LayerState],  # one for each state group
    first: int,  # index of the first state group
) -> tuple[int | tuple[int, ...], ...]:
    """Return the groups of each layer of the model."""
    attending, numbers = iter(layer_groups), []
    for layer in kept:
        own: tuple[int, ...] = (next(attending),) if layer.attends else ()
        if layer.state is not None:
            own += (first + states.index(layer.state),)
        numbers.append(own[0] if len(own) == 1 else own)
    return tuple(numbers)
