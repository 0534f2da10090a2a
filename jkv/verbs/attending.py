"""attend: attention of one layer's queries over the cached tokens."""

import dataclasses
import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect
from jkv.attention import attend_pools, choice, require_window
from jkv.attention.backend import Past, Pools, Requests, StepShape
from jkv.attention.softmax import join_parts
from jkv.metadata.requests import Integer
from jkv.sharding.storage_sharding import (
    PER_HEAD,
    POOL,
    ROWS,
    divided,
    heads_on_device,
    over_devices,
)
from jkv.state import Batch, BlockGroup, BlockStorage, Cache
from jkv.state.cache import Role
from jkv.state.entry import any_layer, check_batch, locate_layer, takes_cache
from jkv.status import UsageError
from jkv.verbs.masked_attention import MaskedRows, attend_masked


class _Options(TypedDict, total=False):
    """Keyword arguments that do not change the return type."""

    scale: float | jax.Array | None
    window: int | jax.Array | None
    soft_cap: float | None
    sinks: jax.Array | None
    implementation: str | None
    causal: bool


@overload
def attend(
    cache: Cache,
    layer: Integer,
    batch: Batch,
    queries: jax.Array,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def attend(
    cache: Cache,
    layer: Integer,
    batch: Batch,
    queries: jax.Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attend(
    cache: Cache,
    layer: Integer,
    batch: Batch,
    queries: jax.Array,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@takes_cache(role=Role.READS)
def attend(
    cache: Cache,
    layer: Integer,
    batch: Batch,
    queries: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    causal: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute attention of each row over the cached tokens of its sequence.

    A row attends to the cached tokens of its sequence up to and including its own
    position, or as the batch's mask says, so `write` the layer first. Query head h
    reads kv head `h // (H / K)`.
    Slots never written may hold NaN; a NaN in the values of a prompt's token may reach
    earlier rows of the same prompt in this call (see `paged_attention`).

    Args:
      cache: the cache that `write` returned.
      layer: i32[] or int, 0 to L-1; may be traced.
      batch: the plan from `append`.
      queries: [R, H, D], H a multiple of K.
      scale: of the scores, default 1/sqrt(D).
      window: number of tokens that a row attends to, itself included; may be traced.
        `None` is full attention. Required on a cache with a sliding window, and at most
        that; a traced window is clipped to it.
      soft_cap: c in `c * tanh(score / c)`.
      sinks: f32[H], a logit per head that enters the softmax without a value.
      return_lse: also return the log of the sum of exponentials, f32[R, H].
      implementation: `None` selects a backend; a name forces one and fails if it does
        not support the call. "cudnn" uses cuDNN for long prompts without a past on CUDA
        GPUs.
      causal: static; ignore the batch's mask in this layer.

    Returns:
      [R, H, Dv] in the queries' dtype; rows without a request are zero.

    Raises:
      ValueError: if the queries have the wrong shape, the batch belongs to a cache of
        other sizes, `layer` is an int out of range, the cache has no storage, the
        window exceeds the cache's, or `causal=True` with a tree or a peeked batch.
      NotImplementedError: if `implementation` does not support this call, or for a mask
        on a mesh with a context axis.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> rows = jnp.ones((1, 1, 8))
      >>> cache = jkv.write(cache, 0, batch, rows, rows)
      >>> jkv.attend(cache, 0, batch, jnp.ones((1, 2, 8))).shape
      (1, 2, 8)
    """
    found = locate_layer(cache, layer)
    check_batch(cache, batch)
    group, storage = cache.metadata.groups[found.group], cache.storage[found.group]
    check_queries(storage, batch, queries, sinks)
    sharding = storage.sharding
    context = None if sharding is None else sharding.context
    masked = _mask_rows(batch, found.group, causal, context)
    attend_on_device = over_devices(
        sharding,
        _attend_on_device,
        _Operands,
        ROWS,
        context=context,
        num_parts=1 if sharding is None else sharding.num_parts,
        soft_cap=soft_cap,
        return_lse=return_lse,
        max_query_length=1 if batch.is_decoding else None,
        by_position=batch.by_position,
        implementation=implementation,
    )
    operands = _Operands(
        queries=queries,
        pools=pools_of(storage),
        sinks=sinks,
        layer=any_layer(found.layer, batch),
        requests=requests_of(group, batch),
        plan=_find_plan(batch, found.group, is_masked=masked is not None),
        masked=masked,
        scale=scale,
        window=checked_window(group, window),
    )
    answer: jax.Array | tuple[jax.Array, jax.Array] = attend_on_device(operands)
    return answer


def _mask_rows(
    batch: Batch, group: int, causal: bool, context: str | None
) -> MaskedRows | None:
    """Return the mask of the batch in a group's layers, None for causal attention."""
    mask = batch.mask
    if not isinstance(causal, bool):
        raise UsageError(f"causal must be True or False, got {causal!r}; it is static")
    if causal and mask is not None and (mask.is_tree or mask.reads_only):
        kind = "a tree" if mask.is_tree else "a batch of jkv.peek"
        raise ValueError(
            f"causal must be False with {kind}, whose rows have no causal order; pass "
            f"jkv.with_mask(batch, jkv.CausalMask()) for a causal step"
        )
    if causal or mask is None:
        return None
    if context is not None:
        raise NotImplementedError(
            f"masks other than jkv.CausalMask are not supported on a mesh with "
            f"context={context!r}, which shards each request's rows over devices; "
            f"shard the heads instead"
        )
    return MaskedRows(mask=mask, slots=batch.slots_of(group), positions=batch.row_slots)


def _find_plan(batch: Batch, group: int, *, is_masked: bool) -> dict[str, Any] | None:
    """Return the step's attention plan, if it is for this call.

    Masks that only add later rows share the plan of causal attention.
    """
    is_causal = batch.mask is None or batch.mask.adds_later
    if batch.plan is None or not (is_masked or is_causal):
        return None
    plan: dict[str, Any] = batch.plan[group]
    return plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Operands:
    """The arrays of a call, each field with its sharding over devices."""

    queries: jax.Array = dataclasses.field(metadata=divided(ROWS))  # [R, H, D]
    pools: Pools = dataclasses.field(metadata=divided(POOL))  # [L, N, K, T, ...]
    sinks: jax.Array | None = dataclasses.field(metadata=divided(PER_HEAD))  # f32[H]
    # The other arrays are replicated.
    layer: jax.Array  # i32[]
    requests: Requests
    plan: dict[str, Any] | None  # the attention plan of the step
    scale: float | jax.Array | None
    window: int | jax.Array | None
    masked: MaskedRows | None  # None for causal attention


def _attend_on_device(
    operands: _Operands,
    *,
    context: str | None,
    num_parts: int,
    return_lse: bool,
    **static: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with the query and kv heads on this device.

    If `context` is the mesh axis that shards the tokens of a block, attend to the local
    tokens and combine the results of all devices.
    """
    attend_here = functools.partial(
        attend_pools,
        operands.queries,
        operands.pools,
        operands.layer,
        scale=operands.scale,
        **static,
    )
    if operands.masked is not None:
        output, lse = attend_masked(
            attend_here,
            operands.queries,
            operands.pools,
            operands.layer,
            operands.requests,
            operands.masked,
            plans=operands.plan,
            sinks=operands.sinks,
            window=operands.window,
            scale=operands.scale,
            soft_cap=static["soft_cap"],
            by_position=static["by_position"],
        )
        return (output, lse) if return_lse else output
    attend_here = functools.partial(
        attend_here, operands.requests, plans=operands.plan, window=operands.window
    )
    if context is None:
        output, lse = attend_here(sinks=operands.sinks, return_lse=return_lse)
    else:
        part = jax.lax.axis_index(context)
        output, lse = attend_here(part=part, num_parts=num_parts)
        output, lse = join_parts(output, lse, operands.sinks, context)
        output = output.astype(operands.queries.dtype)
    return (output, lse) if return_lse else output


def plan_attention(cache: Cache, batch: Batch) -> Batch:
    """Return the batch with the attention plan of each backend."""
    groups = cache.metadata.groups
    plans: list[dict[str, Any]] = [{} for _ in groups]
    for number in cache.metadata.block_numbers:
        plans[number] = _plan_group(groups[number], cache.storage[number], batch)
    return dataclasses.replace(batch, plan=tuple(plans) if any(plans) else None)


def _plan_group(
    group: BlockGroup, storage: BlockStorage, batch: Batch
) -> dict[str, Any]:
    """Return the plan of one group's layers, by backend."""
    sharding = storage.sharding
    num_parts = 1 if sharding is None else sharding.num_parts
    step = StepShape(
        num_rows=batch.num_rows,
        is_decoding=batch.is_decoding,
        by_position=batch.by_position,
        num_kv_heads=heads_on_device(sharding, storage.key_pool.shape[2]),
        part_size=group.block_size // num_parts,
        num_parts=num_parts,
        window=group.window.length,
    )
    requests, past, mask = requests_of(group, batch), None, batch.mask
    if mask is not None and not mask.adds_later:
        if step.window is not None and (mask.is_tree or mask.has_one_window):
            return {}  # rows have windows of their own
        past = Past(mask.past)
    given = pools_of(storage), requests, group.reference_counts, step
    return choice.plan(*given, past)


def pools_of(storage: BlockStorage) -> Pools:
    """Return the pools of one group's layers, as the attention interface's `Pools`."""
    return Pools(
        keys=storage.key_pool,
        values=storage.value_pool,
        key_scales=storage.key_scales,
        value_scales=storage.value_scales,
        head_dim=storage.head_dim,
        value_dim=storage.value_head_dim,
        formats=storage.formats,
    )


def requests_of(group: BlockGroup, batch: Batch) -> Requests:
    """Return the requests of a step, as the attention interface's `Requests`."""
    lengths = batch.context_lengths
    if batch.mask is not None and batch.mask.reads_only:
        # The rows follow the cached tokens, and are not counted there.
        lengths = batch.mask.past + batch.query_lengths
    return Requests(
        block_tables=group.block_tables,
        seq_ids=batch.seq_ids,
        query_starts=batch.query_starts,
        query_lengths=batch.query_lengths,
        context_lengths=lengths,
    )


def check_queries(
    storage: BlockStorage,
    batch: Batch,
    queries: jax.Array,
    sinks: jax.Array | None = None,
) -> None:
    """Refuse queries or sinks of a wrong shape, or heads that the mesh cannot divide.

    A device gets its share of the heads, and joins of parts or of masked rows add the
    sinks: both would report other sizes, or broadcast.
    """
    sizes = {"R": batch.num_rows}
    sizes = expect("queries", queries, "R H D", sizes, why="R the rows of the batch")
    if sinks is not None:
        expect("sinks", sinks, "H", sizes, why="a logit for each query head")
    sharding = storage.sharding
    if sharding is not None and sharding.heads in sharding.open_axes:
        num_heads, num_devices = sizes["H"], sharding.mesh.shape[sharding.heads]
        if num_heads % num_devices:
            raise ValueError(
                f"queries must have a number of heads divisible by the {num_devices} "
                f"devices of mesh axis {sharding.heads!r}, got {num_heads} heads; pass "
                f"init a mesh axis whose size divides the query heads"
            )


def checked_window(
    group: BlockGroup, window: int | jax.Array | None
) -> int | jax.Array | None:
    """Return the window of a call; refuse one larger than the cache's."""
    require_window(window)
    kept = group.window.length
    if kept is None:
        return window
    if isinstance(window, jax.core.Tracer):
        return jnp.minimum(window, kept)
    if window is None or np.any(np.asarray(window) > kept):
        raise UsageError(
            f"window must be at most {kept}, the cache's CacheConfig.sliding_window, "
            f"got {window}; layers with full attention or a larger window need another "
            f"group or cache"
        )
    return window
