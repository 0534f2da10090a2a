"""What is scored: a model, where its keys and values lie, and in which sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.counts import WITHOUT_INDEX
from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.model.protocol import Model, call_model
from jkv.decoding.scoring.layout import count_blocks
from jkv.decoding.texts.text_tree import TextTree
from jkv.making.initialization import init
from jkv.sharding.loops import vary_with
from jkv.state import Batch, Cache
from jkv.status import UsageError

# Fields of a `StateConfig` whose states are neither found again nor taken back. They
# are whole on each device, as what is spread may be an input.
WITHOUT_COPIES: dict[str, Any] = dict(
    num_snapshots=0, snapshot_every=None, max_pending=0, inputs=None, heads_axes=None
)


class Scored(NamedTuple):
    """A model that scores texts."""

    model: Model
    params: Any
    config: GroupedConfig
    mesh: jax.sharding.Mesh | None  # on which the weights lie, None for one device
    heads: str | None  # its axis over which kv heads are spread

    def check(self) -> None:
        """Refuse an axis without its mesh, and a mesh of which nothing is said."""
        if (self.mesh is None) != (self.heads is None):
            raise UsageError(
                "score takes mesh= and heads= together, the axis over which heads of "
                "weights are spread; leave out both where they are spread over none"
            )

    def init(
        self, config: CacheConfig | GroupedConfig, texts: Any, *, storage: bool = True
    ) -> Cache:
        """Return a fresh cache for texts, a pytree.

        Inside a `shard_map` of the caller's its keys and values vary over all axes over
        which the weights or the texts do.
        """
        cache = init(config, storage=storage, mesh=self.mesh, heads=self.heads)
        return cache.with_storage(vary_with(cache.storage, (self.params, texts)))

    def call(
        self, tokens: jax.Array, cache: Cache, batch: Batch
    ) -> tuple[jax.Array, Cache]:
        """Run the model on tokens, i32[R], negative where a row has none."""
        tokens = jnp.maximum(tokens, 0)
        return call_model(self.model, self.params, tokens, cache, batch)


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
