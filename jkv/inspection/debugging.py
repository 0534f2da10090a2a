"""debug: a cache that watches what is done with it.

A cache in debug mode is another type with two arrays more, so what is traced with it is
compiled for it, and other caches pay nothing. Each verb looks at the cache on entry
(`jkv.state.entry`); one in debug mode takes over there: it looks at the arguments,
calls the verb with a plain cache, and looks at the answer. What can only be seen at run
time reaches the host by `jax.debug.callback`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.inspection.answers import WatchedBatch, as_plain_batch, watched_kind
from jkv.inspection.findings import DebugError, Watch, find_caller
from jkv.state import Batch, Cache
from jkv.state.entry import takes_cache
from jkv.state.kinds import as_plain, fields_of
from jkv.status import UsageError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WatchedCache(Cache):
    """A cache in debug mode. Stamps are the low word of the cache's clock."""

    written: jax.Array  # u32[L, S], stamp of the step last written to a sequence
    uncommitted: jax.Array  # u32[S], stamp of a step not committed yet, or 0
    watch: Watch = dataclasses.field(metadata={"static": True})

    def enter(self, function: Callable[..., Any], given: inspect.BoundArguments) -> Any:
        """Call a public function on this cache, and look at what it does."""
        if "model" in given.arguments:  # its verbs are watched one by one
            return function(*given.args, **given.kwargs)
        name, batch = function.__name__, given.arguments.get("batch")
        cache = self
        if isinstance(batch, Batch):
            cache = _watch_step(self, name, given.arguments.get("layer"), batch)
            given.arguments["batch"] = as_plain_batch(batch)
        given.arguments["cache"] = as_plain(Cache, self)
        answer = function(*given.args, **given.kwargs)
        if name == "check":
            _raise_findings(self)
        return answer if name == "debug" else _watch_answer(cache, name, answer)


@takes_cache
def debug(cache: Cache, enabled: bool = True) -> Cache:
    """Return the cache in debug mode, in which `check` also raises what was done wrong.

    Use it in place of the other cache, eagerly or under jit, in loops, in `generate`.
    What is found is logged at once and raised by the next `jkv.check(cache)`:

    * `write` or `attend` with a traced layer that does not exist;
    * `attend` before the step is written; with a prefix index, `commit` before all
      layers are;
    * a batch of another cache of the same sizes, or one whose sequence was freed since,
      its id perhaps given out again;
    * steps not committed although the cache has a prefix index;
    * refused requests of `allocate`, `append` or `fork` whose status nothing looked at;
    * a pool that was copied since the cache was not donated.

    Steps are compiled for each cache in debug mode, and take longer.

    Args:
      cache: the cache; both share their arrays.
      enabled: False returns to a cache that is not watched.

    Returns:
      The cache.

    Raises:
      UsageError: inside jit, where no cache can be told from another.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.debug(jkv.init(config)), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> rows = jnp.ones((1, 1, 8))
      >>> outputs = jkv.attend(cache, 0, batch, rows)  # nothing was written
      >>> jkv.check(cache)
      Traceback (most recent call last):
      ...
      jkv.inspection.findings.DebugError: ...: attend reads layer 0 before this step \
is written to it (1 times)
    """
    plain = as_plain(Cache, cache)
    if not enabled:
        return plain
    if isinstance(cache.keys, jax.core.Tracer):
        raise UsageError("debug tells caches apart on the host: call it outside jit")
    return WatchedCache(
        **fields_of(Cache, plain),
        written=jnp.full((cache.num_layers, cache.max_sequences), cache.metadata.now),
        uncommitted=jnp.zeros((cache.max_sequences,), jnp.uint32),
        watch=Watch(cache.keys),
    )


def _watch_step(
    cache: WatchedCache, name: str, layer: Any, batch: Batch
) -> WatchedCache:
    """Look at a `write`, `attend` or `commit`, and note that it happened.

    Args:
      cache: the cache.
      name: of the verb.
      layer: as given; None for `commit`.
      batch: the step.

    Raises:
      UsageError: for a batch that was not planned on this cache.
    """
    if not isinstance(batch, WatchedBatch) or batch.watch is not cache.watch:
        raise UsageError(
            f"{name}: this batch was planned by append on another cache, or before "
            f"jkv.debug; use each batch with the cache that append returned with it"
        )
    note = functools.partial(_note, cache.watch, find_caller())
    served = batch.query_lengths > 0
    row = jnp.where(served, batch.seq_ids, cache.max_sequences)
    created = cache.metadata.created.at[row].get(mode="fill", fill_value=0)
    is_open = cache.metadata.is_open.at[row].get(mode="fill", fill_value=True)
    note(
        f"{name} with a batch whose sequence was freed since; its id may be another's",
        served & ((created != batch.created) | ~is_open),
    )
    if name == "commit":
        if cache.metadata.prefix is None:  # then it does nothing
            return cache
        behind = _is_before(cache.written, batch.stamp)
        behind = behind.at[:, row].get(mode="fill", fill_value=False)
        note("commit of a step that is not written to all layers", behind)
        uncommitted = cache.uncommitted.at[row].set(0, mode="drop")
        return dataclasses.replace(cache, uncommitted=uncommitted)
    layer_id = jnp.asarray(layer).astype(jnp.int32)
    is_there = (layer_id >= 0) & (layer_id < cache.num_layers)
    which = layer if isinstance(layer, int | np.integer) else "(traced)"
    note(
        f"{name} with a layer that does not exist: there are {cache.num_layers}",
        ~is_there,
    )
    # Negative indices would wrap around.
    layer_id = jnp.where(is_there, layer_id, cache.num_layers)
    if name == "write":
        written = cache.written.at[layer_id, row].set(batch.stamp, mode="drop")
        return dataclasses.replace(cache, written=written)
    found = cache.written.at[layer_id, row].get(mode="fill", fill_value=0)
    unwritten = served & is_there & _is_before(found, batch.stamp)
    note(f"attend reads layer {which} before this step is written to it", unwritten)
    return cache


def _note(watch: Watch, where: str, text: str, is_wrong: jax.Array) -> None:
    """Have the host note a mistake if any of these is true, bool[...]."""
    jax.debug.callback(functools.partial(watch.note, text, where), jnp.any(is_wrong))


def _is_before(stamp: jax.Array, other: jax.Array) -> jax.Array:
    """Return whether stamps, u32[...], are older than others; counters may wrap."""
    return (stamp - other).astype(jnp.int32) < 0


def _watch_answer(cache: WatchedCache, name: str, answer: Any) -> Any:
    """Return a verb's answer with the cache in debug mode, and its status watched."""
    if isinstance(answer, Cache):
        return dataclasses.replace(cache, **fields_of(Cache, answer))
    if not (isinstance(answer, tuple) and answer and isinstance(answer[0], Cache)):
        return answer
    after, result = answer
    after = dataclasses.replace(cache, **fields_of(Cache, after))
    if isinstance(result, Batch):
        return _watch_append(cache, after, result)
    if "status" in getattr(result, "_fields", ()):
        site = cache.watch.watch_status(name, find_caller(), result.status)
        kind: Any = type(result)
        result = watched_kind(kind).of(result, site)
    return after, result


def _watch_append(
    cache: WatchedCache, after: WatchedCache, batch: Batch
) -> tuple[WatchedCache, WatchedBatch]:
    """Watch a batch, and look whether the steps before it were committed."""
    where = find_caller()
    served = batch.query_lengths > 0
    row = jnp.where(served, batch.seq_ids, cache.max_sequences)
    created = cache.metadata.created.at[row].get(mode="fill", fill_value=0)
    if cache.metadata.prefix is not None:
        pending = cache.uncommitted.at[row].get(mode="fill", fill_value=0)
        _note(
            cache.watch,
            where,
            "append to a sequence whose last step was not committed: with "
            "prefix_caching call commit(cache, batch) after the last layer's write",
            served & (pending != 0) & _is_before(created, pending),
        )
        uncommitted = cache.uncommitted.at[row].set(after.metadata.now, mode="drop")
        after = dataclasses.replace(after, uncommitted=uncommitted)
    return after, WatchedBatch(
        **fields_of(Batch, batch),
        stamp=after.metadata.now,
        created=created,
        watch=cache.watch,
        site=cache.watch.watch_status("append", where, batch.status),
    )


def _raise_findings(cache: WatchedCache) -> None:
    """Raise what was found since the last time, if anything was."""
    cache.watch.watch_pool(cache.keys)
    if findings := cache.watch.take_findings():
        raise DebugError(findings)
