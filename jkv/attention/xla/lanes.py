"""One trip of a loop: pieces of several requests, gathered and summed side by side.

Symbols: `P` lanes, one for each piece of `W` consecutive blocks that a trip takes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.attention.pools import Pools, gather_blocks, gather_scales, read_twice
from jkv.attention.softmax import HIDDEN, Sums
from jkv.attention.xla.operations import cap_scores, gather, multiply


class Lanes(NamedTuple):
    """What one trip takes: a piece of one request in each lane."""

    row: jax.Array  # i32[P], whose query attends to it
    request: jax.Array  # i32[P]
    columns: jax.Array  # i32[P, W], of its block table
    visible: jax.Array  # bool[P, W, T]
    never: jax.Array  # bool[], false, as `read_twice` wants it


class Gathered(NamedTuple):
    """Blocks as they came out of the pools, in float32, and by head."""

    flat_keys: jax.Array  # f32[P * W, K * T * D]
    flat_values: jax.Array  # f32[P * W, K * T * Dv]
    keys: jax.Array  # f32[P * W, K, T, D]
    values: jax.Array  # f32[P * W, K, T, Dv]
    key_scales: jax.Array | None  # f32[P * W, K, T]
    value_scales: jax.Array | None  # f32[P * W, K, T]


def attend_lanes(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    lanes: Lanes,
    *,
    mask_values: bool,
) -> Sums:
    """Return the sums of each lane's tokens, `f32[P, K, G, ...]`.

    Args:
      call: whose pools and block tables are read.
      queries: of all rows.
      lanes: what to attend to.
      mask_values: whether blocks may hold slots that the row does not see.
    """
    gathered = _gather_lanes(call, lanes)
    seen = lanes.visible.reshape(-1, lanes.visible.shape[2])  # bool[P * W, T]
    if mask_values:
        gathered = _hide_values(gathered, seen)
    hidden = read_twice(gathered.flat_keys, lanes.never, HIDDEN)
    scores = _score_blocks(call, queries, lanes, gathered)
    scores = jnp.where(seen[:, None, None, :], scores, hidden)
    sums = _sum_pieces(scores, gathered, lanes.columns.shape)
    total = sums.total + read_twice(gathered.flat_values, lanes.never, 0.0)
    return sums._replace(total=total)


def _gather_lanes(call: Call, lanes: Lanes) -> Gathered:
    """Read the lanes' blocks, each once, by way of the block tables."""
    pools, requests = call.pools, call.requests
    table = gather(requests.seq_ids, lanes.request)[:, None]
    blocks = gather(requests.block_tables, table, lanes.columns).reshape(-1)
    flat_keys = gather_blocks(pools.keys, call.layer, blocks, pools.kv_dtype)
    keys = flat_keys.reshape(-1, *pools.keys.shape[2:])
    if pools.values is None:
        flat_values, values = flat_keys, keys[..., : pools.value_dim]
    else:
        flat_values = gather_blocks(pools.values, call.layer, blocks, pools.kv_dtype)
        values = flat_values.reshape(-1, *pools.values.shape[2:])
    scales = _gather_scales(pools, call.layer, blocks)
    return Gathered(flat_keys, flat_values, keys, values, *scales)


def _gather_scales(
    pools: Pools,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P * W]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the scales of the blocks' keys and values, f32[P * W, K, T] if any."""
    keys, values = (
        None if scales is None else gather_scales(scales, layer, blocks)
        for scales in (pools.key_scales, pools.value_scales)
    )
    return keys, keys if pools.values is None else values


def _hide_values(
    gathered: Gathered,
    seen: jax.Array,  # bool[P * W, T]
) -> Gathered:
    """Clear values that the row does not see: they may be NaN, and 0 * NaN is NaN."""
    values = jnp.where(seen[:, None, :, None], gathered.values, 0.0)
    value_scales = gathered.value_scales
    if value_scales is not None:
        value_scales = jnp.where(seen[:, None, :], value_scales, 0.0)
    return gathered._replace(values=values, value_scales=value_scales)


def _score_blocks(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    lanes: Lanes,
    gathered: Gathered,
) -> jax.Array:
    """Return the scores of each block's tokens, f32[P * W, K, G, T]."""
    rows = gather(queries, jnp.repeat(lanes.row, lanes.columns.shape[1]))
    scores = multiply("ckgd,cktd->ckgt", rows, gathered.keys)
    # A scale per token is a factor on its scores and weights: fewer than elements.
    if gathered.key_scales is not None:
        scores *= gathered.key_scales[:, :, None, :]
    return cap_scores(scores, call.soft_cap)


def _sum_pieces(
    scores: jax.Array,  # f32[P * W, K, G, T], masked
    gathered: Gathered,
    shape: tuple[int, ...],  # P, W
) -> Sums:
    """Return the softmax sums of each piece, `f32[P, K, G, ...]`."""
    maximum = scores.reshape(*shape, *scores.shape[1:]).max(axis=(1, 4))
    shift = jnp.repeat(maximum, shape[1], axis=0)
    weights = jnp.exp(scores - shift[..., None])
    total = weights.reshape(*shape, *scores.shape[1:]).sum(axis=(1, 4))
    if gathered.value_scales is not None:
        weights *= gathered.value_scales[:, :, None, :]
    summed = multiply("ckgt,cktd->ckgd", weights, gathered.values)
    summed = summed.reshape(*shape, *summed.shape[1:]).sum(axis=1)
    return Sums(maximum, total, summed)
