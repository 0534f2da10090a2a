"""page_table: a step's plan in the layout of other libraries' paged ops."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.operations import gather, scatter
from jkv.state import Batch, Cache, Metadata
from jkv.state.entry import check_batch, takes_cache
from jkv.verbs.lookups import group_of, row_of


class PageTable(NamedTuple):
    """The plan of a step as FlashInfer's and AITER's paged ops take it.

    A page is a block. Request i reads the pages
    `indices[indptr[i]:indptr[i + 1]]`, the last of them up to `last_page_lens[i]`
    tokens, and owns the rows `query_indptr[i]` to `query_indptr[i + 1]`.
    """

    query_indptr: jax.Array  # i32[B + 1], first row of each request, then R at most
    indptr: jax.Array  # i32[B + 1], first page of each request in `indices`
    indices: jax.Array  # i32[B * M], blocks in the order of tokens; 0 past the end
    last_page_lens: jax.Array  # i32[B], 1 to T; 0 for a request without tokens
    slot_mapping: jax.Array  # i32[R], block * T + offset; -1 for a row to skip


@takes_cache()
def page_table(cache: Cache, batch: Batch, *, group: int | None = None) -> PageTable:
    """Return the block tables of a step in the layout of other paged ops.

    A pool of one layer, `cache.storage[group].key_pool[layer]`, has the shape
    [N, K, T, D]: pages in the layout that FlashInfer calls HND. Sequences that share
    blocks name the same pages.

    Blocks released by a sliding window are left out. The pages then hold the last
    tokens of a sequence, which suits ops that count a window from the end, but not
    ops that need positions, and not a window with sinks.

    Args:
      cache: the cache that `append` returned.
      batch: the plan from `append`.
      group: index of the group of layers; optional if there is only one.

    Returns:
      A `PageTable` of static shapes; jit compatible. A refused request keeps its rows,
      and the pages from before the step: ignore the op's result there.

    Raises:
      ValueError: if the batch belongs to a cache of other sizes.
      UsageError: if `group` is missing and there are several, or it does not exist.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=32)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, [17, 3], capacity=20)
      >>> pages = jkv.page_table(cache, batch)
      >>> pages.indptr.tolist(), pages.indices.tolist()
      ([0, 2, 3], [0, 1, 2, 0])
      >>> pages.last_page_lens.tolist(), pages.slot_mapping[-4:].tolist()
      ([1, 3], [16, 32, 33, 34])
    """
    number = group_of(cache, group, "page_table")
    check_batch(cache, batch)
    return _page_table(cache.metadata, batch, number=number)


@functools.partial(jax.jit, static_argnames="number")
def _page_table(metadata: Metadata, batch: Batch, *, number: int) -> PageTable:
    group = metadata.groups[number]
    lengths, size = batch.context_lengths, jnp.int32(group.block_size)
    rows = row_of(metadata, batch.seq_ids)
    blocks = gather(group.block_tables, rows, fill=group.num_blocks)  # [B, M]
    column = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    is_read = (column * size < lengths[:, None]) & (blocks < group.num_blocks)
    place = jnp.cumsum(is_read, dtype=jnp.int32).reshape(is_read.shape) - 1
    place = jnp.where(is_read, place, blocks.size)
    indices = scatter(jnp.zeros(blocks.size, jnp.int32), place, blocks)
    ends = jnp.cumsum(jnp.sum(is_read, axis=1, dtype=jnp.int32), dtype=jnp.int32)
    last_row = batch.query_starts[-1:] + batch.query_lengths[-1:]
    starts = jnp.concatenate([batch.query_starts, last_row])
    slots = batch.slots_of(number)
    return PageTable(
        query_indptr=jnp.minimum(starts, batch.num_rows),
        indptr=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        indices=indices,
        last_page_lens=jnp.where(lengths > 0, (lengths - 1) % size + 1, 0),
        slot_mapping=jnp.where(
            batch.valid, slots.block_ids * size + slots.offsets, jnp.int32(-1)
        ),
    )
