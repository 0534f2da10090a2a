"""One loop trip: pieces of several requests, gathered and reduced side by side.

A pool is `[L, N, K, T, D]`. Slicing a layer out, or converting the pool's dtype inside
jit, would copy it; so blocks are gathered by (layer, block) and only the gathered chunk
is decoded by its format. The operations are in the form cheapest for XLA, and round
nothing in between.

Symbols: `P` lanes, one for each piece of `W` consecutive blocks of a trip; `S = W * T`
tokens of a piece; `Q` rows of a lane, which share the axis of query heads except in the
mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call, Stored
from jkv.attention.softmax import HIDDEN, Sums
from jkv.formats.format import multiply_out
from jkv.indexing import gather

# Bytes of float32 keys (or values) of a trip. Smaller chunks fit caches closer to the
# core, larger ones amortize the cost of a trip.
TRIP_BYTES = 2 * 2**20


# Joining costs lanes times requests, which would dominate with tiny blocks.
MAX_LANES = 64


_WEIGH = "pkgs,pksd->pkgd"


class Lanes(NamedTuple):
    """The work of one trip: a piece of one request in each lane."""

    row: jax.Array  # i32[P], row of the queries
    request: jax.Array  # i32[P]
    columns: jax.Array  # i32[P, W], of its block table
    visible: jax.Array  # bool[P, Q, S]
    never: jax.Array  # bool[], always False, for `read_twice`


class Gathered(NamedTuple):
    """Gathered pieces in float32, flat and by head."""

    flat_keys: jax.Array  # f32[P * K * W, T * D]
    flat_values: jax.Array  # f32[P * K * W, T * Dv]
    keys: jax.Array  # f32[P, K, S, D]
    values: jax.Array  # f32[P, K, S, Dv]
    key_factor: jax.Array | None  # f32[P, K, S], factor of each token's key
    value_factor: jax.Array | None  # f32[P, K, S]


def attend_lanes(
    call: Call,  # provides pools and block tables
    # f32[R, K, Q * G, D], scaled; of all rows, or of all tiles of Q rows
    queries: jax.Array,
    lanes: Lanes,
    *,
    mask_values: bool,  # True if blocks may hold slots that no row attends to
) -> Sums:
    """Return the softmax sums of each lane's piece, f32[P, K, Q * G, ...]."""
    gathered, marks = gather_lanes(call, lanes), None
    # With more scores than elements, mask and scale the elements.
    most = max(call.pools.head_dim, call.pools.value_dim)
    is_wide = lanes.visible.shape[1] > 1 and queries.shape[2] > most
    if is_wide:
        gathered, marks = _break_apart(gathered, lanes.visible.any(axis=1))
    elif mask_values:
        gathered = _hide_values(gathered, lanes.visible.any(axis=1))
    hidden = read_twice(gathered.flat_keys, lanes.never, HIDDEN)
    scores = _score_pieces(call, gather(queries, lanes.row), gathered)
    if marks is not None:
        scores += marks[:, :, None]
    scores = _hide_scores(scores, lanes.visible, hidden)
    sums = _sum_pieces(scores, gathered, lanes.visible, is_sound=is_wide)
    total = sums.total + read_twice(gathered.flat_values, lanes.never, 0.0)
    return sums._replace(total=total)


def find_blocks(call: Call, lanes: Lanes) -> jax.Array:
    """Return the ids of the lanes' blocks, i32[P, W]."""
    table = gather(call.requests.seq_ids, lanes.request)[:, None]
    return gather(call.requests.block_tables, (table, lanes.columns))


def gather_lanes(call: Call, lanes: Lanes) -> Gathered:
    """Gather the lanes' blocks, each once, by their block tables."""
    pools, blocks = call.pools, find_blocks(call, lanes)

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


def _break_apart(
    gathered: Gathered,
    seen: jax.Array,  # bool[P, S]
) -> tuple[Gathered, jax.Array]:
    """Apply the factors and zero non-finite values; return marks, f32[P, K, S]."""
    keys = multiply_out(gathered.keys, gathered.key_factor)
    values = multiply_out(gathered.values, gathered.value_factor)
    values, marks = set_broken_apart(values, seen[:, None, :, None])
    gathered = gathered._replace(
        keys=keys, values=values, key_factor=None, value_factor=None
    )
    return gathered, marks


def _hide_values(
    gathered: Gathered,
    seen: jax.Array,  # bool[P, S]
) -> Gathered:
    """Zero values that no row attends to: they may be NaN, and 0 * NaN is NaN."""
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
    hidden: jax.Array,  # f32[], score of a masked token
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
    *,
    is_sound: bool,  # True if all values are finite
) -> Sums:
    """Return the softmax sums of each piece, `f32[P, K, Q * G, ...]`."""
    maximum = scores.max(axis=3)
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(axis=3)
    num_rows, values = visible.shape[1], gathered.values
    seen = None
    if num_rows > 1 and not is_sound:  # rows differ in their masks
        seen = jnp.repeat(visible, scores.shape[2] // num_rows, axis=1)[:, None]
    if gathered.value_factor is not None:
        weights *= gathered.value_factor[:, :, None]
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    summed = multiply(_WEIGH, weights, values)
    if seen is not None:
        # Checking the sums costs less than checking all values.
        is_finite = jnp.isfinite(summed).all()
        given = summed, weights, values, seen
        summed = lax.cond(is_finite, lambda sums, *_: sums, _sum_apart, *given)
    return Sums(maximum, total, summed)


def _sum_apart(
    _: jax.Array,  # f32[P, K, Q * G, Dv]
    weights: jax.Array,  # f32[P, K, Q * G, S]
    values: jax.Array,  # f32[P, K, S, Dv]
    seen: jax.Array,  # bool[P, 1, Q * G, S]
) -> jax.Array:
    """Recompute the sums so that non-finite values reach unmasked rows only."""
    values, marks = set_broken_apart(values, jnp.bool_(True))
    row_marks = jnp.where(seen, marks[:, :, None], 0.0).sum(axis=3)
    return multiply(_WEIGH, weights, values) + row_marks[..., None]


def gather_pieces(
    stored: Stored,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P, W], clamped into the pool
) -> tuple[jax.Array, jax.Array | None]:
    """Gather pieces of W blocks by head, f32[P * K * W, T * D].

    A head's blocks of a piece are contiguous, as one product needs. Also returns the
    factors, f32[P, K, W * T], or None. Out-of-range ids are clamped; the caller masks
    their contents.
    """
    num_heads = stored.parts["pool"].shape[2]
    heads = jnp.clip(blocks, 0, stored.num_blocks - 1)[:, None] * num_heads
    heads += jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    parts = {
        # Free: as a view, a head of a block is a block of one head.
        name: _gather_part(
            array.reshape(array.shape[0], -1, 1, *array.shape[3:]),
            layer,
            heads.reshape(-1),
        )
        if array.ndim > 4
        else _gather_part(array, layer, blocks)
        for name, array in stored.parts.items()
    }
    numbers, factor = stored.format.get(parts)
    if factor is not None:
        factor = jnp.swapaxes(factor, 1, 2)
        factor = factor.reshape(*factor.shape[:2], -1)
    return numbers, factor


def _gather_part(
    array: jax.Array,  # [L, N, K, T, ...]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[...]
) -> jax.Array:
    """Gather [..., K, T] of one number per row, or [C, K * T * D] of elements."""
    if array.ndim == 4:
        found: jax.Array = array.at[layer, blocks].get(mode="clip")
        return found
    return lax.platform_dependent(
        array,
        jnp.stack([jnp.full_like(blocks, layer), blocks], axis=-1),
        tpu=_gather_tiled,
        default=_gather_flat,
    )


def _gather_flat(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Gather [C, K * T * D] from a flat view of the blocks.

    The view is free. XLA on CPU copies its long last axis with vector instructions, but
    unrolls an axis of 64 into single elements.
    """
    return _gather(pool.reshape(*pool.shape[:2], -1), starts)


def _gather_tiled(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Gather [C, K * T * D] and flatten afterwards.

    TPUs tile the last two axes, so a flat view would copy the whole pool.
    """
    return _gather(pool, starts).reshape(starts.shape[0], -1)


def _gather(array: jax.Array, starts: jax.Array) -> jax.Array:
    """Return `array[starts[i, 0], starts[i, 1]]` for each i, with clamped starts."""
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, array.ndim - 1)),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1),
    )
    return lax.gather(
        array,
        starts,
        dimensions,
        slice_sizes=(1, 1, *array.shape[2:]),
        mode=lax.GatherScatterMode.CLIP,
    )


def read_twice(
    chunk: jax.Array,  # f32[P * K * W, T * D] from `gather_pieces`
    never: jax.Array,  # bool[], always False, but not a constant to the compiler
    otherwise: float,
) -> jax.Array:
    """Return `otherwise`, with a second use of the flat chunk.

    With its reshape as the only use, XLA fuses both and copies along the short axis,
    element by element: a third of the time of a decode step in JAX 0.10.2. Only newer
    versions respect an `optimization_barrier`.
    """
    return jnp.where(never, chunk[0, 0], jnp.float32(otherwise))


def multiply(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return an einsum in full float32 precision."""
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)


def set_broken_apart(
    tokens: jax.Array,  # f32[..., D]
    used: jax.Array,  # bool, to broadcast to `tokens`
) -> tuple[jax.Array, jax.Array]:
    """Zero NaN, infinite and unused elements; return the vectors and their marks.

    A product adds masked tokens with weights of 0, and 0 * NaN is NaN. So non-finite
    numbers are removed from it, and the token's mark, f32[...], NaN if it had any and
    else 0, is added to its score before the mask is applied.
    """
    is_sound = jnp.isfinite(tokens)
    marks = jnp.where(is_sound.all(axis=-1), 0.0, jnp.nan)
    return jnp.where(is_sound & used, tokens, 0.0), marks


def cap_scores(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return `soft_cap * tanh(scores / soft_cap)`, or the scores without a cap."""
    if soft_cap is None:
        return scores
    return soft_cap * jnp.tanh(scores / soft_cap)


def quotient(number: jax.Array, size: int) -> jax.Array:
    """Return `number // size` for nonnegative operands.

    The operator `//` needs seven more operations for negative ones.
    """
    return lax.div(number, jnp.int32(size))


def divide_up(number: jax.Array, size: int) -> jax.Array:
    """Return `ceil(number / size)` for nonnegative operands."""
    return quotient(number + (size - 1), size)


def scale_queries(call: Call) -> jax.Array:
    """Return the scaled queries grouped by kv head, f32[R, K, G, D]."""
    scaled = call.queries.astype(jnp.float32) * call.scale
    return scaled.reshape(call.num_rows, call.pools.num_kv_heads, call.heads_per_kv, -1)
