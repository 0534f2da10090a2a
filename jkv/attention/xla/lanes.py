"""One trip of a loop: pieces of several requests, gathered and summed side by side.

A pool is `[L, N, K, T, D]`. Slicing a layer out, or converting the pool to another
dtype inside jit, would copy it; so whole blocks are gathered by (layer, block) first
and only the gathered chunk is turned into numbers, by its format. Operations have the
form that costs XLA least, and round nothing on the way.

Symbols: `P` lanes, one for each piece of `W` consecutive blocks that a trip takes; `S =
W * T` tokens of a piece; `Q` rows of a lane, which are query heads like others to all
but the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call, Stored
from jkv.attention.softmax import HIDDEN, Sums
from jkv.formats.format import multiply_out
from jkv.indexing import gather

# Keys (or values) gathered in one trip, in float32. Smaller chunks stay in the cache
# nearer to the core, larger ones share the cost of a trip.
TRIP_BYTES = 2 * 2**20


# Joining costs lanes times requests; with tiny blocks it would outgrow the attention.
MAX_LANES = 64


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
    gathered, marks = gather_lanes(call, lanes), None
    # With several rows and more scores than elements, work is done on the elements.
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
    """Read the lanes' blocks, each once, by way of the block tables."""
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
    """Multiply by the factors and clear broken values; return marks, f32[P, K, S]."""
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
    *,
    is_sound: bool,  # whether no value is broken
) -> Sums:
    """Return the softmax sums of each piece, `f32[P, K, Q * G, ...]`."""
    maximum = scores.max(axis=3)
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(axis=3)
    num_rows, values = visible.shape[1], gathered.values
    seen = None
    if num_rows > 1 and not is_sound:  # rows do not see the same tokens
        seen = jnp.repeat(visible, scores.shape[2] // num_rows, axis=1)[:, None]
    if gathered.value_factor is not None:
        weights *= gathered.value_factor[:, :, None]
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    summed = multiply(_WEIGH, weights, values)
    if seen is not None:
        # Looking at the sums costs less than looking at all values.
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
    """Return the sums anew, where a broken value reaches only rows that see it."""
    values, marks = set_broken_apart(values, jnp.bool_(True))
    row_marks = jnp.where(seen, marks[:, :, None], 0.0).sum(axis=3)
    return multiply(_WEIGH, weights, values) + row_marks[..., None]


def gather_pieces(
    stored: Stored,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P, W], clamped into the pool
) -> tuple[jax.Array, jax.Array | None]:
    """Return pieces of W blocks by head, as `f32[P * K * W, T * D]`.

    What one head has of a piece comes out side by side, as one product wants it. And
    the pieces' factors, f32[P, K, W * T], None for none. Rubbish ids are never dropped
    or filled: the caller masks what they bring.
    """
    num_heads = stored.parts["pool"].shape[2]
    heads = jnp.clip(blocks, 0, stored.num_blocks - 1)[:, None] * num_heads
    heads += jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    parts = {
        # The view is free: a head of a block is a block of one head.
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
    """Return [..., K, T] of what has a number for each row, else [C, K * T * D]."""
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
    """Return [C, K * T * D] by way of a flat view of the blocks.

    The view is free, and its long last axis is what XLA copies with vector instructions
    on a CPU; an axis of 64 it unrolls into single elements.
    """
    return _gather(pool.reshape(*pool.shape[:2], -1), starts)


def _gather_tiled(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Return [C, K * T * D]; the blocks become flat when they have been gathered.

    TPUs keep the last two axes in tiles, so that a flat view would copy the whole pool.
    """
    return _gather(pool, starts).reshape(starts.shape[0], -1)


def _gather(array: jax.Array, starts: jax.Array) -> jax.Array:
    """Return `array[starts[i, 0], starts[i, 1]]` for each i, clamped."""
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
    never: jax.Array,  # bool[], false, but not to the compiler's knowledge
    otherwise: float,  # what to return
) -> jax.Array:
    """Return the number `otherwise`, by way of a second reader of the flat chunk.

    With the reshape of the chunk as its only reader, XLA merges the two, copies along
    the short axis and is back at single elements: a third of the time of a decode step
    in JAX 0.10.2. An `optimization_barrier` is respected only by newer versions.
    """
    return jnp.where(never, chunk[0, 0], jnp.float32(otherwise))


def multiply(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return an `einsum` whose float32 operands are not rounded."""
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)


def set_broken_apart(
    tokens: jax.Array,  # f32[..., D]
    used: jax.Array,  # bool, to broadcast to `tokens`
) -> tuple[jax.Array, jax.Array]:
    """Return vectors with zeros for NaN, infinity and what is not used, and marks.

    A product adds up with weights of 0 what a row does not see, and 0 * NaN is NaN. So
    broken numbers are taken out of it, and the mark of their token goes into its score:
    what is not seen of the scores is masked. The marks, f32[...], are NaN for a vector
    with a broken number, else 0.
    """
    is_sound = jnp.isfinite(tokens)
    marks = jnp.where(is_sound.all(axis=-1), 0.0, jnp.nan)
    return jnp.where(is_sound & used, tokens, 0.0), marks


def cap_scores(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return `c * tanh(scores / c)`, or the scores without a cap."""
    if soft_cap is None:
        return scores
    return soft_cap * jnp.tanh(scores / soft_cap)


def quotient(number: jax.Array, size: int) -> jax.Array:
    """Return `number // size`, neither of them negative.

    The operator rounds down below zero too, with seven more operations.
    """
    return lax.div(number, jnp.int32(size))


def divide_up(number: jax.Array, size: int) -> jax.Array:
    """Return how many parts of a size hold a number that is not negative."""
    return quotient(number + (size - 1), size)


def scale_queries(call: Call) -> jax.Array:
    """Return the scaled queries by kv head, f32[R, K, G, D]."""
    scaled = call.queries.astype(jnp.float32) * call.scale
    return scaled.reshape(call.num_rows, call.pools.num_kv_heads, call.heads_per_kv, -1)
