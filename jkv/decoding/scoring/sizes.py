"""Configurations of the same layers in other sizes, and without an index."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.counts import WITHOUT_INDEX
from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.scoring.layout import count_blocks
from jkv.decoding.texts.text_tree import TextTree

# Fields of a `StateConfig` whose states are neither found again nor taken back. They
# are whole on each device, as what is spread may be an input.
WITHOUT_COPIES: dict[str, Any] = dict(
    num_snapshots=0, snapshot_every=None, max_pending=0, inputs=None, heads_axes=None
)


def resize(
    config: GroupedConfig,
    of_blocks: Callable[[CacheConfig], dict[str, Any]],  # other fields of a group
    of_states: dict[str, Any],
) -> GroupedConfig:
    """Return a configuration with changed groups, and without an index."""
    groups = tuple(
        dataclasses.replace(group, **of_blocks(group) | WITHOUT_INDEX)
        if isinstance(group, CacheConfig)
        else dataclasses.replace(group, **of_states)
        for group in config.groups
    )
    return dataclasses.replace(config, groups=groups, **WITHOUT_INDEX)


def resize_for_tree(config: GroupedConfig, tree: TextTree) -> GroupedConfig:
    """Return a configuration that holds a whole tree, keys and values in float32."""
    both: dict[str, Any] = dict(
        max_sequences=tree.num_segments, max_context_length=max(1, tree.max_length)
    )
    of_blocks = both | dict(
        num_blocks=count_blocks(tree.num_rows, tree.num_segments, config.block_size),
        dtype=jnp.float32,
        value_dtype=None,
        record_tokens=False,
        # The rows of a segment see what a window would have given back.
        sliding_window=None,
        num_sink_tokens=0,
    )
    return resize(config, lambda _: of_blocks, both | WITHOUT_COPIES)
