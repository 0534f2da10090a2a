"""Where the keys and values of what is scored lie: on one device, or on a mesh."""

from typing import Any, NamedTuple

import jax

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig
from jkv.making.initialization import init
from jkv.sharding.varying import vary_with
from jkv.state import Cache
from jkv.status import UsageError


class Devices(NamedTuple):
    """A mesh, and its axis over which kv heads are spread; None for one device."""

    mesh: jax.sharding.Mesh | None
    heads: str | None

    def check(self) -> None:
        """Refuse an axis without its mesh, and a mesh of which nothing is said."""
        if (self.mesh is None) != (self.heads is None):
            raise UsageError(
                "score takes mesh= and heads= together, the axis over which heads of "
                "weights are spread; leave out both where they are spread over none"
            )

    def init(
        self, config: CacheConfig | GroupedConfig, given: Any, *, storage: bool = True
    ) -> Cache:
        """Return a fresh cache, for what is given to the model.

        Inside a `shard_map` of the caller's its keys and values vary over all axes over
        which the weights or the texts do.

        Args:
          given: a pytree with the weights and the texts.
          storage: as for `jkv.init`.
        """
        cache = init(config, storage=storage, mesh=self.mesh, heads=self.heads)
        return cache.with_storage(vary_with(cache.storage, given))
