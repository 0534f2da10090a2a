"""One answer from several groups: a request is served by all of them, or by none.

Each group judges the requests for itself, on its metadata alone. Who is refused by one
is padding for all of them when the verb is called: nobody who was served when judged is
refused then, as there is more room, not less. Only in `reorder` a request that is left
out gives nothing up for others, so that it is judged again until all groups agree.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import counters
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import Status

# Causes in the order in which they are tested, the last first.
_ORDER = (
    Status.OK,
    Status.OUT_OF_BLOCKS,
    Status.OUT_OF_SEQUENCES,
    Status.BATCH_FULL,
    Status.CONTEXT_FULL,
    Status.INVALID_ARGUMENT,
    Status.INVALID_SEQUENCE,
)

# What a verb answers to requests, i32[B], on one group: i32[B] of `Status`.
Judge = Callable[[Cache, jax.Array], jax.Array]


def judge(
    groups: tuple[Cache, ...], ids: jax.Array, verb: Judge | Sequence[Judge]
) -> jax.Array:
    """Return the status of each request, i32[B]: the first cause of any group.

    Args:
      groups: the caches.
      ids: i32[B], what -1 makes padding of.
      verb: the verb on one group, whose status counts and whose cache does not; or one
        for each group.
    """
    places = np.argsort(np.array(_ORDER)).astype(np.int32)
    bare = [without_storage(group) for group in groups]
    verbs = [verb] * len(groups) if callable(verb) else verb
    statuses = [verb(group, ids) for verb, group in zip(verbs, bare, strict=True)]
    found = jnp.stack([jnp.asarray(places)[status] for status in statuses])
    return jnp.asarray(np.array(_ORDER, np.int32))[jnp.max(found, axis=0)]


def judge_until_agreed(
    groups: tuple[Cache, ...], ids: jax.Array, verb: Judge
) -> jax.Array:
    """Return the status of each request, judged anew while somebody is refused."""
    State = tuple[jax.Array, jax.Array]

    def again(state: State) -> State:
        status, _ = state
        more = judge(groups, leave_out(ids, status), verb)
        return jnp.where(status == Status.OK, more, status), jnp.any(more != Status.OK)

    status = judge(groups, ids, verb)
    refused = jnp.any(status != Status.OK)
    status, _ = while_loop(lambda state: state[1], again, (status, refused))
    return status


def leave_out(ids: jax.Array, status: jax.Array) -> jax.Array:
    """Return the ids with -1 where a request is refused, i32[B]."""
    return jnp.where(status == Status.OK, ids, NO_SEQUENCE)


def count_refusals(cache: Cache, status: jax.Array) -> Cache:
    """Count refused requests in a group that saw them as padding."""
    metadata, _ = counters.settle(
        cache.metadata, status, jnp.zeros(status.shape, bool), None
    )
    return cache.with_metadata(metadata)


def without_storage(cache: Cache) -> Cache:
    """Return a cache of no layers, in which a verb moves no keys and values."""
    return cache.with_storage(
        {
            name: jnp.zeros((0, *pool.shape[1:]), pool.dtype)
            for name, pool in cache.storage.items()
        }
    )
