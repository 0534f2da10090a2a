"""The flat list of what decoding reads: requests by rank, pieces between their edges.

Symbols: `B` requests, `P` lanes of a trip.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Requests
from jkv.attention.xla.operations import divide_up, gather, quotient


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
    requests: Requests,  # of the call; those of several rows are not listed
    window: jax.Array | None,  # i32[] or i32[B], tokens that a row sees, None for all
    block_size: int,  # T
    *,
    # i32[B], leading columns of each that are not listed, with no window; None: none
    skip: jax.Array | None,
    piece_blocks: int,  # blocks of a piece
    padding: int,  # P
) -> WorkList:
    """Rank the requests of one row and count the pieces between their edges."""
    context = requests.context_lengths
    listed = (requests.query_lengths == 1) & (context > 0)
    last = quotient(jnp.maximum(context - 1, 0), block_size)
    first = jnp.zeros_like(last) if skip is None else skip
    if window is not None:
        listed &= window > 0
        first = quotient(jnp.maximum(context - window, 0), block_size) + 1
    counts = divide_up(jnp.maximum(last - first, 0), piece_blocks)
    counts = jnp.where(listed, counts, 0)

    # Requests without pieces go last, or a trip would skip ranks.
    has_pieces = counts > 0
    is_long, is_short = (
        mask.astype(jnp.int32) for mask in (has_pieces, listed & ~has_pieces)
    )
    each = jnp.stack([is_long, is_short, counts])
    num_long, num_short, num_pieces = jnp.cumsum(each, axis=1, dtype=jnp.int32)
    num_requests = num_long[-1] + num_short[-1]
    rank = jnp.where(has_pieces, num_long, num_long[-1] + num_short) - 1
    size = context.shape[0] + padding
    rank = jnp.where(listed, rank, size)
    request = jnp.zeros(size, jnp.int32)
    request = request.at[rank].set(
        jnp.arange(context.shape[0], dtype=jnp.int32), mode="drop", unique_indices=True
    )
    # Ranks follow the order of the requests as long as these have pieces.
    ranks = jnp.arange(size, dtype=jnp.int32)
    return WorkList(
        request=request,
        first=gather(first, request),
        last=gather(last, request),
        ends=jnp.where(
            ranks < num_long[-1], gather(num_pieces, request), num_pieces[-1]
        ),
        rank=rank,
        num_requests=num_requests,
        num_pieces=num_pieces[-1],
    )
