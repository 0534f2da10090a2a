"""The flat list of what decoding reads: requests by rank, pieces between their edges.

Symbols: `B` requests, `P` lanes of a trip.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Requests


class WorkList(NamedTuple):
    """The requests of one row by rank, those with blocks between their edges first.

    Arrays over ranks are padded by `P`, so that slices of `P` ranks stay inside.
    """

    request: jax.Array  # i32[B + P]
    first: jax.Array  # i32[B + P], first column that is no edge
    last: jax.Array  # i32[B + P], column of the last block, an edge
    ends: jax.Array  # i32[B + P], pieces up to and with this rank
    rank: jax.Array  # i32[B], of each request; B + P for the others
    num_requests: jax.Array  # i32[]
    num_pieces: jax.Array  # i32[]


def list_work(
    requests: Requests,
    window: jax.Array | None,
    block_size: int,
    *,
    piece_blocks: int,
    padding: int,
) -> WorkList:
    """Rank the requests of one row and count the pieces between their edges."""
    context = requests.context_lengths
    listed = (requests.query_lengths == 1) & (context > 0)
    last = jnp.maximum(context - 1, 0) // block_size
    first = jnp.zeros_like(last)
    if window is not None:
        listed &= window > 0
        first = jnp.maximum(context - window, 0) // block_size + 1
    counts = jnp.maximum(last - first + piece_blocks - 1, 0) // piece_blocks
    counts = jnp.where(listed, counts, 0)

    # Requests without pieces go last, or a trip would skip ranks.
    num_requests = context.shape[0]
    has_pieces = counts > 0
    long_rank = jnp.cumsum(has_pieces, dtype=jnp.int32)
    short_rank = long_rank[-1] + jnp.cumsum(listed & ~has_pieces, dtype=jnp.int32)
    rank = jnp.where(has_pieces, long_rank, short_rank) - 1
    size = num_requests + padding
    rank = jnp.where(listed, rank, size)
    request = jnp.zeros(size, jnp.int32)
    request = request.at[rank].set(
        jnp.arange(num_requests, dtype=jnp.int32), mode="drop", unique_indices=True
    )
    is_rank = jnp.arange(size, dtype=jnp.int32) < short_rank[-1]
    ends = jnp.cumsum(jnp.where(is_rank, counts[request], 0), dtype=jnp.int32)
    return WorkList(
        request=request,
        first=first[request],
        last=last[request],
        ends=ends,
        rank=rank,
        num_requests=short_rank[-1],
        num_pieces=ends[-1],
    )


def take(array: jax.Array, *index: jax.Array) -> jax.Array:
    """Return `array[*index]`; what is out of range is clamped, and below zero too.

    Plain indexing wraps and fills instead, which are four more operations each time.
    """
    return array.at[index].get(mode="clip", wrap_negative_indices=False)
