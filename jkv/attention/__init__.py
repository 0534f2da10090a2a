"""Attention over a paged key/value pool: plain arrays in, plain arrays out.

Independent of the cache: `paged_attention` accepts any blocks in `[L, N, K, T, D]`
arrays, addressed by block tables. It checks its arguments, makes them a `Call`
(`backend`), and a backend for the platform computes it (`choice`): kernels for GPUs
(`kernel`), cuDNN for long prompts (`cudnn`), loops in plain XLA (`xla`), or
`reference`, the definition. Start with `reference`, then with `xla.interface`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect, explains_arguments
from jkv.attention.backend import (
    Call,
    Past,
    Pools,
    Requests,
    empty_results,
    make_requests,
)
from jkv.attention.choice import choose
from jkv.formats.format import Format, Formats, Numbers
from jkv.formats.table import ENCODED_DTYPES, FORMATS
from jkv.sharding.storage_sharding import takes_explicit_axes
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
@takes_explicit_axes
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
    lengths = query_starts, query_lengths, context_lengths
    require_requests(block_tables, seq_ids, *lengths)
    if seq_ids is None:
        seq_ids = jnp.arange(query_starts.shape[0], dtype=jnp.int32)
    part, num_parts = require_part(block_part, sinks)
    output, lse = attend_pools(
        queries,
        pools,
        0 if layer is None else layer,
        Requests(block_tables, seq_ids, *lengths),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        max_query_length=max_query_length,
        part=part,
        num_parts=num_parts,
        past=make_past(past, query_starts.shape[0], part),
        plans=work_lists,
        by_position=by_position,
        implementation=implementation,
        return_lse=return_lse,
    )
    return (output, lse) if return_lse else output


def attend_pools(
    queries: jax.Array,
    pools: Pools,
    layer: Integer,
    requests: Requests,
    *,
    scale: jax.typing.ArrayLike | None = None,
    window: Integer | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    max_query_length: int | None = None,
    part: jax.Array | None = None,  # i32[], of each block
    num_parts: int = 1,
    past: Past | None = None,
    plans: Mapping[str, Any] | None = None,
    by_position: bool = False,
    implementation: str | None = None,
    return_lse: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `paged_attention` does, with pools and requests known to be valid.

    Returns:
      [R, H, Dv] and the log-sum-exp, f32[R, H], which is unspecified without
      `return_lse`.

    Raises:
      ValueError: as `paged_attention`, for the other arguments.
      NotImplementedError: likewise.
    """
    require_queries(queries, pools.keys, pools.values, sinks, key_dim=pools.head_dim)
    require_options(layer, window, scale, soft_cap, max_query_length)
    scale = 1.0 / math.sqrt(queries.shape[2]) if scale is None else scale
    choice = choose(
        implementation, by_position=by_position, return_lse=return_lse, scale=scale
    )
    call = Call(
        queries=pools.formats.key.rotate(queries),
        pools=_with_whole_values(pools),
        layer=jnp.asarray(layer, jnp.int32),
        requests=make_requests(
            requests,
            num_rows=queries.shape[0],
            block_size=num_parts * pools.block_size,
            max_query_length=max_query_length,
            is_limited=past is not None,
        ),
        scale=jnp.asarray(scale, jnp.float32),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        part=part,
        past=past,
        plans=dict(plans or {}),
        num_parts=num_parts,
        soft_cap=None if soft_cap is None else float(soft_cap),
        max_query_length=max_query_length,
        by_position=by_position,
    )
    is_empty = call.num_rows == 0 or call.num_requests == 0
    output, lse = empty_results(call) if is_empty else choice.serve(call)
    return pools.formats.value.rotate_back(output)[..., : pools.value_dim], lse


def _with_whole_values(pools: Pools) -> Pools:
    """Set the value dim to whole keys if values are part of rotated keys."""
    if pools.values is None and pools.formats.value.is_turned:
        return dataclasses.replace(pools, value_dim=pools.head_dim)
    return pools


def make_pools(
    keys_and_scales: tuple[jax.Array, jax.Array | None],
    values_and_scales: tuple[jax.Array | None, jax.Array | None],
    *,
    has_layers: bool,
    dtypes: Sequence[jax.typing.DTypeLike | None] = (None, None),
    value_head_dim: int | None = None,
) -> Pools:
    """Validate pools and scales, and add the layer axis if it is missing.

    Raises:
      ValueError: inconsistent ranks, sizes or dtypes.
    """
    keys, key_scales = keys_and_scales
    values, value_scales = values_and_scales
    layers, why = "L ", "layer=None drops the L"
    if not has_layers:
        layers, why = "", "as layer is None"
    sizes = expect("key_pool", keys, f"{layers}N K T D", why=why)
    if values is not None:
        expect("value_pool", values, f"{layers}N K T Dv", sizes, why="as key_pool")
    if not has_layers:
        # The new axis is a view under jit, and free.
        keys, values, key_scales, value_scales = jax.tree.map(
            lambda array: array[None], (keys, values, key_scales, value_scales)
        )
    of_keys = of_values = require_format("key", keys, key_scales, dtypes[0])
    head_dim, value_dim = of_keys.width_of(keys.shape[4]), None
    if values is not None:
        of_values = require_format("value", values, value_scales, dtypes[1])
        value_dim = of_values.width_of(values.shape[4])
    elif value_scales is not None:
        raise ValueError(
            "value_scales must be None with value_pool=None, as the keys' scales apply "
            "to both; omit value_scales"
        )
    return Pools(
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        head_dim=head_dim,
        value_dim=require_value_dim(value_dim, head_dim, value_head_dim),
        formats=Formats(of_keys, of_values),
    )


def make_past(
    past: Past | None, num_requests: int, part: jax.Array | None
) -> Past | None:
    """Return the limits of a call as i32[B] arrays.

    Raises:
      ValueError: limits of another shape, or with parts of blocks.
    """
    if past is None:
        return None
    if part is not None:
        raise ValueError(
            "past must be None with block_part, as it counts tokens of whole blocks; "
            "call it without a context axis"
        )

    def read(name: str, limit: jax.Array) -> jax.Array:
        sizes, why = {"B": num_requests}, "one per request"
        expect(f"past.{name}", limit, "B", sizes, jnp.integer, why=why)
        return limit.astype(jnp.int32)

    end, first = past
    return Past(read("end", end), None if first is None else read("first", first))


def require_value_dim(
    value_dim: int | None,  # of the value pool; None without one
    head_dim: int,  # of the keys
    given: int | None,  # argument value_head_dim, required without a value pool
) -> int:
    """Return the value head dim after checking value_head_dim against the pools."""
    if value_dim is None:
        if given is None or not 0 < given <= head_dim:
            raise ValueError(
                f"value_head_dim must be 1 to {head_dim}, the head dim of the keys, "
                f"with value_pool=None, got {given}"
            )
        return given
    if given not in (None, value_dim):
        raise ValueError(
            f"value_head_dim must equal the head dim of value_pool, {value_dim}, got "
            f"{given}; omit it, as only value_pool=None needs it"
        )
    return value_dim


def require_format(
    name: str,
    pool: jax.Array,
    scales: jax.Array | None,
    kv_dtype: jax.typing.DTypeLike | None,
) -> Format:
    """Return the format of the "key" or "value" pool.

    Checks the pool's dtype against kv_dtype, and the scales against the format: one for
    each token, and only for quantized formats.
    """
    try:
        given = None if kv_dtype is None else jnp.dtype(kv_dtype)
    except TypeError:
        raise ValueError(
            f"kv_dtype must be a dtype or None, got {kv_dtype!r}"
        ) from None
    dtype = pool.dtype
    if meanings := ENCODED_DTYPES.get(dtype):
        if given not in meanings:
            names = " or ".join(str(dtype) for dtype in meanings)
            raise ValueError(
                f"{name}_pool holds raw {dtype} bits: pass kv_dtype={names}, "
                f"got {given}"
            )
        dtype = given
    elif dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name}_pool must be floating point or int8, uint16 with "
            f"kv_dtype=bfloat16, or uint8 with kv_dtype int4 or an fp8 one, got {dtype}"
        )
    elif given is not None and dtype != given:
        raise ValueError(
            f"kv_dtype must match {name}_pool, {dtype}, got {given}; omit it, as only "
            "pools of raw bits need it"
        )
    if scales is None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name}_scales must be given for {name}_pool of {dtype}, got None"
            )
        return Numbers(dtype)
    kept = FORMATS.get(dtype, Numbers(dtype))
    if not kept.is_quantized:
        raise ValueError(
            f"{name}_scales must be None unless {name}_pool is int8, fp8 or int4, got "
            f"{pool.dtype}; omit them"
        )
    sizes = dict(zip("LNKT", pool.shape[:4], strict=True))
    of_row = kept.arrays(kept.width_of(pool.shape[4]))["scales"].shape
    axes = "L N K T" + (" S" if of_row else "")
    sizes |= dict(zip("S", of_row, strict=False))
    expect(
        f"{name}_scales", scales, axes, sizes, why="numbers for each row of the pool"
    )
    if scales.dtype != jnp.uint16 and not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"{name}_scales must be floating point, or uint16 as the bits of "
            f"bfloat16, got {scales.dtype}"
        )
    return kept


def require_queries(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array | None,
    sinks: jax.Array | None,
    *,
    key_dim: int,
) -> None:
    """Check queries and sinks against valid pools."""
    why = "D that of key_pool"
    sizes = expect("queries", queries, "R H D", {"D": key_dim}, jnp.floating, why=why)
    value_shape = () if value_pool is None else value_pool.shape
    if 0 in (*queries.shape[1:], *key_pool.shape, *value_shape):
        raise ValueError(
            "queries and pools must have no axis of size 0, got queries "
            f"{queries.shape}, pools {key_pool.shape}, {value_shape}"
        )
    num_heads, num_kv_heads = sizes["H"], key_pool.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"queries must have a multiple of {num_kv_heads} heads, the kv heads of "
            f"key_pool, got {num_heads}"
        )
    if sinks is not None:
        expect("sinks", sinks, "H", sizes, why="a logit for each query head")


def require_options(
    layer: Integer,
    window: Integer | None,
    scale: jax.typing.ArrayLike | None,
    soft_cap: float | None,
    max_query_length: int | None,
) -> None:
    """Check layer, scale, soft_cap, max_query_length and window."""
    if scale is not None and (jnp.ndim(scale) or jnp.iscomplexobj(scale)):
        raise ValueError(f"scale must be one number or f32[], got {scale!r}")
    if np.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer must be an int or i32[], got {layer!r}")
    if isinstance(layer, int) and not 0 <= layer < 2**31:
        raise ValueError(f"layer must be in 0..L-1, got {layer}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0 or None, got {soft_cap}")
    if max_query_length is not None and not (
        isinstance(max_query_length, int) and 1 <= max_query_length < 2**31
    ):
        raise ValueError(
            f"max_query_length must be a static int of at least 1 or None, got "
            f"{max_query_length!r}"
        )
    require_window(window)


def require_window(window: Integer | None) -> None:
    """Check the type of the window, and its value unless traced."""
    if window is None:
        return
    kind = getattr(window, "dtype", None)
    is_integer = isinstance(window, int) and not isinstance(window, bool)
    if kind is not None:
        is_integer = jnp.issubdtype(kind, jnp.integer)
    if not is_integer or np.ndim(window):
        raise ValueError(
            f"window must be an int or i32[], a number of tokens, got {window!r}"
        )
    if not isinstance(window, jax.Array) and not 1 <= window < 2**31:
        raise ValueError(
            f"window must be in 1..2^31-1, as it includes the row's own token, got "
            f"{window}; pass None for full attention"
        )


def require_part(
    block_part: tuple[Integer, int] | None, sinks: jax.Array | None
) -> tuple[jax.Array | None, int]:
    """Return the part held here as i32[], None for whole blocks, and the parts."""
    if block_part is None:
        return None, 1
    part, num_parts = block_part
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(
            f"block_part must be (i, n) with a static int n >= 1, got n={num_parts!r}"
        )
    if isinstance(part, int) and not 0 <= part < num_parts:
        raise ValueError(
            f"block_part must be (i, n) with 0 <= i < n, got ({part}, {num_parts})"
        )
    if sinks is not None:
        raise ValueError(
            "sinks must be None with block_part, as a sink counts once per sequence; "
            "add them where the parts are joined"
        )
    return jnp.asarray(part, jnp.int32), num_parts


def require_requests(
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
) -> None:
    """Check the arrays of requests against each other."""
    sizes = expect("block_tables", block_tables, "S M", kind=jnp.integer)
    sizes = expect("query_starts", query_starts, "B", sizes, jnp.integer)
    named = {
        "seq_ids": seq_ids,
        "query_lengths": query_lengths,
        "context_lengths": context_lengths,
    }
    for name, array in named.items():
        if array is not None:
            why = "one for each request, as query_starts"
            expect(name, array, "B", sizes, jnp.integer, why=why)
    if 0 in block_tables.shape:
        raise ValueError(
            f"block_tables must have no axis of size 0, got {block_tables.shape}"
        )
    if seq_ids is None and sizes["B"] > sizes["S"]:
        raise ValueError(
            f"seq_ids=None is arange({sizes['B']}), but block_tables has "
            f"{sizes['S']} rows; pass seq_ids or more rows"
        )
