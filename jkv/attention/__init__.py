"""Attention over a paged key/value pool: plain arrays in, plain arrays out.

Independent of the cache: `paged_attention` accepts any blocks in `[L, N, K, T, D]`
arrays, addressed by block tables.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jkv.arguments import explains_arguments
from jkv.attention.call import (
    Call,
    Past,
    Pools,
    Requests,
    empty_results,
    make_past,
    make_pools,
    make_requests,
)
from jkv.attention.choice import choose
from jkv.attention.validation import (
    require_options,
    require_part,
    require_queries,
    require_requests,
)
from jkv.signatures import Integer

__all__ = ["paged_attention"]


class _Options(TypedDict, total=False):
    """The keyword arguments that do not affect the return type."""

    scale: jax.typing.ArrayLike | None
    window: Integer | None
    soft_cap: float | None
    sinks: jax.Array | None
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    kv_dtype: jax.typing.DTypeLike | None
    value_dtype: jax.typing.DTypeLike | None
    value_head_dim: int | None
    max_query_length: int | None
    block_part: tuple[Integer, int] | None
    work_lists: Mapping[str, Any] | None
    by_position: bool
    past: Past | None
    implementation: str | None


@overload
def paged_attention(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array | None,
    layer: Integer | None,
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def paged_attention(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array | None,
    layer: Integer | None,
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def paged_attention(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array | None,
    layer: Integer | None,
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explains_arguments
def paged_attention(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array | None,
    layer: Integer | None,
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
    *,
    scale: jax.typing.ArrayLike | None = None,
    window: Integer | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    value_dtype: jax.typing.DTypeLike | None = None,
    value_head_dim: int | None = None,
    max_query_length: int | None = None,
    block_part: tuple[Integer, int] | None = None,
    work_lists: Mapping[str, Any] | None = None,
    by_position: bool = False,
    past: Past | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend causally from each query row to its own sequence's blocks.

    Request i owns the rows `query_starts[i] .. query_starts[i] + query_lengths[i] - 1`;
    its last row is the token at position `context_lengths[i] - 1`. A context length
    includes the tokens of the call, and their keys and values must already be in the
    pool. Rows without a request return zeros. Query head h reads kv head
    `h // (H // K)`. Scores, softmax and sums are float32 for all input dtypes.

    Masked tokens have no effect: table entries past the end of a sequence may be any
    number, unused slots may hold NaN. A NaN or infinity in a token's keys or values
    makes the rows that attend to the token NaN or infinite; all other rows, including
    earlier rows of the same request, keep their bits.

    Args:
      queries: float[R, H, D].
      key_pool: [L, N, K, T, D], float, int8 with scales, or raw bits: uint16 for
        bfloat16, uint8 for an fp8 dtype or for int4 (two elements in each).
      value_pool: [L, N, K, T, Dv], as `key_pool`; `Dv` may differ from `D`. With None
        a token's values are the first `value_head_dim` elements of its keys, as in a
        latent cache (one kv head, `D` 576, `Dv` 512): each slot is read once for both.
      layer: i32[], may be traced. None for pools without the layer axis.
      block_tables: i32[S, M], the block of token t of a sequence at column `t // T`.
      seq_ids: i32[B], each request's row of `block_tables`; out-of-range ids are
        padding. None is `arange(B)`.
      query_starts: i32[B]. `R` or above is padding too.
      query_lengths: i32[B], 1 for decoding, more for prefill, 0 for an idle request.
      context_lengths: i32[B].
      scale: factor on the scores, `1 / sqrt(D)` unless given; may be traced.
      window: sliding window in tokens, the row's own token included; may be traced.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks: f32[H], one more logit per head in the softmax denominator.
      return_lse: also return the log-sum-exp of the scores.
      key_scales: [L, N, K, T], the factor of each token's elements: float, or the
        uint16 bits of bfloat16. Required for int8 and int4, optional for fp8, rejected
        otherwise.
      value_scales: as `key_scales`; with `value_pool=None` the keys' scales apply.
      kv_dtype: dtype of the encoding of a pool of raw bits: bfloat16, float8_e4m3fn,
        float8_e4m3fnuz, float8_e5m2 or int4.
      value_dtype: dtype of the values' encoding; defaults to `kv_dtype`.
      value_head_dim: `Dv`, required with `value_pool=None` only.
      max_query_length: static upper bound on the rows of a request. With 1 the code for
        requests of several rows is not compiled.
      block_part: (i, n) if the pools hold the i-th of n equal parts of each block, as
        on one of n devices that share a sequence: T tokens of n * T. i may be traced.
        Lengths and tables describe whole sequences. Join the results by their
        log-sum-exp; add `sinks`, which count once, in the join.
      work_lists: the plan that `append` computed for these requests, one of
        `Batch.plan`.
      by_position: static; batch-invariant: the result of a row has the same bits for
        any other rows of the call and any place of the row, for equal R, B and pool
        shapes (N may differ). "pallas" and "xla" sum in different orders, so their bits
        differ.
      past: (end, first), i32[B] each: the rows of request i attend to tokens
        `first[i] .. end[i] - 1` at most; first may be None for 0. For rows that do not
        attend to the step's own tokens. Not with `block_part`.
      implementation: the backend. None selects the kernel on a ROCm or CUDA GPU if it
        supports the shapes, and plain XLA elsewhere; one exported program may contain
        both. "xla", "pallas" (the kernel; interpreted on CPU, for tests), "triton" (the
        same kernel, lowered by jkv) and "reference" force one. "cudnn", CUDA only,
        combines the kernel with cuDNN for one prompt without cached tokens that has
        most rows of a step of at least 4,096; it is not used under differentiation.

    Returns:
      [R, H, Dv] in the queries' dtype, f32 with `block_part`. With `return_lse` also
      f32[R, H], the natural logarithm of the softmax denominator, sink included; -inf
      for rows that attend to no token.

    Raises:
      ValueError: inconsistent ranks, sizes or dtypes, or an unknown implementation.
      NotImplementedError: the named implementation does not support this call here.

    Example:
      One sequence of three tokens in two blocks of size two, stored out of order:

      >>> import jax.numpy as jnp
      >>> from jkv.attention import paged_attention
      >>> keys = jnp.zeros((1, 2, 1, 2, 4))  # L, N, K, T, D
      >>> values = jnp.array([9.0, jnp.nan, 3.0, 6.0]).reshape(1, 2, 1, 2, 1)
      >>> paged_attention(
      ...     jnp.ones((1, 1, 4)), keys, values, 0, jnp.array([[1, 0]]), None,
      ...     jnp.array([0]), jnp.array([1]), jnp.array([3]),
      ... )
      Array([[[6.]]], dtype=float32)
    """
    pools = make_pools(
        (key_pool, key_scales),
        (value_pool, value_scales),
        has_layers=layer is not None,
        dtypes=(kv_dtype, kv_dtype if value_dtype is None else value_dtype),
        value_head_dim=value_head_dim,
    )
    require_queries(queries, pools.keys, pools.values, sinks, key_dim=pools.head_dim)
    lengths = query_starts, query_lengths, context_lengths
    require_requests(block_tables, seq_ids, *lengths)
    if seq_ids is None:
        seq_ids = jnp.arange(query_starts.shape[0], dtype=jnp.int32)
    layer = 0 if layer is None else layer
    require_options(layer, window, scale, soft_cap, max_query_length)
    part, num_parts = require_part(block_part, sinks)
    scale = 1.0 / math.sqrt(queries.shape[2]) if scale is None else scale
    choice = choose(
        implementation, by_position=by_position, return_lse=return_lse, scale=scale
    )
    call = Call(
        queries=pools.formats.key.rotate(queries),
        pools=_with_whole_values(pools),
        layer=jnp.asarray(layer, jnp.int32),
        requests=make_requests(
            Requests(block_tables, seq_ids, *lengths),
            num_rows=queries.shape[0],
            block_size=num_parts * pools.block_size,
            max_query_length=max_query_length,
            is_limited=past is not None,
        ),
        scale=jnp.asarray(scale, jnp.float32),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        part=part,
        past=make_past(past, query_starts.shape[0], part),
        plans=dict(work_lists or {}),
        num_parts=num_parts,
        soft_cap=None if soft_cap is None else float(soft_cap),
        max_query_length=max_query_length,
        by_position=by_position,
    )
    is_empty = call.num_rows == 0 or call.num_requests == 0
    output, lse = empty_results(call) if is_empty else choice.serve(call)
    output = pools.formats.value.rotate_back(output)[..., : pools.value_dim]
    return (output, lse) if return_lse else output


def _with_whole_values(pools: Pools) -> Pools:
    """Set the value dim to whole keys if values are part of rotated keys."""
    if pools.values is None and pools.formats.value.is_turned:
        return dataclasses.replace(pools, value_dim=pools.head_dim)
    return pools
