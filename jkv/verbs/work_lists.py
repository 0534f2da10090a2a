"""Lists for a kernel: what all layers of a planned step read, where there is a card."""

from typing import TypeVar

from jkv.attention.kernel.lists import WorkLists
from jkv.attention.kernel.planning import plan_work
from jkv.attention.pools import Pools
from jkv.sharding.heads import places_on_device
from jkv.state import Batch, Cache

AnyBatch = TypeVar("AnyBatch", bound=Batch)


def with_work_lists(cache: Cache, batch: AnyBatch) -> AnyBatch:
    """Return the plan with the lists of work that suit the card at hand, if any do.

    Args:
      cache: after the step was planned.
      batch: the plan; of each group, for a cache of groups.
    """
    pairs = zip(cache.groups, batch.groups, strict=True)
    return batch.with_work_lists(tuple(_plan_group(*pair) for pair in pairs))


def _plan_group(cache: Cache, batch: Batch) -> WorkLists | None:
    window, sharding = cache.metadata.window, cache.sharding
    num_parts = 1 if sharding is None else sharding.num_parts
    pools = Pools(
        keys=cache.keys,
        values=cache.values,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        value_dim=cache.value_head_dim,
        kv_dtype=cache.dtype,
    )
    return plan_work(
        pools,
        cache.metadata.block_tables,
        batch.seq_ids,
        batch.query_starts,
        batch.query_lengths,
        batch.context_lengths,
        num_rows=batch.num_rows,
        num_kv_heads=places_on_device(sharding, cache.keys.shape[2]),
        is_decoding=batch.is_decoding,
        window=None if window is None else window.length,
        part_size=cache.block_size // num_parts,
        num_parts=num_parts,
    )
