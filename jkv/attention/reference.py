"""The reference implementation: float32 and one dense softmax per row.

Slow and memory-hungry by design. It shares no code with the other backends, which must
reproduce `attend_row`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Backend, Call, DeviceType, Pools, Stored, check_call
from jkv.formats.format import multiply_out


@jax.jit
def attend_reference(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    check_call(call)
    positions, owner = _find_rows(call)
    tables = call.requests.block_tables[call.requests.seq_ids][owner]
    first, end = jnp.zeros_like(positions), positions + 1
    if call.past is not None:
        end = jnp.minimum(end, call.past.end[owner])
        first = first if call.past.first is None else call.past.first[owner]
    queries = call.queries.astype(jnp.float32)
    # One row at a time: all contexts at once would not fit into memory.
    rows = queries, positions, tables, first, end
    output, lse = lax.map(lambda row: attend_row(call, *row), rows)
    return output.astype(call.output_dtype), lse


def _find_rows(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return each row's position and request, i32[R] each.

    A row without a request has position -1, so that it attends to no token.
    """
    requests = call.requests
    rows = jnp.arange(call.num_rows, dtype=jnp.int32)
    offsets = rows[:, None] - requests.query_starts[None, :]  # i32[R, B]
    owns = (offsets >= 0) & (offsets < requests.query_lengths[None, :])
    owner = jnp.argmax(owns, axis=1)
    first_position = requests.context_lengths - requests.query_lengths
    positions = first_position[owner] + rows - requests.query_starts[owner]
    return jnp.where(owns.any(axis=1), positions, -1), owner


def attend_row(
    call: Call,
    query: jax.Array,  # f32[H, D]
    position: jax.Array,  # i32[]
    table: jax.Array,  # i32[M]
    first: jax.Array,  # i32[], first visible token
    end: jax.Array,  # i32[], past the last visible token
) -> tuple[jax.Array, jax.Array]:
    """Return the output f32[H, Dv] and log-sum-exp f32[H] of one row."""
    keys, values = gather_sequence(call.pools, call.layer, table)
    token = locate_tokens(call, keys.shape[1])
    visible = (token >= first) & (token < end)
    if call.window is not None:
        visible &= token > position - call.window
    # Hidden slots may hold NaN, and 0 * NaN is NaN: mask the contents too.
    keys = jnp.where(visible[None, :, None], keys, 0.0)
    values = jnp.where(visible[None, :, None], values, 0.0)

    grouped = query.reshape(call.pools.num_kv_heads, call.heads_per_kv, -1)
    scores = call.scale * jnp.einsum(
        "kgd,ksd->kgs", grouped, keys, precision=lax.Precision.HIGHEST
    )
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    # A row without visible tokens keeps its zero scores, so that no softmax is empty.
    sees_any = visible.any()
    hidden = jnp.where(sees_any, -jnp.inf, 0.0)
    scores = jnp.where(visible[None, None, :], scores, hidden)
    if call.sinks is not None:
        sink = call.sinks.reshape(call.pools.num_kv_heads, -1, 1)
        scores = jnp.concatenate([scores, sink], axis=2)

    lse = jax.nn.logsumexp(scores, axis=2)  # f32[K, G]
    weights = jnp.exp(scores - lse[..., None])[..., : keys.shape[1]]
    output = jnp.einsum(
        "kgs,ksd->kgd", weights, values, precision=lax.Precision.HIGHEST
    )
    output = jnp.where(sees_any, output, 0.0)
    lse = jnp.where(sees_any, lse, -jnp.inf)
    return output.reshape(call.num_heads, -1), lse.reshape(call.num_heads)


def locate_tokens(call: Call, num_tokens: int) -> jax.Array:
    """Return the position of each local token of a sequence, i32[s]."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if call.part is None:
        return token
    column, offset = jnp.divmod(token, call.pools.block_size)
    return (column * call.num_parts + call.part) * call.pools.block_size + offset


def gather_sequence(
    pools: Pools,
    layer: jax.Array,  # i32[]
    table: jax.Array,  # i32[M]
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of a sequence, f32[K, M * T, D] and f32[K, M * T, Dv]."""
    keys = gather_tokens(pools.stored_keys, layer, table)
    if pools.stored_values is None:
        return keys, keys[..., : pools.value_dim]
    return keys, gather_tokens(pools.stored_values, layer, table)


def gather_tokens(
    stored: Stored,
    layer: jax.Array,  # i32[]
    table: jax.Array,  # i32[M]
) -> jax.Array:
    """Return the tokens of a block table's blocks in order, f32[K, M * T, D]."""
    table = jnp.clip(table, 0, stored.num_blocks - 1)
    parts = {name: array[layer, table] for name, array in stored.parts.items()}
    blocks = multiply_out(*stored.format.get(parts))  # f32[M, K, T, D]
    _, num_kv_heads, _, head_dim = blocks.shape
    return jnp.moveaxis(blocks, 1, 0).reshape(num_kv_heads, -1, head_dim)


@dataclasses.dataclass(frozen=True)
class Reference(Backend):
    """The reference as a backend, used only if named."""

    name: ClassVar[str] = "reference"
    # By JAX, so that it can verify the other backends' derivatives.
    is_differentiable: ClassVar[bool] = True

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Compute attention row by row."""
        del device
        return attend_reference(call)
