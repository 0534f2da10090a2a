"""debug: a cache that detects misuse.

Debug mode sets the interceptor of a cache, a watcher. Its arrays change the pytree, so
programs are compiled separately and other caches pay nothing. Each public function
dispatches to the interceptor, if there is one (`jkv.state.entry`): the watcher checks
the arguments, calls the function on the plain cache, checks the result and attaches
itself again. Run-time
findings reach the host by `jax.debug.callback`.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.inspection.findings import (
    DebugError,
    Watch,
    find_caller,
    is_called_from_outside,
)
from jkv.state import Batch, Cache, GroupLayer
from jkv.state.cache import Role
from jkv.state.entry import takes_cache
from jkv.status import UsageError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WatchedBatch(Batch):
    """A batch planned in debug mode."""

    stamp: jax.Array  # u32[], clock of the append
    created: jax.Array  # u32[B], clock at which each sequence was opened
    watch: Watch = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepWatcher:
    """State of debug mode. Stamps are the low word of the cache's clock."""

    # Per group u32[L, S]: stamp of the last step written, by layer and sequence.
    written: tuple[jax.Array, ...]
    uncommitted: jax.Array  # u32[S], stamp of an uncommitted step, or 0
    planned: jax.Array  # u32[S], stamp of the newest step, or 0
    starts: jax.Array  # i32[S], position of its first row
    watch: Watch = dataclasses.field(metadata={"static": True})

    def call(
        self,
        function: Callable[..., Any],
        cache: Cache,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        role: Role | None,
    ) -> Any:
        """Call a public function on the plain cache and check its use."""
        args, kwargs = given
        bound = inspect.signature(function).bind(*args, **kwargs)
        named, name = bound.arguments, function.__name__
        if "model" in named:  # the verbs called inside are watched one by one
            return function(*args, **kwargs)
        plain = dataclasses.replace(cache, interceptor=None)
        after, batch = self, named.get("batch")
        if role in _LOOKS and isinstance(batch, Batch):
            if not isinstance(batch, WatchedBatch) or batch.watch is not self.watch:
                raise UsageError(
                    f"batch of {name} was planned on another cache, or before jkv.debug"
                    f"; pass the cache that append returned with it"
                )
            step = _Step(self, plain, name, batch, batch.stamp)
            is_open = plain.metadata.sequences.is_open
            is_open = is_open.at[step.row].get(mode="fill", fill_value=True)
            step.note(
                f"{name} with a batch of a sequence that was freed; its id may belong "
                f"to another sequence",
                step.served & ((step.created != batch.created) | ~is_open),
            )
            if batch.mask is None or not batch.mask.reads_only:  # nothing is written
                after = _LOOKS[role](step, named.get("layer"))
            named["batch"] = Batch(**_fields_of(batch))
        # The package's own loops pass tokens to any cache.
        if named.get("tokens") is not None and not plain.metadata.records_tokens:
            if is_called_from_outside(depth=2):
                text = (
                    f"{name}(tokens=) is ignored, since the cache records no tokens; "
                    f"configure record_tokens=True or prefix_caching=True"
                )
                self.watch.note(text, find_caller(), True)
        named["cache"] = plain
        answer = function(*bound.args, **bound.kwargs)
        if role is Role.CHECKS:
            self.watch.watch_copies(_keys_of(cache))
            if findings := self.watch.take_findings():
                raise DebugError(findings)
        if role is Role.SETS_DEBUG:
            return answer
        return after._watch_answer(plain, answer, role)

    def _watch_answer(self, before: Cache, answer: Any, role: Role | None) -> Any:
        """Attach the watcher to the caches and batches in a function's result."""
        if isinstance(answer, Cache):
            return dataclasses.replace(answer, interceptor=self)
        if isinstance(answer, Batch) and not isinstance(answer, WatchedBatch):
            step = _Step(self, before, "peek", answer, before.metadata.now)
            return step.watch(answer)
        if not (isinstance(answer, tuple) and answer and isinstance(answer[0], Cache)):
            return answer
        cache, *results = answer
        if role is Role.PLANS:
            step = _Step(self, before, "append", results[0], cache.metadata.now)
            return _look_at_append(step, cache, results[0])
        return dataclasses.replace(cache, interceptor=self), *results


@takes_cache(role=Role.SETS_DEBUG)
def debug(cache: Cache, enabled: bool = True) -> Cache:
    """Return the cache in debug mode, in which `check` also reports misuse.

    Use it in place of the cache, eagerly or under jit, in loops and in `generate`. Each
    finding is logged at once and raised by the next `jkv.check(cache)`:

    * `write` or `attend` with a traced layer that does not exist;
    * `attend` before the step is written; with a prefix index, `commit` before all
      layers are;
    * a layer written twice in a step, or not before the sequence's next step;
    * tokens passed to a cache that records none;
    * a batch of another cache of the same sizes, or of a freed sequence, as its id may
      have been reused;
    * steps not committed although the cache has a prefix index;
    * a pool that was copied because the cache was not donated.

    Steps are compiled again for each cache in debug mode, and run slower.

    Args:
      cache: the cache; both share their arrays.
      enabled: False returns the plain cache.

    Returns:
      The cache.

    Raises:
      UsageError: inside jit, where caches cannot be distinguished.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.debug(jkv.init(jkv.CacheConfig.toy())), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> rows = jnp.ones((1, 1, 8))
      >>> outputs = jkv.attend(cache, 0, batch, rows)  # nothing was written
      >>> jkv.check(cache)
      Traceback (most recent call last):
      ...
      jkv.inspection.findings.DebugError: ...: attend reads layer 0 before this step \
is written to it (1 times)
    """
    if not enabled:
        return cache
    if isinstance(cache.metadata.sequences.rows, jax.core.Tracer):
        raise UsageError("debug distinguishes caches on the host; call it outside jit")
    num_sequences, now = cache.max_sequences, cache.metadata.now
    watcher = StepWatcher(
        written=tuple(
            jnp.full((each.num_layers, num_sequences), now) for each in cache.storage
        ),
        uncommitted=jnp.zeros((num_sequences,), jnp.uint32),
        planned=jnp.zeros((num_sequences,), jnp.uint32),
        starts=jnp.zeros((num_sequences,), jnp.int32),
        watch=Watch(_keys_of(cache)),
    )
    return dataclasses.replace(cache, interceptor=watcher)


class _Step:
    """A watched call of `append`, `write`, `attend` or `commit`."""

    def __init__(
        self,
        watcher: StepWatcher,
        cache: Cache,  # before the call
        name: str,
        batch: Batch,
        stamp: jax.Array,  # u32[], clock of the step
    ) -> None:
        self.watcher, self.cache, self.name, self.stamp = watcher, cache, name, stamp
        self.where = find_caller()
        # A canvas is written again in each round of denoising.
        self.may_rewrite = batch.mask is not None or batch.is_second or batch.is_draft
        self.served = batch.query_lengths > 0
        self.row = jnp.where(self.served, batch.seq_ids, cache.max_sequences)
        # u32[B], clock at which the sequences were opened.
        self.created = self.of_rows(cache.metadata.sequences.created)

    def watch(self, batch: Batch) -> WatchedBatch:
        """Return the batch with the stamps of this step."""
        own: dict[str, Any] = {"stamp": self.stamp, "created": self.created}
        return WatchedBatch(**_fields_of(batch), **own, watch=self.watcher.watch)

    def of_rows(self, array: jax.Array) -> jax.Array:
        """Gather an array, [..., S], at the batch's sequences, [..., B]."""
        return array.at[..., self.row].get(mode="fill", fill_value=0)

    def note(self, text: str, *is_wrong: jax.Array) -> None:
        """Record a finding on the host if any of `is_wrong`, bool[...], is True."""
        found = functools.reduce(operator.or_, map(jnp.any, is_wrong))
        note = functools.partial(self.watcher.watch.note, text, self.where)
        jax.debug.callback(note, found)

    def find(
        self, layer: Any, *, is_state: bool = False
    ) -> tuple[GroupLayer, jax.Array]:
        """Return a layer's location, past the end if missing, and its validity."""
        find = self.cache.find_state if is_state else self.cache.find_layer
        group, given = find(layer)
        num_layers = self.watcher.written[group].shape[0]
        number = jnp.asarray(given).astype(jnp.int32)
        is_there = (number >= 0) & (number < num_layers)
        among = f" in group {group}" if len(self.watcher.written) > 1 else ""
        self.note(
            f"{self.name} with a layer that does not exist: there are "
            f"{num_layers}{among}",
            ~is_there,
        )
        # Negative indices would wrap around.
        return GroupLayer(group, jnp.where(is_there, number, num_layers)), is_there


def _look_at_append(
    step: _Step, cache: Cache, batch: Batch
) -> tuple[Cache, WatchedBatch]:
    """Check that the previous step was committed and written; record the new one."""
    watcher, row = step.watcher, step.row
    if cache.metadata.index.is_there:
        pending = step.of_rows(watcher.uncommitted)
        step.note(
            "append to a sequence before its last step was committed; with "
            "prefix_caching call commit(cache, batch) after the last layer's write",
            step.served & (pending != 0) & _is_before(step.created, pending),
        )
        watcher = _with_uncommitted(watcher, row, step.stamp)
    planned, starts = step.of_rows(watcher.planned), step.of_rows(watcher.starts)
    lengths = batch.context_lengths - batch.query_lengths
    # Truncated tokens need not be written.
    is_left = (planned != 0) & _is_before(step.created, planned) & (lengths > starts)
    for number, written in enumerate(watcher.written):
        among = f" of group {number}" if len(watcher.written) > 1 else ""
        step.note(
            f"append to a sequence before its last step was written to all layers"
            f"{among}; unwritten slots are undefined",
            is_left[None] & _is_before(step.of_rows(written), planned[None]),
        )
    watcher = dataclasses.replace(
        watcher,
        planned=watcher.planned.at[row].set(step.stamp, mode="drop"),
        starts=watcher.starts.at[row].set(lengths, mode="drop"),
    )
    return dataclasses.replace(cache, interceptor=watcher), step.watch(batch)


def _with_uncommitted(
    watcher: StepWatcher, row: jax.Array, stamp: jax.Array | int
) -> StepWatcher:
    """Set the stamps of uncommitted steps, or 0, at `row`, i32[B]."""
    uncommitted = watcher.uncommitted.at[row].set(stamp, mode="drop")
    return dataclasses.replace(watcher, uncommitted=uncommitted)


def _look_at_state(step: _Step, layer: Any) -> StepWatcher:
    """Check that the layer of a state exists."""
    step.find(layer, is_state=True)
    return step.watcher


def _look_at_write(step: _Step, layer: Any, *, is_state: bool = False) -> StepWatcher:
    """Check that a layer or state is written once per step, and record it."""
    lost = "the first rows are overwritten"
    if is_state:
        lost = "the first read is no longer the state before the step"
    (group, number), is_there = step.find(layer, is_state=is_state)
    written = list(step.watcher.written)
    stamps = written[group].at[number, step.row].get(mode="fill", fill_value=0)
    which = layer if isinstance(layer, int | np.integer) else "(traced)"
    if not step.may_rewrite:
        step.note(
            f"{step.name} to layer {which} for the second time in one step: {lost}",
            step.served & is_there & (stamps == step.stamp),
        )
    written[group] = written[group].at[number, step.row].set(step.stamp, mode="drop")
    return dataclasses.replace(step.watcher, written=tuple(written))


def _look_at_attend(step: _Step, layer: Any) -> StepWatcher:
    """Check that the step was written to the attended layer."""
    (group, number), is_there = step.find(layer)
    found = step.watcher.written[group].at[number, step.row]
    is_old = _is_before(found.get(mode="fill", fill_value=0), step.stamp)
    which = layer if isinstance(layer, int | np.integer) else "(traced)"
    step.note(
        f"attend reads layer {which} before this step is written to it",
        step.served & is_there & is_old,
    )
    return step.watcher


def _look_at_commit(step: _Step, _layer: Any) -> StepWatcher:
    """Check that the step was written to all layers, and record its commit."""
    if not step.cache.metadata.index.is_there:  # commit has no effect
        return step.watcher
    olds = [_is_before(each, step.stamp) for each in step.watcher.written]
    behind = [old.at[:, step.row].get(mode="fill", fill_value=False) for old in olds]
    step.note("commit of a step that is not written to all layers", *behind)
    return _with_uncommitted(step.watcher, step.row, 0)


_LOOKS: dict[Role | None, Callable[[_Step, Any], StepWatcher]] = {
    Role.WRITES: _look_at_write,
    Role.READS: _look_at_attend,
    Role.WRITES_STATE: functools.partial(_look_at_write, is_state=True),
    Role.READS_STATE: _look_at_state,
    Role.COMMITS: _look_at_commit,
}


def _fields_of(batch: Batch) -> dict[str, Any]:
    """Return the fields of a plain batch."""
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)}


def _is_before(stamp: jax.Array, other: jax.Array) -> jax.Array:
    """Return True for stamps, u32[...], older than `other`; counters may wrap."""
    return (stamp - other).astype(jnp.int32) < 0


def _keys_of(cache: Cache) -> list[jax.Array]:
    """Return the last storage array of each group: keys, or a state."""
    return [[*storage.arrays.values()][-1] for storage in cache.storage]
