"""Where a layer of a group is, and the plan of one step for all groups."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jkv.state import Batch


class GroupLayer(NamedTuple):
    """A layer by its group, and its place in it: where verbs take a layer."""

    group: int  # static
    place: int | jax.Array  # i32[] or int, which may be traced


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupedBatch(Batch):
    """The plan of one step for all groups; what they differ in is that of the first."""

    others: tuple[Batch, ...]  # of the other groups

    @property
    def groups(self) -> tuple[Batch, ...]:
        """The plan of each group."""
        return (as_plain(Batch, self), *self.others)


def as_plain(kind: type[Any], value: Any) -> Any:
    """Return a value as one of the class that it is derived from."""
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: getattr(value, name) for name in names})
