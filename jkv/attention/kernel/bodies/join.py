"""The kernel that joins partial results of pieces.

In plain JAX this would need atomics, which are not deterministic, or memory for every
request times every piece.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.sums import HIDDEN, LN2, TileSums, start_sums
from jkv.attention.kernel.elements.sections import cut
from jkv.attention.kernel.work.lists import Pieces

# Partial results per trip, with one warp and with several: with few per trip, contexts
# of many pieces would wait for many loads in sequence.
_FEW_PIECES, _MANY_PIECES, _WARPS_FOR_MANY = 8, 32, 4


# Values of a row that one warp holds; twice as many spill on Hopper.
_MAX_WARP_DIM = 256


def join_pieces(
    pieces: Pieces,
    sinks: jax.Array | None,  # f32[H]
    partial: jax.Array,  # f32[W, H, Dv]
    partial_lse: jax.Array,  # f32[W, H], log2
    dtype: jax.typing.DTypeLike,
    *,
    num_entries: int,
    way: backend.Way,
) -> tuple[jax.Array, jax.Array]:
    """Join pieces to [R, H, Dv] and log-sum-exp f32[R, H]; zeros without pieces.

    `num_entries` is the number of distinct pieces: W, or fewer if lanes share them.
    """
    num_rows, (_, num_heads, value_dim) = pieces.first.shape[0], partial.shape
    num_warps = 1 if value_dim <= _MAX_WARP_DIM else 2
    num_pieces = _FEW_PIECES
    if num_entries > 2 * _FEW_PIECES * num_rows:
        num_pieces, num_warps = _MANY_PIECES, num_warps * _WARPS_FOR_MANY
    output, lse = backend.launch(
        "jkv_join",
        functools.partial(_join_kernel, num_pieces=num_pieces),
        (pieces, sinks, partial, partial_lse),
        (
            jax.ShapeDtypeStruct((num_rows, num_heads, value_dim), dtype),
            jax.ShapeDtypeStruct((num_rows, num_heads), jnp.float32),
        ),
        grid=(num_rows, num_heads),
        compilation=backend.Compilation(num_warps, 1, way),
    )
    return output, lse


def _join_kernel(
    pieces: Pieces,  # i32[R] each
    sinks_ref: jax.Array | None,  # f32[H]
    partial_ref: jax.Array,  # f32[W, H, Dv]
    partial_lse_ref: jax.Array,  # f32[W, H], log2
    output_ref: jax.Array,  # [R, H, Dv]
    lse_ref: jax.Array,  # f32[R, H]
    *,
    num_pieces: int,
) -> None:
    """Join the partial results of one row and head.

    A row without pieces, or with empty pieces only, is zero.
    """
    row, head = backend.program_id(0), backend.program_id(1)
    first, end = pieces.first[row], pieces.end[row]
    value_sections = cut(partial_ref.shape[2])
    lanes = jnp.arange(num_pieces, dtype=jnp.int32)

    def join(
        trip: jax.Array, carry: tuple[jax.Array, TileSums]
    ) -> tuple[jax.Array, TileSums]:
        num_seen, sums = carry
        piece = first + trip * num_pieces + lanes
        is_mine = piece < end
        piece = jnp.minimum(piece, end - 1)
        lse = jnp.where(is_mine, partial_lse_ref[piece, head], HIDDEN)
        is_seen = lse != HIDDEN  # true for NaN and -inf
        num_seen += jnp.sum(is_seen.astype(jnp.int32))
        maximum = jnp.maximum(sums.maximum, jnp.max(lse))
        weights = jnp.where(is_seen, jnp.exp2(lse - maximum), 0.0)
        shrink = jnp.exp2(sums.maximum - maximum)
        summed = []
        for section, old in zip(value_sections, sums.values, strict=True):
            part = partial_ref[piece[:, None], head, section.columns]
            summed.append(old * shrink + jnp.sum(weights[:, None] * part, axis=0))
        total = sums.total * shrink + jnp.sum(weights)
        return num_seen, TileSums(maximum, total, tuple(summed))

    sums = start_sums(
        (), value_sections, None if sinks_ref is None else sinks_ref[head]
    )
    trips = lax.div(end - first + (num_pieces - 1), jnp.int32(num_pieces))
    carry = jnp.int32(0), sums
    num_seen, sums = lax.fori_loop(jnp.int32(0), trips, join, carry)
    has_any = num_seen > 0
    total = jnp.where(has_any, sums.total, 1.0)
    for section, value in zip(value_sections, sums.values, strict=True):
        value = jnp.where(has_any, value / total, 0.0)
        # Repeated columns have the same value in both sections.
        output_ref[row, head, section.columns[0]] = value.astype(output_ref.dtype)
    lse = (sums.maximum + jnp.log2(total)) * LN2
    lse_ref[row, head] = jnp.where(has_any, lse, -jnp.inf)
