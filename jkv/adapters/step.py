"""Step: the cache inside a model that was written for another one.

Such a model calls attention in each layer with queries, keys and values, and has no
argument for the cache. A `Step` holds the cache during one trace of the model: each
call of `attend` writes a layer's rows, rebinds `step.cache` and attends.

    R, B  token rows, requests
    H, K  query heads, kv heads
    D, Dv  head dim of keys, of values
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jkv.adapters.mapped import Attended, Rows, attend_mapped
from jkv.metadata.requests import Integer
from jkv.operations import gather
from jkv.state import Batch, Cache, GroupLayer
from jkv.status import UsageError
from jkv.verbs.attending import attend
from jkv.verbs.writing import write


class Step:
    """One step of a model that calls `attend` in the attention of each layer.

    It belongs to the trace in which it is created, such as the body of a `jax.jit` or
    of a `lax.scan`, and is no pytree. Build one for each step; a scan over layers that
    carries the cache builds one for each trip. Calls under `jax.vmap` over rows or
    heads are served as one call; see `attend` where their numbers are equal.

    Attributes:
      cache: the cache with the rows written so far. Assign it after other verbs, such
        as `jkv.write_state`.
      batch: the plan from `append`.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, 3, capacity=3)
      >>> step = jkv.Step(cache, batch)
      >>> rows = jnp.ones((1, 3, 1, 8))  # a sequence of R rows
      >>> heads = step.attend(jnp.ones((1, 3, 2, 8)), rows, rows)
      >>> heads.shape, step.last(heads[..., 0, :]).shape
      ((1, 3, 2, 8), (1, 8))
      >>> _, _, length = jkv.read(step.cache, 0, 0)
      >>> int(length)
      3
    """

    cache: Cache
    batch: Batch

    def __init__(self, cache: Cache, batch: Batch) -> None:
        if not isinstance(cache, Cache) or not isinstance(batch, Batch):
            names = f"{type(cache).__name__} and {type(batch).__name__}"
            raise UsageError(
                f"cache and batch must be a jkv.Cache and a jkv.Batch, got {names}; "
                f"pass the results of jkv.append in their order"
            )
        self.cache, self.batch = cache, batch
        self._trace = get_opaque_trace_state()
        self._num_calls = 0
        self._previous: jax.Array | None = None  # of the last attention, [R, H]

    def attend(
        self,
        queries: jax.Array,
        keys: jax.Array | None,
        values: jax.Array | None = None,
        *,
        layer: Integer | GroupLayer | None = None,
        scale: float | jax.Array | None = None,
        window: Integer | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        causal: bool | None = None,
    ) -> jax.Array:
        """Write a layer's keys and values, and attend to the cached tokens.

        Each write depends on the attention before it. Otherwise XLA may order the write
        of a layer before the last read of the pool, and copies the pool: where a
        layer's keys do not depend on the layer below, as with shared keys and drafters.

        Under `jax.vmap` over rows and heads, shapes distinguish them unless R = K. Then
        the outermost axes are rows: map rows outside of heads, or pass all heads of a
        row at once.

        Args:
          queries: [R, H, D] in the batch's order, or with any leading axes of R rows in
            all, such as [1, R, H, D] or [R, 1, H, D].
          keys: [..., K, D] with the same leading axes, rotated by `batch.positions`;
            None attends to a layer written before, for layers that share keys.
          values: [..., K, Dv]; None with `values_in_keys`.
          layer: as for `jkv.write`; may be traced. None counts the calls from 0.
          scale: as for `jkv.attend`.
          window: as for `jkv.attend`.
          soft_cap: as for `jkv.attend`.
          sinks: f32[H], as for `jkv.attend`.
          causal: static; True ignores the batch's mask in this layer.

        Returns:
          [..., H, Dv] in the layout and dtype of the queries.

        Raises:
          UsageError: for rows of another number, in a trace other than the step's (a
            `jax.jit`, scan or rematerialization inside of the model), or for
            `jax.vmap` over another axis than rows or heads.
          ValueError: as `jkv.write` and `jkv.attend`.
        """
        number = self._num_calls if layer is None else layer
        self._num_calls += 1
        rows = Rows(
            queries,
            keys,
            values,
            sinks,
            {"layer": number, "scale": scale, "window": window},
        )

        def compute(rows: Rows) -> Attended:
            with jax.disable_jit(False):  # inside of `traced`
                return self._attend(rows, soft_cap=soft_cap, causal=bool(causal))

        if get_opaque_trace_state() == self._trace:
            done: Attended | None = compute(rows)
        else:
            done = attend_mapped(compute, rows, self._trace, self.cache, self.batch)
        if done is None:
            raise UsageError(
                "attend must be called in the trace of its jkv.Step, got another one, "
                "of a jax.jit, lax.scan, lax.cond or jax.checkpoint inside of the "
                "model; run the model in `with step.traced():`, which inlines jit and "
                "unrolls scans, and disable rematerialization (nnx.remat, nn.remat) "
                "and flax.linen.scan, which it cannot inline"
            )
        self.cache, self._previous = done.cache, done.mark
        return done.heads

    def _attend(self, rows: Rows, *, soft_cap: float | None, causal: bool) -> Attended:
        """Write and attend with rows of any leading axes, in the step's own trace."""
        layout = rows.queries.shape[:-2]
        packed = rows.pack(self.batch.num_rows)
        cache, batch, options = self.cache, self.batch, dict(packed.options)
        layer = options.pop("layer")
        if packed.keys is not None:
            keys, values = (
                _tie(each, self._previous) for each in (packed.keys, packed.values)
            )
            cache = write(cache, layer, batch, keys, values)
        heads = attend(
            cache,
            layer,
            batch,
            packed.queries,
            soft_cap=soft_cap,
            sinks=packed.sinks,
            causal=causal,
            **options,
        )
        mark = heads[..., 0]
        return Attended(heads.reshape(*layout, *heads.shape[1:]), mark, cache)

    def last(self, rows: jax.Array) -> jax.Array:
        """Return the rows that need logits: the last one of each request.

        Args:
          rows: [R, E], [1, R, E] or [R, 1, E]: hidden states, or logits.

        Returns:
          [B, E]; arbitrary for a request without rows.
        """
        packed = pack_rows("rows", rows, self.batch.num_rows)
        return gather(packed, self.batch.last_rows)

    @contextlib.contextmanager
    def traced(self) -> Iterator["Step"]:
        """Inline `jax.jit` and unroll `lax.scan` while the model is traced.

        For attention inside of a jitted function or a scan over layers, which would
        keep the updated cache to itself. `attend` itself is compiled as
        usual.

        Example:
          >>> import jax, jax.numpy as jnp, jkv
          >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
          >>> cache, batch = jkv.append(cache, opened.seq_ids)
          >>> step, rows = jkv.Step(cache, batch), jnp.ones((1, 1, 8))
          >>> layer = jax.jit(lambda rows: step.attend(rows, rows, rows))
          >>> with step.traced():
          ...     heads = layer(rows)
          >>> int(jkv.read(step.cache, 0, 0)[2])
          1
        """
        with jax.disable_jit():
            yield self


def pack_rows(name: str, array: jax.Array, num_rows: int) -> jax.Array:
    """Return an array with leading axes of R rows in all, [..., E], as [R, E]."""
    shape = array.shape
    if array.ndim < 2 or math.prod(shape[:-1]) != num_rows:
        raise UsageError(
            f"{name} must be [{num_rows}, E], [1, {num_rows}, E] or [{num_rows}, 1, "
            f"E], a row for each row of the batch, got {list(shape)}"
        )
    return array.reshape(num_rows, shape[-1])


def _tie(rows: jax.Array | None, previous: jax.Array | None) -> Any:
    """Return rows [R, K, D] that depend on the attention before, [R, H].

    XLA updates a pool in place behind the reads that the update depends on, and else
    copies it. Before JAX 0.11 it drops an `optimization_barrier` too early, so the rows
    depend on a value that is False for any number.
    """
    if rows is None or previous is None:
        return rows
    num_rows, num_kv_heads = rows.shape[:2]
    if previous.shape[1] % num_kv_heads == 0:
        # By kv head, so that heads sharded over devices need no collective.
        previous = previous.reshape(num_rows, num_kv_heads, -1)
    mark = previous[:, :, 0] if previous.ndim == 3 else previous[:, :1]
    never = (mark != mark) & (mark == mark)
    return jnp.where(never[..., None], jnp.zeros((), rows.dtype), rows)
