"""The work lists of a step, computed once for all layers.

XLA does not hoist code out of loops on GPUs: lists made inside a `lax.scan` over layers
would take seven launches or more in each layer. So `append` makes them for the local
GPU. Tiles depend on the number of query heads, which only the model has, so there is a
list for each common number; XLA removes unused ones. Other calls make their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jkv.attention.backend import (
    Past,
    Pools,
    Requests,
    StepShape,
    find_gpu,
    make_requests,
)
from jkv.attention.kernel.elements.formats import KERNEL_FORMATS
from jkv.attention.kernel.tiles.table import Tuning
from jkv.attention.kernel.tiles.tuning import find_tuning
from jkv.attention.kernel.tiles.variant import (
    count_decode_pieces,
    count_lanes,
    cut_rows,
)
from jkv.attention.kernel.work.cutting import (
    list_work,
    size_decode_work,
    size_position_work,
    size_prefill_work,
)
from jkv.attention.kernel.work.lists import ListSizes, WorkList
from jkv.attention.shared_prefixes import find_shared_prefixes

# Common numbers of query heads per kv head, rounded up to powers of two; and for latent
# caches, with a single kv head for all query heads (or a device's share of them).
_HEADS_PER_KV, _LATENT_HEADS = (1, 2, 4, 8, 16), (8, 16, 32, 64, 128)


def plan_work(
    pools: Pools,
    requests: Requests,
    reference_counts: jax.Array,
    step: StepShape,
    past: Past | None,
) -> tuple[WorkList, ...] | None:
    """List the work of a step for the local GPU.

    None without a supported GPU, or without requests.
    """
    num_rows = step.num_rows
    num_requests, max_blocks = len(requests.seq_ids), requests.block_tables.shape[1]
    tuning = find_local_tuning(pools)
    if tuning is None or not num_rows or not num_requests:
        return None
    counts = _HEADS_PER_KV if pools.values is not None else _LATENT_HEADS
    sizes: set[ListSizes] = set()
    max_tokens = max_blocks * step.part_size
    is_windowed = step.window is not None
    has_shared = past is None and _may_share(step)
    for heads_per_kv in counts:
        if step.by_position:
            sizes.add(
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
        wanted = count_decode_pieces(step.num_kv_heads, heads_per_kv, tuning)
        size = functools.partial(
            size_decode_work, num_rows, num_requests, max_tokens, wanted
        )
        sizes.add(size(is_windowed=is_windowed))
        if has_shared:
            sizes.add(size(num_lanes=count_lanes(heads_per_kv, tuning)))
        if num_rows > 1 and not step.is_decoding:
            tile_rows = cut_rows(heads_per_kv, tuning.prefill)[1]
            sizes.add(size_prefill_work(num_rows, num_requests, tile_rows))
    given = requests, reference_counts, past
    return _list_all(*given, sizes=tuple(sorted(sizes)), step=step)


@functools.partial(jax.jit, static_argnames=("sizes", "step"))
def _list_all(
    given: Requests,
    reference_counts: jax.Array,
    past: Past | None,
    *,
    sizes: tuple[ListSizes, ...],
    step: StepShape,
) -> tuple[WorkList, ...]:
    requests = make_requests(
        given,
        num_rows=step.num_rows,
        block_size=step.num_parts * step.part_size,
        max_query_length=1 if step.is_decoding else None,
    )
    shared = None
    if past is None and _may_share(step):
        shared = find_shared_prefixes(
            requests, reference_counts, block_size=step.part_size, has_branches=False
        )
    parts = {"num_parts": step.num_parts, "part_size": step.part_size}
    lists = tuple(
        list_work(requests, each, step.window, **parts, shared=shared, past=past)
        for each in sizes
    )
    # XLA counts a pool again for each in-place update, assumes that memory is full, and
    # would recompute the lists in each layer without a barrier.
    kept: tuple[WorkList, ...] = jax.lax.optimization_barrier(lists)
    return kept


def _may_share(step: StepShape) -> bool:
    """True if tiles of a step may have rows of several requests."""
    return step.num_parts == 1 and step.window is None and step.num_rows > 1


def find_local_tuning(pools: Pools) -> Tuning | None:
    """Return the tuning for the local GPU, None if no kernel supports the pools.

    Queries are assumed to have the dtype of the pools, or bfloat16 for quantized ones.
    """
    if not {*pools.formats} <= KERNEL_FORMATS.keys():
        return None
    dtypes = {dtype for dtype in pools.dtypes if dtype.itemsize > 1}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.bfloat16)
    queries: Any = jax.ShapeDtypeStruct((1, 1, pools.head_dim), dtype)
    device = find_gpu()
    return None if device is None else find_tuning(queries, pools, *device)
