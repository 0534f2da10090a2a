"""Attention plans: work shared by all layers of a step."""

import dataclasses
from typing import Any

from jkv.attention import choice
from jkv.attention.backend import StepShape
from jkv.attention.call import Past, Pools, Requests
from jkv.sharding.storage_sharding import heads_on_device
from jkv.state import Batch, BlockGroup, BlockStorage, Cache


def plan_attention(cache: Cache, batch: Batch) -> Batch:
    """Return the batch with the attention plan of each backend."""
    pairs = zip(cache.metadata.groups, cache.storage, strict=True)
    plans = tuple(
        _plan_group(group, storage, batch) if group.kind == "blocks" else {}
        for group, storage in pairs
    )
    return dataclasses.replace(batch, plan=plans if any(plans) else None)


def _plan_group(
    group: BlockGroup, storage: BlockStorage, batch: Batch
) -> dict[str, Any]:
    """Return the plan of one group's layers, by backend."""
    sharding = storage.sharding
    num_parts = 1 if sharding is None else sharding.num_parts
    step = StepShape(
        num_rows=batch.num_rows,
        is_decoding=batch.is_decoding,
        by_position=batch.by_position,
        num_kv_heads=heads_on_device(sharding, storage.key_pool.shape[2]),
        part_size=group.block_size // num_parts,
        num_parts=num_parts,
        window=group.window.length,
    )
    requests, past, mask = requests_of(group, batch), None, batch.mask
    if mask is not None and not mask.adds_later:
        if step.window is not None and (mask.is_tree or mask.has_one_window):
            return {}  # rows have windows of their own
        past = Past(mask.past)
    given = pools_of(storage), requests, group.reference_counts, step
    return choice.plan(*given, past)


def pools_of(storage: BlockStorage) -> Pools:
    """Return the pools of one group's layers, as the attention interface's `Pools`."""
    return Pools(
        keys=storage.key_pool,
        values=storage.value_pool,
        key_scales=storage.key_scales,
        value_scales=storage.value_scales,
        head_dim=storage.head_dim,
        value_dim=storage.value_head_dim,
        formats=storage.formats,
    )


def requests_of(group: BlockGroup, batch: Batch) -> Requests:
    """Return the requests of a step, as the attention interface's `Requests`."""
    lengths = batch.context_lengths
    if batch.mask is not None and batch.mask.reads_only:
        # The rows follow the cached tokens, and are not counted there.
        lengths = batch.mask.past + batch.query_lengths
    return Requests(
        block_tables=group.block_tables,
        seq_ids=batch.seq_ids,
        query_starts=batch.query_starts,
        query_lengths=batch.query_lengths,
        context_lengths=lengths,
    )
