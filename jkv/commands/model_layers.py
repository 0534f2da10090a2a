"""What the layers of a model that is planned for keep, on all devices or on each."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.counts import count_bytes
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.grouping import ModelLayers, fit_context_length
from jkv.config.layers import Kept
from jkv.config.sizing import find_most, fit_memory


class StateBytes(NamedTuple):
    """What the states of a sequence take in all layers."""

    num_layers: int  # that have one
    summed: int  # bytes of what every token is added to
    past: int  # bytes of the tokens that convolutions look back to


def count_state_bytes(kept: tuple[Kept, ...] | None, dtype: Any) -> StateBytes | None:
    """Return the bytes of a sequence's states, None if no layer has one."""
    states = [layer.state for layer in kept or () if layer.state is not None]
    if not states:
        return None
    sizes = {True: 0, False: 0}
    for name, array in (each for state in states for each in state.arrays):
        itemsize = jnp.dtype(array.dtype or dtype).itemsize
        sizes[name.startswith("past")] += math.prod(array.shape) * itemsize
    return StateBytes(len(states), sizes[False], sizes[True])


@dataclasses.dataclass(frozen=True)
class Layers:
    """What is the same for sequences of all lengths."""

    model: ModelLayers
    step_tokens: int  # the most of a sequence in one step
    num_parts: int  # devices that share the tokens of each block
    sizes: dict[str, Any]  # the other fields of `CacheConfig`

    def divide(self, num_devices: int, sizes: dict[str, Any]) -> "Layers":
        """Return what each device keeps, of these sizes, and its heads of states."""
        kept = self.model.kept and tuple(
            layer._replace(state=layer.state and layer.state.divide(num_devices))
            for layer in self.model.kept
        )
        model = self.model._replace(kept=kept)
        return dataclasses.replace(self, model=model, sizes=self.sizes | sizes)

    def weigh(self, config: CacheConfig | GroupedConfig) -> int:
        """Return the bytes on each device: its part of blocks, and the rest whole."""
        stored = [g.sizes.lay_out_storage() for g in as_grouped(config).block_groups]
        blocks = sum(count_bytes(each.values()) for each in stored)
        return config.bytes - blocks + blocks // self.num_parts

    def fit_memory(self, fields: dict[str, Any], budget: int) -> CacheConfig:
        """Return what has the most blocks, of all layers that have some."""
        return fit_memory(CacheConfig, budget, weigh=self.weigh, **fields)

    def fit(self, length: int, max_sequences: int) -> CacheConfig | GroupedConfig:
        """Return the configuration for sequences of a length, with tables for them."""
        if not any(self.model.windows) and self.model.kept is None:
            return CacheConfig.for_context_length(
                length, max_sequences=max_sequences, **self.sizes
            )
        left_out = {"num_layers", "prefix_caching"}
        sizes = {n: value for n, value in self.sizes.items() if n not in left_out}
        return fit_context_length(
            GroupedConfig,
            self.model,
            sizes | {"max_context_length": length},
            step_tokens=self.step_tokens,
            prefix_caching=self.sizes.get("prefix_caching", False),
            max_sequences=max_sequences,
            budget_bytes=None,
        )

    def fit_most(self, length: int, budget: int) -> CacheConfig | GroupedConfig | None:
        """Return what holds the most sequences of a length; None if none fits."""
        most = find_most(lambda count: self.weigh(self.fit(length, count)), budget)
        return self.fit(length, most) if most else None

    def count_bytes(self, length: int) -> int:
        """Return the bytes of what is kept of one sequence of a length."""
        return self.fit(length, 1).storage_bytes
