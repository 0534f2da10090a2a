"""Attention over a paged key/value pool: plain arrays in, plain arrays out.

Nothing here knows the cache: whoever keeps blocks in `[L, N, K, T, D]` arrays and block
ids in tables can call `paged_attention`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.attention.reference import attend_reference
from jkv.attention.requests import make_requests
from jkv.attention.xla import attend_xla

__all__ = ["paged_attention"]

# Raw storage dtypes and what their bits may mean. A wider set comes with quantisation.
_BIT_DTYPES = {jnp.dtype(jnp.uint16): (jnp.dtype(jnp.bfloat16),)}
_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "xla": attend_xla,
    "reference": attend_reference,
}


def paged_attention(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array,
    layer: jax.typing.ArrayLike | None,
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
    *,
    scale: jax.typing.ArrayLike | None = None,
    window: jax.typing.ArrayLike | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    kv_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend causally from each query row to its own sequence's blocks.

    Request i owns the rows `query_starts[i] .. query_starts[i] + query_lengths[i] - 1`;
    the last of them is the token at position `context_lengths[i] - 1`, so a context
    length counts the tokens of the call, whose keys and values must be in the pool
    already. Rows that no request owns give zeros. Query head h reads kv head
    `h // (H // K)`. Scores, softmax and sums are float32 whatever the inputs are.

    Only tokens that a row can see are let through: table entries past the end of a
    sequence may be any number, unused slots may hold NaN.

    Args:
      queries: float[R, H, D].
      key_pool: [L, N, K, T, D], float, or the uint16 bits of bfloat16.
      value_pool: [L, N, K, T, Dv], as `key_pool`; `Dv` may differ from `D`.
      layer: i32[], may be traced. None for pools without the layer axis.
      block_tables: i32[S, M], the block of token t of a sequence at column `t // T`.
      seq_ids: i32[B], each request's row of `block_tables`; anything out of range is
        padding. None stands for `arange(B)`.
      query_starts: i32[B]. `R` or above is padding too.
      query_lengths: i32[B], 1 for decoding, more for prefill, 0 for nothing.
      context_lengths: i32[B].
      scale: factor on the scores, `1 / sqrt(D)` unless given; may be traced.
      window: number of tokens a row sees, itself included; may be traced.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks: f32[H], one more logit per head in the softmax denominator.
      return_lse: also return the log-sum-exp of the scores.
      kv_dtype: what the elements of a uint16 pool mean: bfloat16.
      implementation: "xla" or "reference"; None chooses.

    Returns:
      [R, H, Dv] in the queries' dtype. With `return_lse` also f32[R, H], the natural
      logarithm of the softmax denominator, sink included; -inf for rows that see
      nothing.

    Raises:
      ValueError: ranks, sizes or dtypes that do not fit, or an unknown implementation.
      NotImplementedError: the implementation asked for does not apply here.

    Example:
      One sequence of three tokens in two blocks of two, stored out of order:

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
    attend = _choose(implementation)
    if layer is None:
        _require_rank("key_pool", key_pool, 4, "[N, K, T, D] when layer is None")
        _require_rank("value_pool", value_pool, 4, "[N, K, T, Dv] when layer is None")
        # The new axis is a view under jit, and free.
        key_pool, value_pool, layer = key_pool[None], value_pool[None], 0
    _require_shapes(queries, key_pool, value_pool, sinks)
    _require_dtypes(queries, key_pool, value_pool, kv_dtype)
    _require_requests(
        block_tables, seq_ids, query_starts, query_lengths, context_lengths
    )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0 or None, got {soft_cap}")
    if isinstance(window, int) and window < 1:
        raise ValueError(
            f"window counts the token itself, so it is 1 or more, got {window}; "
            "pass None for no window"
        )

    num_rows, num_heads, head_dim = queries.shape
    if num_rows == 0 or query_starts.shape[0] == 0:
        output = jnp.zeros((num_rows, num_heads, value_pool.shape[4]), queries.dtype)
        lse = jnp.full((num_rows, num_heads), -jnp.inf, jnp.float32)
        return (output, lse) if return_lse else output

    requests = make_requests(
        block_tables,
        seq_ids,
        query_starts,
        query_lengths,
        context_lengths,
        num_rows=num_rows,
        block_size=key_pool.shape[3],
    )
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    output, lse = attend(
        queries.astype(jnp.float32),
        key_pool,
        value_pool,
        jnp.asarray(layer, jnp.int32),
        requests,
        scale=jnp.asarray(scale, jnp.float32),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        kv_dtype=kv_dtype,
    )
    output = output.astype(queries.dtype)
    return (output, lse) if return_lse else output


def _choose(implementation: str | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the implementation of that name; None is the one that always works."""
    if implementation is None:
        implementation = "xla"
    if implementation not in _IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in _IMPLEMENTATIONS)
        raise ValueError(
            f"implementation must be None or one of {names}, got {implementation!r}"
        )
    return _IMPLEMENTATIONS[implementation]


def _require_rank(name: str, array: jax.Array, rank: int, meaning: str) -> None:
    if array.ndim != rank:
        raise ValueError(
            f"{name} must have {rank} axes, {meaning}, got shape {array.shape}"
        )


def _require_shapes(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array,
    sinks: jax.Array | None,
) -> None:
    """Check ranks and sizes of the floating-point operands against each other."""
    _require_rank("queries", queries, 3, "[R, H, D]")
    _require_rank("key_pool", key_pool, 5, "[L, N, K, T, D]; layer=None drops the L")
    _require_rank("value_pool", value_pool, 5, "[L, N, K, T, Dv]")
    if key_pool.shape[:4] != value_pool.shape[:4]:
        raise ValueError(
            "key_pool and value_pool must agree in layers, blocks, kv heads and block "
            f"size, got {key_pool.shape} and {value_pool.shape}"
        )
    if 0 in (*queries.shape[1:], *key_pool.shape, *value_pool.shape):
        raise ValueError(
            "no axis of the pools, no number of heads and no head dim may be 0, got "
            f"queries {queries.shape}, pools {key_pool.shape}, {value_pool.shape}"
        )
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads = key_pool.shape[2]
    if head_dim != key_pool.shape[4]:
        raise ValueError(
            f"queries have head dim {head_dim}, key_pool {key_pool.shape[4]}; "
            "they must be equal"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads do not divide over {num_kv_heads} kv heads; "
            "give a multiple of the kv heads"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks must be one logit per query head, [{num_heads}], got {sinks.shape}"
        )


def _require_dtypes(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array,
    kv_dtype: jax.typing.DTypeLike | None,
) -> None:
    """Check that queries are floating point and that the pools' bits have a meaning."""
    if not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ValueError(f"queries must be floating point, got {queries.dtype}")
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        if jnp.issubdtype(pool.dtype, jnp.floating):
            if kv_dtype is not None and pool.dtype != jnp.dtype(kv_dtype):
                raise ValueError(
                    f"{name} holds {pool.dtype} but kv_dtype is {jnp.dtype(kv_dtype)}; "
                    "kv_dtype is for pools of raw bits, leave it out"
                )
        elif pool.dtype not in _BIT_DTYPES:
            raise ValueError(
                f"{name} must be floating point, or uint16 with kv_dtype=bfloat16, "
                f"got {pool.dtype}"
            )
        elif kv_dtype is None or jnp.dtype(kv_dtype) not in _BIT_DTYPES[pool.dtype]:
            names = " or ".join(str(dtype) for dtype in _BIT_DTYPES[pool.dtype])
            raise ValueError(
                f"{name} holds raw {pool.dtype} bits: pass kv_dtype={names}, "
                f"got {kv_dtype}"
            )


def _require_requests(
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
) -> None:
    """Check that the integer arrays are integers and one entry per request."""
    _require_rank("block_tables", block_tables, 2, "[S, M]")
    _require_rank("query_starts", query_starts, 1, "[B]")
    named = {
        "seq_ids": seq_ids,
        "query_starts": query_starts,
        "query_lengths": query_lengths,
        "context_lengths": context_lengths,
    }
    num_requests = query_starts.shape
    for name, array in named.items():
        if array is not None and array.shape != num_requests:
            raise ValueError(
                f"{name} must have one entry per request, {list(num_requests)} as "
                f"query_starts, got {list(array.shape)}"
            )
    named["block_tables"] = block_tables
    for name, array in named.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must hold integers, got {array.dtype}")
    if 0 in block_tables.shape:
        raise ValueError(f"block_tables may not be empty, got {block_tables.shape}")
    if seq_ids is None and num_requests[0] > block_tables.shape[0]:
        raise ValueError(
            f"seq_ids=None stands for arange({num_requests[0]}), but block_tables has "
            f"{block_tables.shape[0]} rows; pass seq_ids or more rows"
        )
