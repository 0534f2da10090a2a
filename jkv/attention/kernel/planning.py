"""The lists of a step, made once for all of its layers.

XLA moves nothing out of a loop on GPUs: lists that the calls of attention make inside a
`lax.scan` over layers are made in each of them, in seven launches or more. So `append`
makes them, for the card at hand. What a call is cut into depends on its query heads,
which only the model knows, so there is a list for each number of them that models have;
what no call asks for, XLA leaves out. A call that is otherwise makes its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Requests, make_requests
from jkv.attention.elements import ONE_BYTE_DTYPES
from jkv.attention.kernel.lists import (
    DecodeSizes,
    PositionSizes,
    PrefillSizes,
    WorkLists,
)
from jkv.attention.kernel.table import Tuning
from jkv.attention.kernel.tuning import find_target, find_tuning
from jkv.attention.kernel.variant import (
    count_decode_heads,
    count_head_tiles,
    cut_prefill_rows,
    cut_rows,
)
from jkv.attention.kernel.work import (
    count_pieces,
    list_decode_work,
    list_position_work,
    list_prefill_work,
    size_decode_work,
    size_position_work,
    size_prefill_work,
)
from jkv.attention.pools import Pools

# Query heads of a kv head that models have, rounded up to powers of two; and those of
# latent caches, whose only kv head serves all or, on a mesh, some of them.
_HEADS_PER_KV, _LATENT_HEADS = (1, 2, 4, 8, 16), (8, 16, 32, 64, 128)


class _Sizes(NamedTuple):
    """Which lists a step may need. Static."""

    decode: tuple[DecodeSizes, ...]
    prefill: tuple[PrefillSizes, ...]
    by_position: tuple[PositionSizes, ...]


class DeviceShare(NamedTuple):
    """What one device has of a group of layers. Static."""

    num_kv_heads: int  # K
    part_size: int  # tokens of a block
    num_parts: int  # of a block, each on another device
    window: int | None  # tokens that a row sees in any call at most, None for all


def plan_work(
    pools: Pools,
    requests: Requests,
    *,
    num_rows: int,
    is_decoding: bool,
    by_position: bool,
    share: DeviceShare,
) -> WorkLists | None:
    """List what the programs of a step read, for the card at hand.

    Args:
      pools: of which only head dims and dtypes matter.
      requests: as `paged_attention` takes their arrays.
      num_rows: of the step, R.
      is_decoding: whether each request has one row at most.
      by_position: whether bits shall depend on a row's position alone.
      share: what the device has that the lists are for.

    Returns:
      None where there is no card with a kernel, or there are no requests.
    """
    num_requests, max_blocks = len(requests.seq_ids), requests.block_tables.shape[1]
    tuning = find_card_tuning(pools)
    if tuning is None or not num_rows or not num_requests:
        return None
    counts = _HEADS_PER_KV if pools.values is not None else _LATENT_HEADS
    decode, prefill, position = set(), set(), set()
    max_tokens = max_blocks * share.part_size
    for heads_per_kv in counts:
        if by_position:
            position.add(
                size_position_work(
                    num_rows,
                    num_requests,
                    max_tokens,
                    cut_rows(heads_per_kv, tuning.position_tile(None))[1],
                    piece_tokens=tuning.piece_tokens,
                    max_pieces=tuning.max_pieces,
                )
            )
            continue
        row_heads = count_decode_heads(heads_per_kv, tuning)
        head_tiles = count_head_tiles(share.num_kv_heads, heads_per_kv, row_heads)
        wanted = count_pieces(tuning.programs, head_tiles)
        decode.add(size_decode_work(num_rows, num_requests, max_tokens, wanted))
        if num_rows > 1 and not is_decoding:
            tile_rows = cut_prefill_rows(heads_per_kv, tuning)[1]
            prefill.add(size_prefill_work(num_rows, num_requests, tile_rows))
    return _list_work(
        requests,
        sizes=_Sizes(
            decode=tuple(sorted(decode)),
            prefill=tuple(sorted(prefill)),
            by_position=tuple(sorted(position)),
        ),
        num_rows=num_rows,
        share=share,
        max_query_length=1 if is_decoding else None,
    )


_STATIC = "sizes", "num_rows", "share", "max_query_length"


@functools.partial(jax.jit, static_argnames=_STATIC)
def _list_work(
    asked: Requests,
    *,
    sizes: _Sizes,
    num_rows: int,
    share: DeviceShare,
    max_query_length: int | None,
) -> WorkLists:
    requests = make_requests(
        asked,
        num_rows=num_rows,
        block_size=share.num_parts * share.part_size,
        max_query_length=max_query_length,
    )
    list_decode = functools.partial(
        list_decode_work,
        requests,
        share.window,
        num_parts=share.num_parts,
        part_size=share.part_size,
    )
    return WorkLists(
        decode=tuple(map(list_decode, sizes.decode)),
        prefill=tuple(list_prefill_work(requests, each) for each in sizes.prefill),
        by_position=tuple(
            list_position_work(
                requests, each, num_parts=share.num_parts, part_size=share.part_size
            )
            for each in sizes.by_position
        ),
    )


def find_card_tuning(pools: Pools) -> Tuning | None:
    """Return how calls are cut on the card at hand, None where no kernel serves them.

    Queries are taken to be what the pools hold, or bfloat16 where these are bytes.
    """
    (dtype,) = pools.dtypes
    dtype = jnp.dtype(jnp.bfloat16) if dtype in ONE_BYTE_DTYPES else dtype
    queries: Any = jax.ShapeDtypeStruct((1, 1, pools.keys.shape[4]), dtype)
    for platform in ("rocm", "cuda"):
        target = find_target(platform)
        if target is not None:
            return find_tuning(queries, pools, platform, target)
    return None
