"""The decode list of a step, made once for all of its layers.

XLA moves nothing out of a loop on GPUs: a list that the calls of attention make inside
a `lax.scan` over layers is made in each of them, in seven launches. So `append` makes
one, for the card at hand and what calls mostly are: without a window, and the query
heads of a kv head in one tile. A call that is otherwise makes its own.
"""

import functools

import jax

from jkv.attention.call import make_requests
from jkv.attention.kernel.lists import DecodeSizes, DecodeWork
from jkv.attention.kernel.tuning import TABLE, find_family, find_target
from jkv.attention.kernel.work import list_decode_work, size_decode_work


def plan_decode_work(
    block_tables: jax.Array,  # i32[S, M]
    seq_ids: jax.Array,  # i32[B]
    query_starts: jax.Array,  # i32[B]
    query_lengths: jax.Array,  # i32[B]
    context_lengths: jax.Array,  # i32[B]
    *,
    num_rows: int,
    block_size: int,
    num_kv_heads: int,
    max_query_length: int | None,
) -> DecodeWork | None:
    """List what the rows of requests of one row read, for the card at hand.

    Args:
      block_tables: as for `paged_attention`, like the other arrays.
      seq_ids: as there.
      query_starts: as there.
      query_lengths: as there.
      context_lengths: as there.
      num_rows: of the step, R.
      block_size: tokens of a block, T.
      num_kv_heads: that a device has, K.
      max_query_length: as there.

    Returns:
      None where there is no card with a kernel, or nobody asks.
    """
    num_requests, max_blocks = len(seq_ids), block_tables.shape[1]
    programs = _find_programs()
    if programs is None or not num_rows or not num_requests:
        return None
    wanted = -(-programs // num_kv_heads)
    sizes = size_decode_work(num_rows, num_requests, max_blocks * block_size, wanted)
    return _list_work(
        block_tables,
        seq_ids,
        query_starts,
        query_lengths,
        context_lengths,
        sizes=sizes,
        block_size=block_size,
        max_query_length=max_query_length,
    )


@functools.partial(jax.jit, static_argnames=("sizes", "block_size", "max_query_length"))
def _list_work(
    *arrays: jax.Array,
    sizes: DecodeSizes,
    block_size: int,
    max_query_length: int | None,
) -> DecodeWork:
    requests = make_requests(
        *arrays,
        num_rows=sizes.num_rows,
        block_size=block_size,
        max_query_length=max_query_length,
    )
    return list_decode_work(requests, None, sizes)


def _find_programs() -> int | None:
    """Return how many programs keep the card at hand busy, None without one."""
    for platform in ("rocm", "cuda"):
        target = find_target(platform)
        family = None if target is None else find_family(platform, target)
        if family is not None:
            return TABLE[family].programs
    return None
