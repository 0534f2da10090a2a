"""Tiles of a few rows of one request, attended to side by side.

Symbols: `R` rows, `B` requests, `P` lanes of a trip, `Q` rows of a tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.attention.xla.operations import divide_up, gather


class Readers(NamedTuple):
    """What the rows of each lane see of their sequence."""

    request: jax.Array  # i32[P]
    last: jax.Array  # i32[P, Q], the last token in the pools that it sees, or -1
    before: jax.Array | None  # i32[P, Q], the last one before its window


class Owners(NamedTuple):
    """Whose token each row is."""

    owns: jax.Array  # bool[R, B]
    rank: jax.Array  # i32[R, B], number within the request if it owns the row

    @classmethod
    def of(cls, call: Call) -> "Owners":
        """Find the request of each row."""
        requests, row = call.requests, jnp.arange(call.num_rows, dtype=jnp.int32)
        rank = row[:, None] - requests.query_starts[None]
        return cls((rank >= 0) & (rank < requests.query_lengths[None]), rank)

    def pick(self, values: jax.Array) -> jax.Array:
        """Return what the owner of each row has, i32[R or 1, B] to i32[R], else 0."""
        # One request owns a row at most, so that a sum finds what it has.
        return jnp.sum(jnp.where(self.owns, values, 0), axis=1, dtype=jnp.int32)


class RowTiles(NamedTuple):
    """The rows of all requests, cut into tiles."""

    call: Call
    tile_rows: int  # Q
    counts: jax.Array  # i32[B], tiles of each request
    ends: jax.Array  # i32[B], tiles of all requests up to and with this one

    @property
    def most(self) -> int:
        """Tiles that there can be."""
        spare = self.call.num_requests * (self.tile_rows - 1)
        return (self.call.num_rows + spare) // self.tile_rows

    def locate(self, index: jax.Array) -> tuple[jax.Array, Readers]:
        """Return the rows of tiles i32[P], i32[P, Q], and what they see."""
        call, requests = self.call, self.call.requests
        request = jnp.sum(self.ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
        before = jnp.where(request > 0, gather(self.ends, request - 1), 0)
        offset = jnp.arange(self.tile_rows, dtype=jnp.int32)[None]
        offset = ((index - before) * self.tile_rows)[:, None] + offset
        length = gather(requests.query_lengths, request)[:, None]
        valid = (offset < length) & (index < self.ends[-1])[:, None]
        position = gather(requests.context_lengths, request)[:, None] - length + offset
        starts = None
        if call.window is not None:
            starts = call.find_held(position - call.window)
        last = jnp.where(valid, call.find_held(position), -1)
        row = gather(requests.query_starts, request)[:, None] + offset
        return row, Readers(request, last, starts)

    def to_rows(
        self, found: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Bring results by tile to rows; a row without a request sees nothing.

        Args:
          found: f32[tiles, K, Q * G, Dv] and f32[tiles, K, Q * G].
        """
        call, owners = self.call, Owners.of(self.call)
        first_tiles = self.ends - self.counts
        index = owners.pick(first_tiles[None] * self.tile_rows + owners.rank)
        is_owned = owners.owns.any(axis=1)[:, None, None]

        def by_row(array: jax.Array) -> jax.Array:
            num_tiles, num_kv_heads, _, *rest = array.shape
            shape = num_tiles, num_kv_heads, self.tile_rows, call.heads_per_kv, *rest
            rows = jnp.moveaxis(array.reshape(shape), 2, 1)
            rows = rows.reshape(-1, num_kv_heads, call.heads_per_kv, *rest)
            return gather(rows, index)

        output, lse = (by_row(array) for array in found)
        return (
            jnp.where(is_owned[..., None], output, 0.0),
            jnp.where(is_owned, lse, -jnp.inf),
        )


def cut_rows(call: Call, tile_rows: int) -> RowTiles:
    """Cut the rows of each request into tiles of so many."""
    counts = divide_up(call.requests.query_lengths, tile_rows)
    return RowTiles(call, tile_rows, counts, jnp.cumsum(counts, dtype=jnp.int32))


def take_rows(queries: jax.Array, rows: jax.Array) -> jax.Array:
    """Return queries f32[R, K, G, D] of tiles, i32[P, Q], as f32[P, K, Q * G, D]."""
    tiles = jnp.moveaxis(gather(queries, rows), 1, 2)  # f32[P, K, Q, G, D]
    num_tiles, num_kv_heads, *_, head_dim = tiles.shape
    return tiles.reshape(num_tiles, num_kv_heads, -1, head_dim)
