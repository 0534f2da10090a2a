"""The model of a scoring call, its mesh and cache sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.counts import WITHOUT_INDEX
from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.model.steps import Model, call_model
from jkv.decoding.scoring.layout import count_blocks
from jkv.decoding.sequences.trajectory_tree import TrajectoryTree
from jkv.making.initialization import init
from jkv.operations import vary_with
from jkv.state import Batch, Cache
from jkv.status import UsageError

# Fields of a `StateConfig` without snapshots and rollback. Each device has whole
# states, as an input may be sharded.
WITHOUT_COPIES: dict[str, Any] = dict(
    num_snapshots=0, snapshot_every=None, max_pending=0, inputs=None, heads_axes=None
)


class Scored(NamedTuple):
    """A model with its weights and configuration, for scoring."""

    model: Model
    params: Any
    config: GroupedConfig
    mesh: jax.sharding.Mesh | None  # the mesh of the weights, None for one device
    heads: str | None  # its axis for kv heads

    def check(self) -> None:
        """Check that `mesh` and `heads` are given together."""
        if (self.mesh is None) != (self.heads is None):
            raise UsageError(
                "mesh and heads must be given together, heads being the axis that "
                "shards the heads of the weights; omit both for unsharded weights"
            )

    def init(
        self,
        config: CacheConfig | GroupedConfig,
        sequences: Any,
        *,
        storage: bool = True,
    ) -> Cache:
        """Return a new cache for `sequences`, a pytree.

        Inside a caller's `shard_map` its keys and values vary over all axes of the
        weights and the sequences.
        """
        cache = init(config, storage=storage, mesh=self.mesh, heads=self.heads)
        return cache.with_storage(vary_with(cache.storage, (self.params, sequences)))

    def call(
        self, tokens: jax.Array, cache: Cache, batch: Batch
    ) -> tuple[jax.Array, Cache]:
        """Run the model on tokens, i32[R], negative for none."""
        tokens = jnp.maximum(tokens, 0)
        return call_model(self.model, self.params, tokens, cache, batch)[:2]


def resize(
    config: GroupedConfig,
    of_blocks: Callable[[CacheConfig], dict[str, Any]],  # changed fields of a group
    of_states: dict[str, Any],
) -> GroupedConfig:
    """Return a configuration with changed groups and without a prefix index."""
    groups = tuple(
        dataclasses.replace(
            group, **of_blocks(group) | WITHOUT_INDEX | {"observed_queries": 0}
        )
        if isinstance(group, CacheConfig)
        else dataclasses.replace(group, **of_states)
        for group in config.groups
    )
    return dataclasses.replace(config, groups=groups, **WITHOUT_INDEX)


def resize_for_tree(config: GroupedConfig, tree: TrajectoryTree) -> GroupedConfig:
    """Return a configuration for a whole tree, with float32 keys and values."""
    both: dict[str, Any] = dict(
        max_sequences=tree.num_segments, max_context_length=max(1, tree.max_length)
    )
    of_blocks = both | dict(
        num_blocks=count_blocks(tree.num_rows, tree.num_segments, config.block_size),
        dtype=jnp.float32,
        value_dtype=None,
        record_tokens=False,
        # The rows of a segment read positions that a window would release.
        sliding_window=None,
        num_sink_tokens=0,
    )
    return resize(config, lambda _: of_blocks, both | WITHOUT_COPIES)
