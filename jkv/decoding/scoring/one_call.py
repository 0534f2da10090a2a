"""Scoring of a whole tree in one call: a row per token, a request per segment.

No cache outlives the step, and only the layer itself reads its keys and values. So each
group has a pool for one layer at a time, gathered from the rows the model writes.
Derivatives are cheap: they flow from the pool to the rows, and no residual is as large
as a whole cache.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.decoding.scoring.layout import Layout, lay_out
from jkv.decoding.scoring.scored import Scored, resize_for_tree
from jkv.decoding.sequences.trajectory_tree import TrajectoryTree
from jkv.masks import SpanMask
from jkv.metadata.requests import Integer
from jkv.sharding.storage_sharding import POOL, ROWS, divided, over_devices
from jkv.state import Batch, Cache, GroupLayer
from jkv.state.cache import Role
from jkv.state.entry import locate_layer
from jkv.status import Status, UsageError
from jkv.verbs.attending import plan_attention
from jkv.verbs.masking import with_mask
from jkv.verbs.writing import read_rows


def run_tree(
    scored: Scored,  # without recurrent-state layers
    tree: TrajectoryTree,  # R rows
    logit_rows: jax.Array,  # i32[A], rows to return logits of; R for none
    mask: SpanMask | None = None,  # of the R rows
    max_span: int | None = None,
) -> tuple[jax.Array, Layout]:
    """Compute every row of a tree once; return logits, [A, V], and the layout."""
    layout = lay_out(tree, scored.config.block_size)
    cache = _make_pools(scored, tree, layout)
    batch = _plan(cache, tree, layout, logit_rows)
    if mask is not None:
        batch = with_mask(batch, mask, max_span=max_span)
    batch = plan_attention(cache, batch)
    return scored.call(tree.tokens, cache, batch)[0], layout


def _make_pools(scored: Scored, tree: TrajectoryTree, layout: Layout) -> Cache:
    """Return a cache with the tables of a tree and a one-layer pool in each group."""
    whole = resize_for_tree(scored.config, tree)
    cache = scored.init(whole, tree, storage=False)
    metadata = cache.metadata
    for number, group in enumerate(metadata.groups):
        group = dataclasses.replace(group, block_tables=layout.block_tables)
        metadata = metadata.with_group(number, group)
    one_layer = [dataclasses.replace(g, num_layers=1) for g in whole.block_groups]
    pools = [scored.init(group, tree) for group in one_layer]
    return dataclasses.replace(
        cache,
        metadata=metadata,
        storage=tuple(pool.storage[0] for pool in pools),
        interceptor=OneLayerAtATime(slot_rows=layout.slot_rows),
    )


def _plan(
    cache: Cache, tree: TrajectoryTree, layout: Layout, logit_rows: jax.Array
) -> Batch:
    """Return a batch with a request for each segment and its sequence."""
    number = jnp.arange(tree.num_segments, dtype=jnp.int32)
    lengths = layout.table.lengths[:-1]
    has_rows = lengths > 0
    return Batch(
        seq_ids=number,
        status=jnp.full(number.shape, Status.OK, jnp.int32),
        query_starts=jnp.where(has_rows, layout.table.first_rows[:-1], tree.num_rows),
        query_lengths=lengths,
        context_lengths=jnp.where(has_rows, layout.table.ends[:-1], 0),
        positions=layout.positions,
        valid=layout.is_token,
        offsets=jax.lax.rem(layout.positions, jnp.int32(cache.block_size)),
        blocks_of_groups=(layout.blocks,) * len(cache.metadata.groups),
        epochs=None,
        logit_rows=logit_rows,
        is_decoding=False,
        sizes=cache.sizes,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OneLayerAtATime:
    """Run `write` and `attend` with the whole pool of a group for each layer.

    The model calls `write` and `attend` as usual, `observe` without effect, and no
    other verb.
    """

    slot_rows: jax.Array  # i32[N, T], the row in each slot, R for none

    def call(
        self,
        function: Callable[..., Any],
        cache: Cache,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        role: Role | None,
    ) -> Any:
        """Run `write` or `attend` as for the first layer of the group."""
        if role is Role.OBSERVES:
            return cache  # no prompt is pruned
        if role not in (Role.WRITES, Role.READS):
            raise UsageError(
                f"{function.__name__} is not supported in score, only write and attend"
            )
        args, kwargs = given
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments["layer"] = _find_first(cache, bound.arguments["layer"])
        if role is Role.WRITES:
            return self._write(**bound.arguments)
        return function(*bound.args, **bound.kwargs)

    def _write(self, cache: Cache, **given: Any) -> Cache:
        found, rows = read_rows(cache, **given)
        storage = cache.storage[found.group]
        stored = {
            name: array.astype(storage.arrays[name].dtype)
            for name, array in rows.items()
        }
        gather = over_devices(storage.sharding, _gather, _Gathered, POOL)
        arrays = gather(_Gathered(rows=stored, slot_rows=self.slot_rows))
        return cache.with_group_storage(found.group, storage.with_arrays(arrays))


def _find_first(cache: Cache, layer: Integer | GroupLayer) -> GroupLayer:
    if not isinstance(layer, GroupLayer):
        layer = locate_layer(cache, layer)
    return GroupLayer(layer.group, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Gathered:
    """Operands of a gather into a pool, and their sharding."""

    # Rows by the name of the group's array, [R, K, D].
    rows: dict[str, jax.Array] = dataclasses.field(metadata=divided(ROWS))
    slot_rows: jax.Array  # i32[N, T], the row in each slot


def _gather(operands: _Gathered) -> dict[str, jax.Array]:
    """Gather rows into a pool of one layer, [1, N, K, T, D]."""

    def gather(given: jax.Array) -> jax.Array:
        slots = jnp.take(given, operands.slot_rows, axis=0, mode="fill", fill_value=0)
        return jnp.moveaxis(slots, 2, 1)[None]

    return {name: gather(each) for name, each in operands.rows.items()}
