"""Dense attention among the rows of a step, joined with attention over cached tokens.

Rows of a request are adjacent, so the product is a band: tiles of rows by the rows
nearby. Tiles without a visible row are skipped on CPUs; on accelerators all tiles are
one batched product. Tiles are cut within requests where all rows need one, and for
batch-invariant results; else from row 0 of the batch, which makes fewer of them.

Symbols: `P` tiles of `Q` rows, each by `W` rows; `R`, `K`, `G`, `D` as in
`jkv.attention.backend`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.choice import choose_platform
from jkv.attention.softmax import HIDDEN
from jkv.attention.xla.tiles import cap_scores, divide_up, multiply, set_broken_apart
from jkv.masks import StepMask
from jkv.operations import gather, vary_over, varying_axes

# More rows waste less of a band, fewer skip more of a step.
_TILE_ROWS = 64

Results = tuple[jax.Array, jax.Array]


class OwnRows(NamedTuple):
    """The rows of a step as queries, keys and values."""

    queries: jax.Array  # f32[R, K, G, D], scaled
    keys: jax.Array  # f32[R, K, D]
    values: jax.Array  # f32[R, K, Dv]
    positions: jax.Array  # i32[R]
    mask: StepMask


class _Options(NamedTuple):
    """The static description of a tile."""

    num_rows: int  # Q
    width: int  # W
    soft_cap: float | None


class _Tiles(NamedTuple):
    """Tiles of consecutive rows, each with a band of rows that they may attend to."""

    start: jax.Array  # i32[P], first row
    first: jax.Array  # i32[P], first row of the band
    place: jax.Array  # i32[R], index of each row among the rows of all tiles


def attend_own_rows(
    rows: OwnRows,
    query_starts: jax.Array,  # i32[B]
    query_lengths: jax.Array,  # i32[B]
    *,
    window: jax.Array | int | None,
    soft_cap: float | None,
    by_request: bool,
) -> Results:
    """Return f32[R, K, G, Dv] and the log-sum-exp f32[R, K, G].

    Args:
      rows: the rows.
      query_starts: first row of each request.
      query_lengths: number of rows of each request.
      window: sliding window over earlier rows, by the positions of both.
      soft_cap: as in `paged_attention`.
      by_request: cut tiles within requests, so that a row's result has the same bits
        wherever its request stands. Always so unless the mask only adds later rows.
    """
    mask, num_rows = rows.mask, rows.queries.shape[0]
    tile_rows, width = min(_TILE_ROWS, num_rows), mask.max_span
    if mask.adds_later:
        width += tile_rows
    else:
        tile_rows = min(tile_rows, width)
    options = _Options(tile_rows, width, soft_cap)
    if by_request or not mask.adds_later:
        tiles = _cut_requests(mask, tile_rows, query_starts, query_lengths)
    else:
        start = jnp.arange(-(-num_rows // tile_rows), dtype=jnp.int32) * tile_rows
        tiles = _Tiles(start, start, jnp.arange(num_rows, dtype=jnp.int32))
    given = _padded(rows, tile_rows + width), window, tiles.start, tiles.first
    found = choose_platform(
        *given,
        cpu=functools.partial(_attend_in_order, options=options),
        default=functools.partial(_attend_at_once, options=options),
    )
    output, lse = (x.reshape(-1, *x.shape[2:]) for x in found)
    return gather(output, tiles.place), gather(lse, tiles.place)


def _cut_requests(
    mask: StepMask,
    tile_rows: int,
    query_starts: jax.Array,
    query_lengths: jax.Array,
) -> _Tiles:
    """Cut the rows of each request into tiles."""
    num_rows, num_requests = mask.low.shape[0], query_starts.shape[0]
    most = (num_rows + num_requests * (tile_rows - 1)) // tile_rows
    counts = divide_up(query_lengths, tile_rows)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(most, dtype=jnp.int32)
    request = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
    begin = gather(query_starts, request)
    offset = (index - gather(ends - counts, request)) * tile_rows
    # Tiles past the last one begin past the rows, and attend to none.
    start = jnp.where(index < ends[-1], begin + offset, num_rows)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Tiles of a request are consecutive, so its rows are, too.
    place = gather(ends - counts, mask.request) * tile_rows + row - mask.first_row
    return _Tiles(start, start if mask.adds_later else begin, place)


def _padded(rows: OwnRows, count: int) -> OwnRows:
    """Append rows that attend to none and that none attends to, for whole bands."""

    def pad(array: jax.Array, value: int = 0) -> jax.Array:
        widths = [(0, count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=value)

    mask = rows.mask
    mask = dataclasses.replace(
        mask,
        low=pad(mask.low),
        high=pad(mask.high, -1),
        first_row=pad(mask.first_row),
        ancestors=None if mask.ancestors is None else pad(mask.ancestors),
        one_window=pad(mask.one_window),
    )
    queries, keys, values, positions = map(pad, rows[:4])
    return OwnRows(queries, keys, values, positions, mask)


def _attend_at_once(
    rows: OwnRows,
    window: jax.Array | None,
    start: jax.Array,  # i32[P]
    first: jax.Array,  # i32[P]
    *,
    options: _Options,
) -> Results:
    """Attend with all tiles in one batched product, f32[P, Q, K, G, ...]."""
    attend = functools.partial(_attend_tile, rows, window, options)
    return jax.vmap(attend)(start, first)


def _attend_in_order(
    rows: OwnRows,
    window: jax.Array | None,
    start: jax.Array,  # i32[P]
    first: jax.Array,  # i32[P]
    *,
    options: _Options,
) -> Results:
    """Attend tile after tile, and skip those without a visible row."""
    sees = rows.mask.high >= rows.mask.low

    def attend(at: tuple[jax.Array, jax.Array]) -> Results:
        work = functools.partial(_attend_tile, rows, window, options, *at)

        def skip() -> Results:
            shapes = jax.eval_shape(work)
            output = jnp.zeros(shapes[0].shape, jnp.float32)
            lse = jnp.full(shapes[1].shape, -jnp.inf, jnp.float32)
            return vary_over((output, lse), varying_axes((rows, window, start)))

        here = lax.dynamic_slice_in_dim(sees, at[0], options.num_rows)
        return lax.cond(here.any(), work, skip)

    return lax.map(attend, (start, first))


def _attend_tile(
    rows: OwnRows,
    window: jax.Array | None,
    options: _Options,
    start: jax.Array,  # i32[]
    first: jax.Array,  # i32[]
) -> Results:
    """Return f32[Q, K, G, Dv] and f32[Q, K, G] of one tile."""

    def of_tile(array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, start, options.num_rows)

    def of_band(array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, first, options.width)

    mask = rows.mask
    token = first + jnp.arange(options.width, dtype=jnp.int32)
    low, high, first_row, one_window = (
        of_tile(array)[:, None]
        for array in (mask.low, mask.high, mask.first_row, mask.one_window)
    )
    sees = (token[None] >= low) & (token[None] <= high)  # bool[Q, W]
    if mask.ancestors is not None:
        rank = jnp.clip(token[None] - first_row, 0, mask.max_span - 1)
        sees &= jnp.take_along_axis(of_tile(mask.ancestors), rank, axis=1)
    if window is not None and not mask.adds_later:
        position = of_tile(rows.positions)[:, None]
        sees &= one_window | (of_band(rows.positions)[None] > position - window)
    keys, marks = set_broken_apart(of_band(rows.keys), jnp.bool_(True))
    values, value_marks = set_broken_apart(of_band(rows.values), jnp.bool_(True))
    scores = multiply("qkgd,wkd->qkgw", of_tile(rows.queries), keys)
    scores = cap_scores(scores, options.soft_cap)
    scores += (marks + value_marks).T[None, :, None]
    seen = sees[:, None, None]
    scores = jnp.where(seen, scores, HIDDEN)
    sees_any = seen.any(axis=-1)
    # The shift cancels out, so it needs no derivative.
    shift = jnp.where(sees_any, lax.stop_gradient(scores.max(axis=-1)), 0.0)
    weights = jnp.exp(scores - shift[..., None])
    total = jnp.where(sees_any, weights.sum(axis=-1), 1.0)
    output = multiply("qkgw,wkd->qkgd", weights, values) / total[..., None]
    return output, jnp.where(sees_any, shift + jnp.log(total), -jnp.inf)


def join_results(
    one: Results,  # [R, H, Dv] and f32[R, H]
    other: Results,
    sinks: jax.Array | None,  # f32[H], counted once, here
) -> Results:
    """Join attention over two disjoint sets of tokens by their log-sum-exp, f32."""
    lses = [one[1], other[1]]
    sees = ~(jnp.isneginf(lses[0]) & jnp.isneginf(lses[1]))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None]
        lses.append(jnp.broadcast_to(sinks, lses[0].shape))
    # The shift cancels out, so it needs no derivative.
    shift = lax.stop_gradient(jnp.maximum(lses[0], lses[1]))
    if sinks is not None:
        shift = jnp.maximum(shift, lax.stop_gradient(sinks))
    shift = jnp.where(sees, shift, 0.0)
    # exp(-inf) has a NaN derivative; an empty set has the weight 0 like a hidden score.
    weights = [jnp.exp(jnp.where(jnp.isneginf(x), HIDDEN, x) - shift) for x in lses]
    total = jnp.where(sees, sum(weights[1:], weights[0]), 1.0)

    def share(output: jax.Array, weight: jax.Array) -> jax.Array:
        # A weight of NaN passes on; a result without weight may hold anything.
        output = jnp.where(weight[..., None] == 0, 0.0, output.astype(jnp.float32))
        return (weight / total)[..., None] * output

    output = share(one[0], weights[0]) + share(other[0], weights[1])
    output = jnp.where(sees[..., None], output, 0.0)
    return output, jnp.where(sees, shift + jnp.log(total), -jnp.inf)
