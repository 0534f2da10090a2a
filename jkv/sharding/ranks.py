"""Independent pools over an axis of a mesh: each rank has one, and nothing crosses."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jkv.sharding.resharding import spread

Arrays = TypeVar("Arrays")


@dataclasses.dataclass(frozen=True)
class PoolSharding:
    """How pools lie on a mesh: every array of the cache has an axis of ranks first."""

    mesh: jax.sharding.Mesh  # the devices
    axis: str  # the mesh axis of which each rank has a pool

    def __post_init__(self) -> None:
        """Refuse an axis that the mesh lacks."""
        if self.axis not in self.mesh.axis_names:
            names = ", ".join(map(repr, self.mesh.axis_names)) or "none"
            raise ValueError(
                f"pools={self.axis!r} is no axis of the mesh; it has {names}"
            )

    @property
    def num_ranks(self) -> int:
        """Pools."""
        return int(self.mesh.shape[self.axis])

    def within(self, spec: jax.sharding.PartitionSpec) -> jax.sharding.NamedSharding:
        """Return where arrays go that a spec partitions within their rank."""
        return jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(self.axis, *spec)
        )

    def map(
        self,
        function: Callable[[Any, Any], Any],
        divided: Any,
        whole: Any,
        *,
        out_specs: Any,
    ) -> Any:
        """Call `function(divided, whole)` on each rank, with its part of the first.

        Other axes of the mesh stay with the caller. Types do not say what varies over
        ranks: the function calls models, whose own loops need not know of it.
        """
        context = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            function,
            mesh=self.mesh if context.empty else context,
            in_specs=(
                jax.sharding.PartitionSpec(self.axis),
                jax.sharding.PartitionSpec(),
            ),
            out_specs=out_specs,
            axis_names={self.axis},
            check_vma=False,
        )
        return mapped(
            spread(divided, self.mesh, self.axis, 0),
            spread(whole, self.mesh, self.axis, None),
        )


def without_rank(arrays: Arrays) -> Arrays:
    """Return what one rank has, of arrays [1, ...] inside `shard_map`."""
    return jax.tree.map(lambda array: array[0], arrays)


def with_rank(arrays: Arrays) -> Arrays:
    """Return what one rank answers, as arrays [1, ...]."""
    return jax.tree.map(lambda array: array[None], arrays)
