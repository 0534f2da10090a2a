"""A cache for models whose layers differ in their windows: one cache for each group.

`GroupedCache` takes the place of a `Cache` in the verbs. A verb that is given one finds
its way here (`jkv.state.entry`): what names a layer goes to the group of that layer,
everything else to all groups. All groups have the same sequences, of the same ids and
lengths: a request is served by all of them, or by none.
"""

import dataclasses
from collections.abc import Callable
from inspect import BoundArguments
from typing import Any, Self

import jax

from jkv.config.grouped_config import GroupedConfig
from jkv.state import Cache
from jkv.state.kinds import as_plain, fields_of
from jkv.status import UsageError
from jkv.verbs.groups.dispatch import call_on_groups
from jkv.verbs.groups.plans import GroupLayer
from jkv.verbs.initialization import init


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GroupedCache(Cache):
    """Several caches, one for each group of layers, in the place of one.

    Its own fields are those of the first group, which sees furthest. `write`, `attend`
    and `read` take the model's number of a layer, or a `GroupLayer`.
    """

    others: tuple[Cache, ...]  # of the other groups
    # Static: the group of each layer of the model.
    layer_groups: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def groups(self) -> tuple[Cache, ...]:
        """The cache of each group."""
        return (as_plain(Cache, self), *self.others)

    def with_groups(self, groups: tuple[Cache, ...]) -> Self:
        """Return the cache with other groups."""
        fields = fields_of(Cache, groups[0])
        return dataclasses.replace(self, **fields, others=tuple(groups[1:]))

    def find_layer(self, layer: Any) -> GroupLayer:
        """Return where the keys and values of a layer are.

        Args:
          layer: int, of the model; or a `GroupLayer`, which is returned.

        Raises:
          UsageError: for a traced number, or one that no layer has.
        """
        if isinstance(layer, GroupLayer):
            return layer
        known = range(len(self.layer_groups))
        if not hasattr(layer, "__index__") or isinstance(layer, jax.core.Tracer):
            raise UsageError(
                "with groups a layer must be an int, as its group decides what is "
                "traced; in a scan over periods of layers take "
                "cache.find_periodic(layer, period, step)"
            )
        number = int(layer)
        if number not in known:
            raise UsageError(f"layer must be in 0..{len(known) - 1}, got {number}")
        group = self.layer_groups[number]
        return GroupLayer(group, self.layer_groups[:number].count(group))

    def find_periodic(
        self, layer: int, period: int, step: int | jax.Array
    ) -> GroupLayer:
        """Return layer `step * period + layer` in a scan over periods of layers.

        Args:
          layer: int, 0 to period-1, of the first period.
          period: int, after how many layers the groups repeat.
          step: i32[] or int, the number of the period; may be traced.

        Raises:
          UsageError: if the groups of the layers do not repeat like that.
        """
        groups = self.layer_groups
        pattern = groups[:period]
        repeated = (pattern * (-(-len(groups) // max(len(pattern), 1))))[: len(groups)]
        if not 0 <= layer < period or repeated != groups:
            raise UsageError(
                f"the groups of the layers, {groups}, do not repeat after {period}, or "
                f"layer {layer} is not in 0..{period - 1}"
            )
        first = self.find_layer(layer)
        each = pattern.count(first.group)
        return GroupLayer(first.group, first.place + step * each)

    def enter(self, function: Callable[..., Any], given: BoundArguments) -> Any:
        """Call a public function on the groups."""
        given.apply_defaults()
        return call_on_groups(self, function, given.arguments)

    def __repr__(self) -> str:
        """Describe each group."""
        return "\n".join(f"group {i}: {g!r}" for i, g in enumerate(self.groups))


def init_groups(
    config: GroupedConfig,
    *,
    storage: bool = True,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
) -> GroupedCache:
    """Return a fresh cache for a model whose layers differ in their windows.

    Args:
      config: the sizes of each group.
      storage: False leaves the K/V arrays empty, as for `init`.
      mesh, heads, context: devices, and how all groups lie on them, as for `init`.

    Returns:
      A `GroupedCache`, which `append`, `write`, `attend` and the other verbs of a step
      take in the place of a `Cache`.

    Example:
      >>> import jkv
      >>> config = jkv.GroupedConfig.for_context_length(
      ...     4096, max_sequences=2, layer_windows=[64, 64, None, 64], num_kv_heads=1,
      ...     head_dim=8, step_tokens=32)
      >>> cache, opened = jkv.allocate(jkv.init_groups(config), 0)
      >>> cache, batch = jkv.append(cache, opened.seq_ids, 32, capacity=32)
      >>> jkv.context_lengths(cache).tolist(), cache.find_layer(3)
      ([32, 0], GroupLayer(group=1, place=2))
    """
    where: Any = {"mesh": mesh, "heads": heads, "context": context}
    first, *others = (init(group, storage=storage, **where) for group in config.groups)
    return GroupedCache(
        **fields_of(Cache, first),
        others=tuple(others),
        layer_groups=config.layer_groups,
    )
