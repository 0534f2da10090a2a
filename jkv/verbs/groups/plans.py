"""Where a layer of a group is, and the plan of one step for all groups."""

import dataclasses
from typing import NamedTuple, Self

import jax

from jkv.attention.kernel.lists import WorkLists
from jkv.state import Batch
from jkv.state.kinds import as_plain


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

    def with_work_lists(self, lists: tuple[WorkLists | None, ...]) -> Self:
        """Return the step with other lists for the kernel, in each group."""
        first, *rest = lists
        others = tuple(
            each.with_work_lists((of_group,))
            for each, of_group in zip(self.others, rest, strict=True)
        )
        return dataclasses.replace(super().with_work_lists((first,)), others=others)

    def first_rows(self, num_rows: int) -> Self:
        """Return the step without the rows behind the first ones, in each group."""
        others = tuple(each.first_rows(num_rows) for each in self.others)
        return dataclasses.replace(super().first_rows(num_rows), others=others)
