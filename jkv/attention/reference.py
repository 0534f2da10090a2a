"""The specification: gather everything, float32, one dense softmax per row.

Slow and memory hungry on purpose. What the other implementations must reproduce is what
`attend_row` says; nothing here is shared with them but the meaning of the arguments.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Constants, Requests
from jkv.attention.pools import Pools, to_float32


@functools.partial(jax.jit, static_argnames=("constants",))
def attend_reference(
    queries: jax.Array,  # [R, H, D], not scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    *,
    scale: jax.Array,  # f32[]
    window: jax.Array | None,  # i32[]
    constants: Constants,
    sinks: jax.Array | None,  # f32[H]
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    dtype, soft_cap = queries.dtype, constants.soft_cap
    queries = queries.astype(jnp.float32)
    rows = jnp.arange(queries.shape[0], dtype=jnp.int32)
    offsets = rows[:, None] - requests.query_starts[None, :]  # i32[R, B]
    owns = (offsets >= 0) & (offsets < requests.query_lengths[None, :])
    owner = jnp.argmax(owns, axis=1)
    first_position = requests.context_lengths - requests.query_lengths
    positions = jnp.where(
        owns.any(axis=1),
        first_position[owner] + rows - requests.query_starts[owner],
        -1,  # a row that nobody owns sees no token
    )
    tables = requests.block_tables[requests.seq_ids]  # i32[B, M]

    def attend_row(
        query: jax.Array,  # f32[H, D]
        position: jax.Array,  # i32[]
        table: jax.Array,  # i32[M]
    ) -> tuple[jax.Array, jax.Array]:
        kv_dtype = pools.kv_dtype
        keys = gather_tokens(pools.keys, pools.key_scales, layer, table, kv_dtype)
        if pools.values is None:
            values = keys[..., : pools.value_dim]
        else:
            values = gather_tokens(
                pools.values, pools.value_scales, layer, table, kv_dtype
            )
        token = jnp.arange(keys.shape[1], dtype=jnp.int32)
        visible = token <= position
        if window is not None:
            visible &= token > position - window
        # Hidden slots may hold NaN, and 0 * NaN is NaN: mask the contents too.
        keys = jnp.where(visible[None, :, None], keys, 0.0)
        values = jnp.where(visible[None, :, None], values, 0.0)

        num_heads, num_kv_heads = query.shape[0], keys.shape[0]
        grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, -1)
        scores = scale * jnp.einsum(
            "kgd,ksd->kgs", grouped, keys, precision=lax.Precision.HIGHEST
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        # A row that sees nothing keeps its zero scores, so that no softmax is empty.
        sees_any = visible.any()
        hidden = jnp.where(sees_any, -jnp.inf, 0.0)
        scores = jnp.where(visible[None, None, :], scores, hidden)
        if sinks is not None:
            sink = sinks.reshape(num_kv_heads, -1, 1)
            scores = jnp.concatenate([scores, sink], axis=2)

        lse = jax.nn.logsumexp(scores, axis=2)  # f32[K, G]
        weights = jnp.exp(scores - lse[..., None])[..., : keys.shape[1]]
        output = jnp.einsum(
            "kgs,ksd->kgd", weights, values, precision=lax.Precision.HIGHEST
        )
        output = jnp.where(sees_any, output, 0.0)
        lse = jnp.where(sees_any, lse, -jnp.inf)
        return output.reshape(num_heads, -1), lse.reshape(num_heads)

    # One row at a time: the memory of all rows' contexts at once is not to be had.
    output, lse = lax.map(
        lambda row: attend_row(*row), (queries, positions, tables[owner])
    )
    return output.astype(dtype), lse


def gather_tokens(
    pool: jax.Array,  # [L, N, K, T, D]
    scales: jax.Array | None,  # [L, N, K, T]
    layer: jax.Array,  # i32[]
    table: jax.Array,  # i32[M]
    kv_dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """Return all tokens that a block table names, in order, `f32[K, M * T, D]`."""
    table = jnp.clip(table, 0, pool.shape[1] - 1)
    blocks = to_float32(pool[layer, table], kv_dtype)  # f32[M, K, T, D]
    if scales is not None:
        blocks *= to_float32(scales[layer, table], jnp.bfloat16)[..., None]
    num_kv_heads, head_dim = pool.shape[2], pool.shape[4]
    return jnp.moveaxis(blocks, 1, 0).reshape(num_kv_heads, -1, head_dim)
