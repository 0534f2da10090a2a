"""A whole tree in one call of the model: each token is a row, each segment a request.

No cache outlives the step, and a layer's keys and values are read by this layer alone.
So each group of layers has a pool for one layer at a time, gathered from the rows that
the model writes. It makes derivatives cheap: they flow from the pool to the rows, and
nothing the size of a whole cache is kept for them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.config.counts import WITHOUT_INDEX
from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.model.protocol import Model, call_model
from jkv.decoding.scoring.devices import Devices
from jkv.decoding.scoring.layout import Layout, count_blocks, lay_out
from jkv.decoding.scoring.one_layer import OneLayerAtATime
from jkv.decoding.scoring.sizes import size_blocks
from jkv.decoding.texts.text_tree import TextTree
from jkv.state import Batch, Cache
from jkv.status import Status
from jkv.verbs.attention_plan import plan_attention


def run_tree(
    model: Model,
    params: Any,
    config: GroupedConfig,  # of the model, whose layers all keep keys and values
    tree: TextTree,  # R rows
    asked_rows: jax.Array,  # i32[A], the rows whose logits are asked for; R for none
    devices: Devices,  # where keys and values lie
) -> tuple[jax.Array, Layout]:
    """Compute every row of a tree once.

    Returns:
      The logits, [A, V], and where the segments stand.
    """
    layout = lay_out(tree, config.block_size)
    cache = _make_pools(config, tree, layout, devices, params)
    batch = plan_attention(cache, _plan(cache, tree, layout, asked_rows))
    logits, _ = call_model(model, params, jnp.maximum(tree.tokens, 0), cache, batch)
    return logits, layout


def _make_pools(
    config: GroupedConfig, tree: TextTree, layout: Layout, devices: Devices, params: Any
) -> Cache:
    """Return a cache with the tables of a tree, and a layer's pool in each group."""
    num_blocks = count_blocks(tree.num_rows, tree.num_segments, config.block_size)
    sizes = size_blocks(tree, num_blocks)
    groups = tuple(dataclasses.replace(g, **sizes) for g in config.block_groups)
    whole = dataclasses.replace(config, groups=groups, **WITHOUT_INDEX)
    given = params, tree
    cache = devices.init(whole, given, storage=False)
    tables = layout.block_tables
    metadata = cache.metadata
    for number, group in enumerate(metadata.groups):
        group = dataclasses.replace(group, block_tables=tables)
        metadata = metadata.with_group(number, group)
    one_layer = [dataclasses.replace(group, num_layers=1) for group in groups]
    pools = [devices.init(group, given) for group in one_layer]
    return dataclasses.replace(
        cache,
        metadata=metadata,
        storage=tuple(pool.storage[0] for pool in pools),
        watcher=OneLayerAtATime(slot_rows=layout.slot_rows),
    )


def _plan(cache: Cache, tree: TextTree, layout: Layout, asked_rows: jax.Array) -> Batch:
    """Return the step: a request for each segment, whose sequence is its text."""
    number = jnp.arange(tree.num_segments, dtype=jnp.int32)
    lengths = layout.places.lengths[:-1]
    has_rows = lengths > 0
    return Batch(
        seq_ids=number,
        status=jnp.full(number.shape, Status.OK, jnp.int32),
        query_starts=jnp.where(has_rows, layout.places.first_rows[:-1], tree.num_rows),
        query_lengths=lengths,
        context_lengths=jnp.where(has_rows, layout.places.ends[:-1], 0),
        positions=layout.positions,
        valid=layout.is_token,
        offsets=jax.lax.rem(layout.positions, jnp.int32(cache.block_size)),
        blocks_of_groups=(layout.blocks,) * len(cache.metadata.groups),
        epochs=None,
        asked_rows=asked_rows,
        is_decoding=False,
        sizes=cache.sizes,
    )
