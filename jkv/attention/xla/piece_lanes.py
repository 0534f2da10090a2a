"""One trip of a loop: pieces of several requests, gathered and summed side by side.

Symbols: `P` lanes, one for each piece of `W` consecutive blocks that a trip takes; `S =
W * T` tokens of a piece; `Q` rows of a lane, which are query heads like others to all
but the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call
from jkv.attention.pools import gather_pieces, read_twice
from jkv.attention.softmax import HIDDEN, Sums
from jkv.attention.xla.operations import cap_scores, gather, multiply, set_broken_apart

_WEIGH = "pkgs,pksd->pkgd"


class Lanes(NamedTuple):
    """What one trip takes: a piece of one request in each lane."""

    row: jax.Array  # i32[P], whose queries attend to it
    request: jax.Array  # i32[P]
    columns: jax.Array  # i32[P, W], of its block table
    visible: jax.Array  # bool[P, Q, S]
    never: jax.Array  # bool[], false, as `read_twice` wants it


class Gathered(NamedTuple):
    """Pieces as they came out of the pools, in float32, and by head."""

    flat_keys: jax.Array  # f32[P * K * W, T * D]
    flat_values: jax.Array  # f32[P * K * W, T * Dv]
    keys: jax.Array  # f32[P, K, S, D]
    values: jax.Array  # f32[P, K, S, Dv]
    key_factor: jax.Array | None  # f32[P, K, S], what a token's key is multiplied by
    value_factor: jax.Array | None  # f32[P, K, S]


def attend_lanes(
    call: Call,  # whose pools and block tables are read
    # f32[R, K, Q * G, D], scaled; of all rows, or of all tiles of Q rows
    queries: jax.Array,
    lanes: Lanes,  # what to attend to
    *,
    mask_values: bool,  # whether blocks may hold slots that the row does not see
) -> Sums:
    """Return the sums of each lane's tokens, `f32[P, K, Q * G, ...]`."""
    gathered = _gather_lanes(call, lanes)
    if mask_values:
        gathered = _hide_values(gathered, lanes.visible.any(axis=1))
    hidden = read_twice(gathered.flat_keys, lanes.never, HIDDEN)
    scores = _score_pieces(call, gather(queries, lanes.row), gathered)
    scores = _hide_scores(scores, lanes.visible, hidden)
    sums = _sum_pieces(scores, gathered, lanes.visible)
    total = sums.total + read_twice(gathered.flat_values, lanes.never, 0.0)
    return sums._replace(total=total)


def _gather_lanes(call: Call, lanes: Lanes) -> Gathered:
    """Read the lanes' blocks, each once, by way of the block tables."""
    pools, requests = call.pools, call.requests
    table = gather(requests.seq_ids, lanes.request)[:, None]
    blocks = gather(requests.block_tables, table, lanes.columns)

    def by_head(flat: jax.Array, head_dim: int) -> jax.Array:
        return flat.reshape(blocks.shape[0], pools.num_kv_heads, -1, head_dim)

    flat_keys, key_factor = gather_pieces(pools.stored_keys, call.layer, blocks)
    keys = by_head(flat_keys, pools.head_dim)
    if pools.stored_values is None:
        values = keys[..., : pools.value_dim]
        return Gathered(flat_keys, flat_keys, keys, values, key_factor, key_factor)
    flat_values, factor = gather_pieces(pools.stored_values, call.layer, blocks)
    values = by_head(flat_values, pools.value_dim)
    return Gathered(flat_keys, flat_values, keys, values, key_factor, factor)


def _hide_values(
    gathered: Gathered,
    seen: jax.Array,  # bool[P, S]
) -> Gathered:
    """Clear values that no row sees: they may be NaN, and 0 * NaN is NaN."""
    values = jnp.where(seen[:, None, :, None], gathered.values, 0.0)
    factor = gathered.value_factor
    if factor is not None:
        factor = jnp.where(seen[:, None], factor, 0.0)
    return gathered._replace(values=values, value_factor=factor)


def _score_pieces(
    call: Call,
    rows: jax.Array,  # f32[P, K, Q * G, D], scaled
    gathered: Gathered,
) -> jax.Array:
    """Return the scores of each piece's tokens, f32[P, K, Q * G, S]."""
    scores = multiply("pkgd,pksd->pkgs", rows, gathered.keys)
    if gathered.key_factor is not None:
        scores *= gathered.key_factor[:, :, None]
    return cap_scores(scores, call.soft_cap)


def _hide_scores(
    scores: jax.Array,  # f32[P, K, Q * G, S]
    visible: jax.Array,  # bool[P, Q, S]
    hidden: jax.Array,  # f32[], what stands where a row does not see a token
) -> jax.Array:
    num_rows = visible.shape[1]
    shape = (*scores.shape[:2], num_rows, -1, scores.shape[3])
    scores_by_row = scores.reshape(shape)  # f32[P, K, Q, G, S]
    seen = visible[:, None, :, None]
    return jnp.where(seen, scores_by_row, hidden).reshape(scores.shape)


def _sum_pieces(
    scores: jax.Array,  # f32[P, K, Q * G, S], masked
    gathered: Gathered,
    visible: jax.Array,  # bool[P, Q, S]
) -> Sums:
    """Return the softmax sums of each piece, `f32[P, K, Q * G, ...]`."""
    maximum = scores.max(axis=3)
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(axis=3)
    num_rows, values = visible.shape[1], gathered.values
    seen = None
    if num_rows > 1:  # which do not see the same tokens
        seen = jnp.repeat(visible, scores.shape[2] // num_rows, axis=1)[:, None]
    if gathered.value_factor is not None:
        weights *= gathered.value_factor[:, :, None]
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    summed = multiply(_WEIGH, weights, values)
    if seen is not None:
        # Looking at the sums costs less than looking at all values.
        is_sound = jnp.isfinite(summed).all()
        given = summed, weights, values, seen
        summed = lax.cond(is_sound, lambda sums, *_: sums, _sum_apart, *given)
    return Sums(maximum, total, summed)


def _sum_apart(
    _: jax.Array,  # f32[P, K, Q * G, Dv]
    weights: jax.Array,  # f32[P, K, Q * G, S]
    values: jax.Array,  # f32[P, K, S, Dv]
    seen: jax.Array,  # bool[P, 1, Q * G, S]
) -> jax.Array:
    """Return the sums anew, where a broken value reaches only rows that see it."""
    values, marks = set_broken_apart(values, jnp.bool_(True))
    row_marks = jnp.where(seen, marks[:, :, None], 0.0).sum(axis=3)
    return multiply(_WEIGH, weights, values) + row_marks[..., None]
