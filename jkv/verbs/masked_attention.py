"""Attention of a step with a mask: the cached tokens, and the step's own rows.

The cached tokens are visible to every row, so the kernels and loops for causal calls
serve them. A dense product adds the rows of the step, read back from their slots as
later steps will read them, and the results are joined by their log-sum-exp.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.attention.backend import Past, Pools, Requests, Stored
from jkv.attention.own_rows import OwnRows, Results, attend_own_rows, join_results
from jkv.formats.format import Formats, multiply_out
from jkv.masks import StepMask
from jkv.operations import gather
from jkv.state import Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskedRows:
    """The mask of a step in one layer, and the slots of its rows."""

    mask: StepMask
    slots: Slots  # i32[R] each
    positions: jax.Array  # i32[R], slots in their sequences


def attend_masked(
    attend: Callable[..., Results],  # `attend_pools` with queries and pools
    queries: jax.Array,  # [R, H, D]
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    rows: MaskedRows,
    *,
    plans: dict[str, Any] | None,
    sinks: jax.Array | None,  # f32[H]
    window: jax.Array | int | None,
    scale: jax.Array | float | None,
    soft_cap: float | None,
    by_position: bool,
) -> Results:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    mask, formats = rows.mask, pools.formats
    if mask.adds_later:
        found = attend(requests, window=window, sinks=sinks, plans=plans)
        sinks = None
    else:
        found = _attend_past(attend, requests, rows, window, plans)
    if not mask.reads_only:
        stored = _read_back(pools, layer, rows.slots)
        scale = 1.0 / math.sqrt(queries.shape[2]) if scale is None else scale
        own = _as_queries(queries, scale, stored[0].shape[1], formats)
        window = None if window is None else jnp.asarray(window, jnp.int32)
        output, lse = attend_own_rows(
            OwnRows(own, *stored, rows.positions, mask),
            requests.query_starts,
            requests.query_lengths,
            window=window,
            soft_cap=soft_cap,
            by_request=by_position,
        )
        by_head = queries.shape[:2]
        output = formats.value.rotate_back(output.reshape(*by_head, -1))
        others = output[..., : pools.value_dim], lse.reshape(by_head)
    else:
        others = jnp.zeros(found[0].shape), jnp.full_like(found[1], -jnp.inf)
    output, lse = join_results(found, others, sinks)
    return output.astype(queries.dtype), lse


def _attend_past(
    attend: Callable[..., Results],
    requests: Requests,
    rows: MaskedRows,
    window: jax.Array | int | None,
    plans: dict[str, Any] | None,
) -> Results:
    """Attend to the cached tokens, which every row sees up to its window."""
    mask = rows.mask
    if window is None:
        return attend(requests, window=None, past=Past(mask.past), plans=plans)
    if mask.is_one_window:
        first = jnp.maximum(mask.past + 1 - window, 0)
        return attend(requests, window=None, past=Past(mask.past, first))
    if not mask.is_tree and not mask.has_one_window:
        return attend(requests, window=window, past=Past(mask.past), plans=plans)
    # Each row has a window of its own, and so becomes a request.
    row = jnp.arange(mask.low.shape[0], dtype=jnp.int32)
    past = gather(mask.past, mask.request)
    first = jnp.where(mask.one_window, past, rows.positions) + 1 - window
    lengths = gather(requests.query_lengths, mask.request)
    is_owned = row - mask.first_row < lengths
    by_row = requests._replace(
        seq_ids=gather(requests.seq_ids, mask.request),
        query_starts=row,
        query_lengths=is_owned.astype(jnp.int32),
        context_lengths=past + 1,
    )
    return attend(by_row, window=None, past=Past(past, jnp.maximum(first, 0)))


def _as_queries(
    queries: jax.Array, scale: jax.Array | float, num_kv_heads: int, formats: Formats
) -> jax.Array:
    """Return scaled queries by kv head, rotated as stored keys, f32[R, K, G, D]."""
    num_rows, num_heads, head_dim = queries.shape
    rows = formats.key.rotate(queries).astype(jnp.float32) * scale
    return rows.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)


def _read_back(
    pools: Pools, layer: jax.Array, slots: Slots
) -> tuple[jax.Array, jax.Array]:
    """Return the step's rows as later steps read them, f32[R, K, D] and [R, K, Dv].

    Rotated formats return rotated rows.
    """

    def read(stored: Stored) -> jax.Array:
        parts = {
            name: array.at[layer, slots.block_ids, :, slots.offsets].get(mode="clip")
            for name, array in stored.parts.items()
        }
        return multiply_out(*stored.format.get(parts))

    keys = read(pools.stored_keys)
    if pools.stored_values is not None:
        return keys, read(pools.stored_values)
    is_turned = pools.formats.value.is_turned
    return keys, keys if is_turned else keys[..., : pools.value_dim]
