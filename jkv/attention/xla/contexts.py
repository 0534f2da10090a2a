"""Lanes that go through their contexts side by side, a piece of each at a time.

A lane is a tile of rows of one request, which reads its blocks once for all of them.
Pieces are cut at multiples of a fixed number of tokens and joined from the first that
the lane sees to the last, so what a row gets does not depend on the other lanes.

Symbols: `P` lanes, `Q` rows of a tile, `W` columns of a piece.
"""

import functools

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.attention.softmax import Sums, empty_sums, finish_sums, join_sums
from jkv.attention.xla.operations import divide_up, quotient
from jkv.attention.xla.piece_lanes import Lanes, attend_lanes
from jkv.attention.xla.row_tiles import Readers
from jkv.sharding.loops import fori_loop


def attend_contexts(
    call: Call,
    queries: jax.Array,  # f32[P, K, Q * G, D], scaled
    readers: Readers,
    width: int,  # W
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[P, K, Q * G, Dv]` and `f32[P, K, Q * G]` of what lanes see."""
    first, end = find_pieces(call, readers, width)
    sinks, shape = None, queries.shape[:3]
    if call.sinks is not None:
        sinks = call.sinks.reshape(1, shape[1], call.heads_per_kv)
        sinks = jnp.tile(sinks, (1, 1, readers.last.shape[1]))
    sums = empty_sums(shape, call.pools.value_dim, sinks)
    take = functools.partial(_take_piece, call, queries, readers, first, width)
    sums = fori_loop(jnp.int32(0), jnp.max(end - first), take, sums)
    sees = readers.last >= 0
    if readers.before is not None:
        sees &= readers.last > readers.before
    return finish_sums(sums, jnp.repeat(sees, call.heads_per_kv, axis=1)[:, None])


def find_pieces(
    call: Call, readers: Readers, width: int
) -> tuple[jax.Array, jax.Array]:
    """Return the first piece that lanes see, and the one past the last, i32[P]."""
    size = width * call.pools.block_size
    end = divide_up(readers.last.max(axis=1) + 1, size)
    if readers.before is None:
        return jnp.zeros_like(end), end
    # The first row of a tile sees the earliest token.
    first = quotient(jnp.maximum(readers.before[:, 0] + 1, 0), size)
    return jnp.minimum(first, end), end


def _take_piece(
    call: Call,
    queries: jax.Array,  # f32[P, K, Q * G, D], scaled
    readers: Readers,
    first: jax.Array,  # i32[P]
    width: int,  # W
    trip: jax.Array,
    sums: Sums,  # f32[P, K, Q * G, ...]
) -> Sums:
    """Add the next piece of each lane's context to its sums.

    A piece that a row sees nothing of leaves its sums as they are, to the bit: it comes
    behind all that the row sees, and is multiplied by exp(HIDDEN - maximum) = 0, or
    before, and then what it left is.
    """
    size, piece = width * call.pools.block_size, first + trip
    column = jnp.arange(width, dtype=jnp.int32)
    token = jnp.arange(size, dtype=jnp.int32)
    token = (piece[:, None] * size + token[None])[:, None]
    visible = token <= readers.last[..., None]
    if readers.before is not None:
        visible &= token > readers.before[..., None]
    lanes = Lanes(
        row=jnp.arange(queries.shape[0], dtype=jnp.int32),
        request=readers.request,
        columns=piece[:, None] * width + column[None],
        visible=visible,
        never=trip < 0,
    )
    return join_sums(sums, attend_lanes(call, queries, lanes, mask_values=True))
