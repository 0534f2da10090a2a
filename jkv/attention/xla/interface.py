"""Plain XLA as two backends, the defaults without a kernel, and the sizes of its loops.

`decode.py` computes one-row requests, `tiles.py` everything else, in different sizes; a
loop without work makes no trip:

* Small calls, with contexts that fit into one trip of `decode.py`. All lanes proceed
  together, some columns of the block tables at a time, up to the longest context: this
  needs no work list, and a fifth of the operations to compile. A lane is a row, or a
  tile if requests have a few rows each, as in verifying draft tokens.
* Batch-invariant calls (`by_position`). Float sums depend on their order. With sizes
  independent of the step, all products have one shape in every step, and the result of
  a row depends on its own context only (`jkv.generate(exact=)`). On the need for fixed
  shapes: Horace He and Thinking Machines Lab, "Defeating Nondeterminism in LLM
  Inference", 2025.
* Prompts, one tile of many rows at a time, with the online softmax of FlashAttention
  (arXiv 2205.14135). Trip counts are traced: fully masked pieces are not read, and a
  call without prompts makes no trip.

Decoding is bound by reading the keys and values once. XLA cannot multiply scattered
blocks in place: it first copies a chunk of them into the cache. For 16 sequences of
1000 tokens (8 kv heads of 64, float32, JAX 0.10.2, two cores of an AMD EPYC) the copy
takes about 62% of the processor time, the two products 13%, and softmax, joining and
the dispatch of small operations 25%; a plain `jnp.sum` over as many bytes takes 35 to
45% of the total. With four query heads per kv head the products take about half.

Symbols as in `jkv.attention.xla.tiles`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jkv.attention.backend import (
    DEFAULT,
    Backend,
    Call,
    Cotangents,
    DeviceType,
    Gradients,
    Past,
    Pools,
    Requests,
    StepShape,
    call_of,
    check_call,
    find_gpu,
)
from jkv.attention.shared_prefixes import SharedPrefixes, find_shared_prefixes
from jkv.attention.xla.decode import attend_decode
from jkv.attention.xla.shared import FEWEST, NAME
from jkv.attention.xla.tiles import (
    MAX_LANES,
    TRIP_BYTES,
    Owners,
    Readers,
    RowTiles,
    attend_contexts,
    attend_tiles,
    cut_prompts,
    cut_rows,
    find_pieces,
    scale_queries,
)
from jkv.operations import fori_loop

# Bytes of float32 keys (or values) of a trip: fewer follow the contexts more closely,
# more amortize the cost of a trip.
_COLUMNS_BYTES = 2**18


# Rows of a tile: a step that verifies seven draft tokens fits in one.
_SMALL_TILE_ROWS = 8


# Batch-invariant: tokens of a piece, or one block if it has more.
_POSITION_TOKENS = 64


# Batch-invariant, rows of a tile: a single row costs the products of all of them.
_POSITION_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Xla(Backend):
    """Loops over gathered chunks of blocks."""

    name: ClassVar[str] = NAME
    default_platforms: ClassVar[tuple[str, ...]] = (DEFAULT,)
    is_by_position: ClassVar[bool] = True
    plan_nodes: ClassVar[tuple[type, ...]] = (SharedPrefixes,)

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Compute attention in loops over the contexts."""
        del device
        if call.by_position:
            return attend_by_head(call, attend_by_position)
        return attend_xla(call)

    def why_not_derived(self, call: Call, device: DeviceType) -> str | None:
        """Return None, as every call has a derivative."""
        del call, device
        return None

    def differentiate(
        self, call: Call, cotangents: Cotangents, device: DeviceType
    ) -> Gradients:
        """Recompute the weights in the same loops."""
        from jkv.attention.xla.gradients import differentiate_plainly

        del device
        return differentiate_plainly(call, cotangents)

    def plan(
        self,
        pools: Pools,
        requests: Requests,
        reference_counts: jax.Array,
        step: StepShape,
        past: Past | None,
    ) -> SharedPrefixes | None:
        """Find shared prefixes, if decoding loops of the step would use them."""
        most = min(step.num_rows, requests.seq_ids.shape[0])
        if most < FEWEST or step.by_position or step.window is not None:
            return None
        # GPU kernels do not use this plan.
        if step.num_parts > 1 or find_gpu() or _is_small(pools, requests, step):
            return None
        if past is not None:  # which may end before a shared prefix
            return None
        return find_shared_prefixes(
            requests, reference_counts, block_size=step.part_size, fewest=FEWEST
        )


@dataclasses.dataclass(frozen=True)
class SideBySide(Xla):
    """All contexts of a small call at once, with fewer operations to compile."""

    name: ClassVar[str] = "xla_small"
    is_by_position: ClassVar[bool] = False
    plan_nodes: ClassVar[tuple[type, ...]] = ()
    plan = Backend.plan

    def why_not(self, call: Call, device: DeviceType) -> str | None:
        """Return a reason unless all contexts fit into one trip."""
        del device
        return None if is_small(call) else "the contexts do not fit side by side"

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Compute attention over all contexts in one loop."""
        del device
        return attend_by_head(call, attend_side_by_side)


def attend_xla(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    return attend_by_head(call, _attend_requests)


def _attend_requests(call: Call, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute one-row requests piece by piece, others tile by tile."""
    output, lse = attend_decode(call, queries)
    if call.is_decoding:
        return output, lse
    return attend_prompts(call, queries, (output, lse))


def attend_by_head(
    call: Call, attend: Callable[[Call, jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Scale and group the queries, f32[R, K, G, D], and ungroup the results."""
    check_call(call)
    output, lse = attend(call, scale_queries(call))
    by_head = call.num_rows, call.num_heads
    output = output.reshape(*by_head, -1).astype(call.output_dtype)
    return output, lse.reshape(by_head)


def _is_small(pools: Pools, requests: Requests, step: StepShape) -> bool:
    """Return True if the calls of a step are small."""
    rows: Any = jax.ShapeDtypeStruct((step.num_rows, 1, pools.head_dim), jnp.float32)
    most = 1 if step.is_decoding else None
    call = call_of(rows, pools)
    call = dataclasses.replace(call, requests=requests, max_query_length=most)
    return is_small(call)


def is_small(call: Call) -> bool:
    """Return True if the contexts of all rows, or of all tiles, fit into one trip."""
    return _are_rows_small(call) or _are_tiles_small(call)


def attend_side_by_side(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Return f32[R, K, G, Dv] and f32[R, K, G] of a small call."""
    if _are_rows_small(call):
        width = _find_width(call, call.num_rows)
        return attend_contexts(call, queries, _locate_rows(call), width)
    # One lane per request: one trip suffices if no request has more rows than a tile.
    num_lanes, tiles = call.num_requests, cut_rows(call, _SMALL_TILE_ROWS)
    width = _find_width(call, num_lanes)
    return attend_tiles(queries, tiles, num_lanes=num_lanes, width=width)


def _are_rows_small(call: Call) -> bool:
    if max(call.num_rows, call.num_requests) > MAX_LANES:
        return False
    # Rows of one prompt gather the same blocks separately.
    most = TRIP_BYTES if call.is_decoding else TRIP_BYTES // 4
    return call.max_blocks * _column_bytes(call, call.num_rows) <= most


def _are_tiles_small(call: Call) -> bool:
    num_lanes = call.num_requests
    if num_lanes > MAX_LANES or call.num_rows > num_lanes * _SMALL_TILE_ROWS:
        return False
    return call.max_blocks * _column_bytes(call, num_lanes) <= TRIP_BYTES


def _column_bytes(call: Call, num_lanes: int) -> int:
    """Return the bytes of one block of each lane, in float32."""
    pools = call.pools
    token_bytes = 4 * pools.num_kv_heads * max(pools.head_dim, pools.value_dim)
    return num_lanes * pools.block_size * token_bytes


def _locate_rows(call: Call) -> Readers:
    """Return each row's request and token range, as tiles of one row."""
    requests, owners = call.requests, Owners.of(call)
    first = requests.context_lengths - requests.query_lengths
    position = owners.pick(first[None] + owners.rank + 1) - 1
    request = owners.pick(jnp.arange(call.num_requests, dtype=jnp.int32)[None])
    before = None
    if call.window is not None:
        before = call.find_held(position - call.window)[:, None]
    last = call.find_held(position)[:, None]
    if call.past is not None:
        last, before = call.past.limit(request, last, before)
    return Readers(request, last, before)


def _find_width(call: Call, num_lanes: int) -> int:
    """Return the columns of a trip, W."""
    width = max(1, _COLUMNS_BYTES // _column_bytes(call, num_lanes))
    return min(width, call.max_blocks)


def attend_by_position(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Compute batch-invariant attention, f32[R, K, G, Dv] and f32[R, K, G].

    Tiles are sorted by their number of pieces, so that the lanes of a trip have similar
    work.
    """
    pools, tiles = call.pools, cut_rows(call, _POSITION_ROWS)
    # Sizes independent of the step.
    width = max(1, _POSITION_TOKENS // pools.block_size)
    head_dim = max(queries.shape[3], pools.value_dim)
    piece_bytes = 4 * width * pools.block_size * pools.num_kv_heads * head_dim
    num_lanes = max(1, min(TRIP_BYTES // piece_bytes, MAX_LANES, tiles.most))
    order = _order_tiles(tiles, tiles.most_of_trips(num_lanes), width)
    return attend_tiles(queries, tiles, num_lanes=num_lanes, width=width, order=order)


def attend_prompts(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    # f32[R, K, G, Dv] and f32[R, K, G], with the rows of other requests
    results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Fill in the rows of requests with more than one row."""
    tiles, width = cut_prompts(call, min_rows=2)
    Results = tuple[jax.Array, jax.Array]

    def fill(index: jax.Array, results: Results) -> Results:
        tile, readers = tiles.locate_slice(index)
        rows = tile.take(queries)[None]
        output, lse = attend_contexts(call, rows, readers, width)
        return tile.put(results[0], output[0]), tile.put(results[1], lse[0])

    return fori_loop(jnp.int32(0), tiles.ends[-1], fill, results)


def _order_tiles(
    tiles: RowTiles, num_tiles: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Sort tiles by descending pieces; return order and inverse, i32[tiles] each."""
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    first, last = find_pieces(tiles.call, tiles.locate(index)[1], width)
    counts = last - first
    # Counting predecessors is cheaper than a sort for a few hundred tiles.
    is_before = (counts[None] > counts[:, None]) | (
        (counts[None] == counts[:, None]) & (index[None] < index[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return jnp.zeros_like(index).at[rank].set(index, unique_indices=True), rank
