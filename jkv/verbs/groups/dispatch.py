"""The public functions on groups: to the group of a layer, to all, or to the first."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jkv.inspection.invariants import check
from jkv.metadata import requests
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.state.kinds import fields_of
from jkv.status import InvariantError, Status, UsageError
from jkv.storage.swapped import Swapped
from jkv.verbs.allocation import Allocation, allocate, can_allocate, free
from jkv.verbs.appending import append
from jkv.verbs.attending import attend
from jkv.verbs.compaction import compact
from jkv.verbs.eviction import touch
from jkv.verbs.forking import Fork, fork
from jkv.verbs.groups import joint
from jkv.verbs.groups.plans import GroupedBatch, GroupLayer
from jkv.verbs.groups.refusals import refuse_groups
from jkv.verbs.reordering import reorder
from jkv.verbs.swapping import SwapIn, judge_swap_in, swap_in, swap_out
from jkv.verbs.truncation import truncate
from jkv.verbs.writing import write

Arguments = dict[str, Any]

# Of what all groups have in common, the first tells.
_OF_THE_FIRST = ("context_lengths", "clock", "least_recently_used", "tokens")

# Made of verbs, and of numbers of blocks that they ask all groups for.
_LOOPS = ("add_prompts", "begin", "cancel", "decode", "extend", "generate", "prefill")

# Of one layer.
_OF_A_LAYER = ("read", "read_slot")


class Grouped(Protocol):
    """What is asked of a cache of groups."""

    @property
    def groups(self) -> tuple[Cache, ...]:
        """The cache of each group."""
        ...

    def with_groups(self, groups: tuple[Cache, ...]) -> Self:
        """Return the cache with other groups."""
        ...

    def find_layer(self, layer: Any) -> GroupLayer:
        """Return where the keys and values of a layer are."""
        ...


def call_on_groups(
    cache: Grouped, function: Callable[..., Any], given: Arguments
) -> Any:
    """Call a public function on a cache of groups.

    Args:
      cache: the cache.
      function: the function, as it is for one cache.
      given: all its arguments by name.
    """
    name, given = function.__name__, dict(given)
    given.pop("cache", None)
    if name in _OF_THE_FIRST:
        return function(cache.groups[0], **given)
    if name in _OF_A_LAYER:
        found = cache.find_layer(given.pop("layer"))
        return function(cache.groups[found.group], found.place, **given)
    if name in _LOOPS:
        return function(cache=cache, **given)
    if name not in _VERBS:
        refuse_groups(name, len(cache.groups), runs_model="model" in given)
    return _VERBS[name](cache, **given)


def _write_in_groups(cache: Grouped, layer: Any, batch: Any, **given: Any) -> Grouped:
    found, groups = cache.find_layer(layer), list(cache.groups)
    plan = _plans_of(batch)[found.group]
    groups[found.group] = write(groups[found.group], found.place, plan, **given)
    return cache.with_groups(tuple(groups))


def _attend_in_groups(
    cache: Grouped, layer: Any, batch: Any, queries: Any, **given: Any
) -> Any:
    found = cache.find_layer(layer)
    group, plan = cache.groups[found.group], _plans_of(batch)[found.group]
    return attend(group, found.place, plan, queries, **given)


def _append_in_groups(
    cache: Grouped, seq_ids: Any, num_tokens: Any, **given: Any
) -> tuple[Grouped, GroupedBatch]:
    ids, counts = requests.broadcast(seq_ids=seq_ids, num_tokens=num_tokens)
    ids = jnp.asarray(ids)
    # A plain 1 says at trace time that the step is one of decoding.
    each: Any = num_tokens if isinstance(num_tokens, int) else counts
    groups = cache.groups
    # No group has an index; tokens are told to those that record them.
    status = joint.judge(
        groups, ids, lambda group, ids: append(group, ids, each, **given)[1].status
    )
    left = joint.leave_out(ids, status)
    grown = [append(group, left, each, **given) for group in groups]
    first = joint.count_refusals(grown[0][0], status)
    metadata = groups[0].metadata
    lengths = jnp.where(
        requests.is_live(metadata, ids),
        metadata.context_lengths.at[ids].get(mode="clip"),
        0,
    )
    plan = grown[0][1]
    fields = fields_of(Batch, plan) | dict(
        seq_ids=ids,
        status=status,
        context_lengths=jnp.where(left == ids, plan.context_lengths, lengths),
    )
    batch = GroupedBatch(**fields, others=tuple(plan for _, plan in grown[1:]))
    return cache.with_groups((first, *(group for group, _ in grown[1:]))), batch


def _allocate_in_groups(
    cache: Grouped, num_tokens: Any, tokens: Any, keep_free: Any, **given: Any
) -> tuple[Grouped, Allocation]:
    num = None if tokens is None else requests.as_prompts(tokens).shape[0]
    (counts,) = requests.broadcast(num, num_tokens=num_tokens)
    counts = jnp.asarray(counts)

    def reserve(
        group: Cache, counts: jax.Array, keep_free: Any
    ) -> tuple[Cache, Allocation]:
        window = group.metadata.window
        if window is not None:  # blocks that a window gives back are not reserved
            most = jnp.int32(window.length)
            is_count = counts <= group.max_context_length
            counts = jnp.where(is_count, jnp.minimum(counts, most), counts)
        return allocate(group, counts, keep_free=keep_free, **given)

    def judge_with(keep_free: Any) -> joint.Judge:
        return lambda group, counts: reserve(group, counts, keep_free)[1].status

    groups = cache.groups
    # A scheduler has promised blocks in each group.
    kept = keep_free if isinstance(keep_free, tuple) else (keep_free,) * len(groups)
    status = joint.judge(groups, counts, [judge_with(blocks) for blocks in kept])
    left = joint.leave_out(counts, status)
    opened = [
        reserve(group, left, blocks) for group, blocks in zip(groups, kept, strict=True)
    ]
    first = joint.count_refusals(opened[0][0], status)
    result = opened[0][1]._replace(status=status)
    return cache.with_groups((first, *(group for group, _ in opened[1:]))), result


def _fork_in_groups(cache: Grouped, seq_ids: Any, lengths: Any) -> tuple[Grouped, Fork]:
    (ids,) = requests.broadcast(seq_ids=seq_ids)
    ids = jnp.asarray(ids)
    status = joint.judge(
        cache.groups, ids, lambda group, ids: fork(group, ids, lengths)[1].status
    )
    left = joint.leave_out(ids, status)
    forked = [fork(group, left, lengths) for group in cache.groups]
    first = joint.count_refusals(forked[0][0], status)
    result = Fork(forked[0][1].seq_ids, status)
    return cache.with_groups((first, *(group for group, _ in forked[1:]))), result


def _truncate_in_groups(
    cache: Grouped, seq_ids: Any, lengths: Any
) -> tuple[Grouped, jax.Array]:
    return _change_in_all(cache, truncate, joint.judge, seq_ids=seq_ids, others=lengths)


def _reorder_in_groups(
    cache: Grouped, seq_ids: Any, parents: Any
) -> tuple[Grouped, jax.Array]:
    judge = joint.judge_until_agreed
    return _change_in_all(cache, reorder, judge, seq_ids=seq_ids, others=parents)


def _change_in_all(
    cache: Grouped,
    verb: Callable[..., tuple[Cache, jax.Array]],
    judge: Callable[..., jax.Array],
    *,
    seq_ids: Any,
    others: Any,
) -> tuple[Grouped, jax.Array]:
    """Change sequences in all groups, or in none."""
    ids, others = map(jnp.asarray, requests.broadcast(seq_ids=seq_ids, others=others))
    status = judge(cache.groups, ids, lambda group, ids: verb(group, ids, others)[1])
    left = joint.leave_out(ids, status)
    first, *rest = (verb(group, left, others)[0] for group in cache.groups)
    first = joint.count_refusals(first, status)
    return cache.with_groups((first, *rest)), status


def _free_in_groups(cache: Grouped, seq_ids: Any) -> tuple[Grouped, jax.Array]:
    freed = [free(group, seq_ids) for group in cache.groups]
    return cache.with_groups(tuple(group for group, _ in freed)), freed[0][1]


def _touch_in_groups(cache: Grouped, seq_ids: Any) -> tuple[Grouped, jax.Array]:
    touched = [touch(group, seq_ids) for group in cache.groups]
    return cache.with_groups(tuple(group for group, _ in touched)), touched[0][1]


def _swap_out_of_groups(
    cache: Grouped, seq_ids: Any
) -> tuple[Grouped, tuple[Swapped, ...]]:
    left = [swap_out(group, seq_ids) for group in cache.groups]
    groups, swapped = zip(*left, strict=True)
    return cache.with_groups(groups), swapped


def _swap_in_to_groups(
    cache: Grouped, swapped: Any, donate: bool
) -> tuple[Grouped, SwapIn]:
    groups = cache.groups
    if not isinstance(swapped, tuple) or len(swapped) != len(groups):
        raise UsageError(
            f"swapped must be what swap_out returned for a cache of {len(groups)} "
            f"groups: a tuple with the sequences of each"
        )
    pairs = list(zip(groups, swapped, strict=True))
    causes = [judge_swap_in(*pair) for pair in pairs]
    cause = next((cause for cause in causes if cause != Status.OK), None)
    if cause is not None:
        status = jnp.full((swapped[0].num_sequences,), cause, jnp.int32)
        first = joint.count_refusals(groups[0], status)
        nobody = jnp.full_like(status, NO_SEQUENCE)
        return cache.with_groups((first, *groups[1:])), SwapIn(nobody, status)
    entered = [swap_in(group, each, donate=donate) for group, each in pairs]
    return cache.with_groups(tuple(group for group, _ in entered)), entered[0][1]


def _commit_nothing(cache: Grouped, batch: Any) -> Grouped:
    _plans_of(batch)
    return cache  # no group has an index


def _compact_in_groups(cache: Grouped) -> Grouped:
    return cache.with_groups(tuple(map(compact, cache.groups)))


def _can_allocate_in_groups(cache: Grouped, num_tokens: Any) -> jax.Array:
    (counts,) = requests.broadcast(num_tokens=num_tokens)
    return jnp.asarray(
        np.logical_and.reduce([can_allocate(group, counts) for group in cache.groups])
    )


def _check_all(cache: Grouped) -> None:
    """Check each group, and that all have the same sequences."""
    first, *others = cache.groups
    check(first)
    for group in others:
        check(group)
        for name in ("is_open", "context_lengths"):
            found, expected = (getattr(g.metadata, name) for g in (group, first))
            if not np.array_equal(found, expected):
                raise InvariantError(f"groups: {name} differs between groups")


def _plans_of(batch: Any) -> tuple[Batch, ...]:
    """Return the plan of each group."""
    if not isinstance(batch, GroupedBatch):
        raise UsageError(
            "batch must be what append returned for this cache of groups, got "
            f"{type(batch).__name__}"
        )
    return batch.groups


_VERBS: dict[str, Callable[..., Any]] = {
    "allocate": _allocate_in_groups,
    "append": _append_in_groups,
    "attend": _attend_in_groups,
    "can_allocate": _can_allocate_in_groups,
    "check": _check_all,
    "commit": _commit_nothing,
    "compact": _compact_in_groups,
    "fork": _fork_in_groups,
    "free": _free_in_groups,
    "reorder": _reorder_in_groups,
    "swap_in": _swap_in_to_groups,
    "swap_out": _swap_out_of_groups,
    "touch": _touch_in_groups,
    "truncate": _truncate_in_groups,
    "write": _write_in_groups,
}
