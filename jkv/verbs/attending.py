"""attend: attention of one layer's queries over the cached tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax

from jkv.attention import choice, paged_attention
from jkv.attention.backend import StepShape
from jkv.attention.call import Past, Pools, Requests
from jkv.attention.softmax import join_parts
from jkv.formats.format import Formats
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
from jkv.state.entry import takes_cache
from jkv.status import UsageError
from jkv.verbs import arguments
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
    found = arguments.locate_layer(cache, layer)
    arguments.check_batch(cache, batch)
    group, storage = cache.metadata.groups[found.group], cache.storage[found.group]
    arguments.check_queries(storage, batch, queries)
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
        kv_dtype=storage.dtype,
        value_dtype=storage.value_dtype,
        value_head_dim=storage.value_head_dim,
        max_query_length=1 if batch.is_decoding else None,
        by_position=batch.by_position,
        implementation=implementation,
        formats=None if masked is None else storage.formats,
    )
    operands = _Operands(
        queries=queries,
        arrays=storage.arrays,
        sinks=sinks,
        layer=arguments.any_layer(found.layer, batch),
        requests=requests_of(group, batch),
        plan=_find_plan(batch, found.group, is_masked=masked is not None),
        masked=masked,
        scale=scale,
        window=arguments.checked_window(group, window),
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
    # The arrays of a group by name, [L, N, K, T, ...].
    arrays: dict[str, jax.Array] = dataclasses.field(metadata=divided(POOL))
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
    formats: Formats | None,
    **static: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with the query and kv heads on this device.

    If `context` is the mesh axis that shards the tokens of a block, attend to the local
    tokens and combine the results of all devices.
    """
    arrays = operands.arrays
    attend_here: Callable[..., Any] = functools.partial(
        paged_attention,
        operands.queries,
        arrays["key_pool"],
        arrays.get("value_pool"),
        operands.layer,
        scale=operands.scale,
        key_scales=arrays.get("key_scales"),
        value_scales=arrays.get("value_scales"),
        **static,
    )
    answer: jax.Array | tuple[jax.Array, jax.Array]
    if operands.masked is not None:
        assert formats is not None
        output, lse = attend_masked(
            attend_here,
            operands.queries,
            arrays,
            operands.layer,
            operands.requests,
            operands.masked,
            plan=operands.plan,
            sinks=operands.sinks,
            window=operands.window,
            scale=operands.scale,
            soft_cap=static["soft_cap"],
            formats=formats,
            value_dim=static["value_head_dim"] or operands.queries.shape[2],
            by_position=static["by_position"],
        )
        return (output, lse) if return_lse else output
    attend_here = functools.partial(
        attend_here,
        *operands.requests,
        work_lists=operands.plan,
        window=operands.window,
    )
    if context is None:
        answer = attend_here(sinks=operands.sinks, return_lse=return_lse)
        return answer
    part = jax.lax.axis_index(context), num_parts
    output, lse = attend_here(block_part=part, return_lse=True)
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
