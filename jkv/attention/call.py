"""Who asks: the integer arrays that say which rows attend to which tokens.

Symbols: `S` rows of the block tables, `M` blocks per row, `B` requests, `R` query rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Requests(NamedTuple):
    """The requests of one call. Padding has query length 0 and names sequence 0.

    Request i owns rows `query_starts[i] .. query_starts[i] + query_lengths[i] - 1`; its
    last row is the token at position `context_lengths[i] - 1`: a context length counts
    the tokens that the rows themselves stand for.
    """

    block_tables: jax.Array  # i32[S, M], entries past a sequence's end may be anything
    seq_ids: jax.Array  # i32[B], rows of block_tables
    query_starts: jax.Array  # i32[B]
    query_lengths: jax.Array  # i32[B]
    context_lengths: jax.Array  # i32[B]


class Constants(NamedTuple):
    """What a call is compiled for, beside shapes and dtypes."""

    soft_cap: float | None
    max_query_length: int | None  # no request has more rows; 1 is decoding

    @property
    def is_decoding(self) -> bool:
        """Whether requests of several rows are known not to occur."""
        return self.max_query_length == 1


def make_requests(
    block_tables: jax.Array,  # int[S, M]
    seq_ids: jax.Array | None,  # int[B]
    query_starts: jax.Array,  # int[B]
    query_lengths: jax.Array,  # int[B]
    context_lengths: jax.Array,  # int[B]
    *,
    num_rows: int,
    block_size: int,
    max_query_length: int | None,
) -> Requests:
    """Bring the arrays to i32 and everything out of range to padding."""
    block_tables, query_starts, query_lengths, context_lengths = (
        jnp.asarray(array).astype(jnp.int32)
        for array in (block_tables, query_starts, query_lengths, context_lengths)
    )
    num_sequences, max_blocks = block_tables.shape
    if seq_ids is None:
        seq_ids = jnp.arange(query_starts.shape[0], dtype=jnp.int32)
    seq_ids = jnp.asarray(seq_ids).astype(jnp.int32)

    is_live = (seq_ids >= 0) & (seq_ids < num_sequences)
    is_live &= (query_starts >= 0) & (query_starts < num_rows)
    # Bounding each length first keeps every later sum far below 2**31.
    rows_left = jnp.maximum(num_rows - query_starts, 0)
    if max_query_length is not None:
        rows_left = jnp.minimum(rows_left, max_query_length)
    query_lengths = jnp.where(is_live, jnp.clip(query_lengths, 0, rows_left), 0)
    context_lengths = jnp.clip(context_lengths, 0, max_blocks * block_size)
    return Requests(
        block_tables=block_tables,
        seq_ids=jnp.where(is_live, seq_ids, 0),
        query_starts=jnp.where(is_live, query_starts, num_rows),
        query_lengths=query_lengths,
        context_lengths=context_lengths,
    )
