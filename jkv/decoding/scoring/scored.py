"""What is scored: a model, its sizes, and where its keys and values lie."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.model.protocol import Model, call_model
from jkv.making.initialization import init
from jkv.sharding.varying import vary_with
from jkv.state import Batch, Cache
from jkv.status import UsageError


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
