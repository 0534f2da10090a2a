"""Assignment of requests with a shared prefix to the lanes of tiles.

In the order of `SharedPrefixes`, requests with a shared prefix are adjacent. Such a run
is processed with the first one's table, in tiles of at most Q rows, as far as the
tables agree.

Symbols: `B` requests and places, `W` entries, `n` stretches, the first B of which are
the requests' own.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Requests
from jkv.attention.kernel.work.lists import (
    DecodeSizes,
    Lanes,
    PositionSizes,
    SharedLanes,
    Work,
)
from jkv.attention.shared_prefixes import SharedPrefixes

# Larger than any token.
_ALL = 2**31 - 1


class Stretches(NamedTuple):
    """Ranges of tokens that are read together, to be cut into pieces."""

    request: jax.Array  # i32[n], provides the table
    first: jax.Array  # i32[n]
    end: jax.Array  # i32[n], at most `first` if empty


class Runs(NamedTuple):
    """The adjacent places that read each stretch."""

    order: jax.Array  # i32[B], request of each place
    lead: jax.Array  # i32[n], the first place
    num_lanes: jax.Array  # i32[n]
    end: jax.Array  # i32[n], of the stretch; `_ALL` for a request's own


def share(
    own: Stretches,
    shared: SharedPrefixes,
    num_lanes: int,
    *,
    block_size: int,
    unit: int,
) -> tuple[Stretches, Runs]:
    """Split contexts into the requests' own stretches and shared ones, in this order.

    Shared stretches end at whole units where a lane diverges. All neighbours of a place
    up to one with less in common share as much as the place does with the one before,
    so there is at most one shared stretch per place.
    """
    order, (num_places,) = shared.order, shared.order.shape
    common = lax.div(shared.common * block_size, jnp.int32(unit))
    common = _cut_runs(common, num_lanes)
    place = jnp.arange(num_places, dtype=jnp.int32)
    before, behind = place[None] < place[:, None], place[None] > place[:, None]
    is_less, is_same = common[None] < common[:, None], common[None] == common[:, None]
    lead = jnp.max(jnp.where(before & (is_less | is_same), place[None], 0), axis=1)
    end = jnp.min(jnp.where(behind & is_less, place[None], num_places), axis=1)
    padded = jnp.pad(common, (0, 1))
    start = jnp.maximum(common[lead], padded[end])
    is_run = common[lead] < common  # else an earlier place has this stretch

    place_of = _invert(order)
    alone = jnp.maximum(common, padded[1:])[place_of]
    parts = (
        (own.request, order[lead]),
        (alone * unit, start * unit),
        (own.end, jnp.where(is_run, common * unit, 0)),
    )
    runs = Runs(
        order,
        lead=jnp.concatenate([place_of, lead]),
        num_lanes=jnp.concatenate([jnp.ones_like(lead), end - lead]),
        end=jnp.concatenate([jnp.full_like(lead, _ALL), common * unit]),
    )
    return Stretches(*map(jnp.concatenate, parts)), runs


def find_lanes(
    requests: Requests,
    runs: Runs,
    counts: jax.Array,  # i32[n], pieces of each stretch
    stretch: jax.Array,  # i32[W], of each entry
    index: jax.Array,  # i32[W], of its pieces
    sizes: DecodeSizes,
) -> tuple[SharedLanes, jax.Array, jax.Array]:
    """Return the lanes of each entry, and each request's end and count of pieces.

    The pieces of a request are numbered in the order of their tokens: pieces of shared
    stretches first, with ever fewer lanes. Ends and counts are i32[B].
    """
    num_requests = runs.order.shape[0]
    lead, num_lanes, end = (each[num_requests:][None] for each in runs[1:])
    mine = runs.lead[:, None]
    is_before = (lead <= mine) & (mine < lead + num_lanes) & (end < runs.end[:, None])
    before = jnp.where(is_before, counts[num_requests:][None], 0)
    before = jnp.sum(before, axis=1, dtype=jnp.int32)
    totals = (before + counts)[:num_requests]
    ends = running_sum(totals)

    lane = jnp.arange(sizes.num_lanes, dtype=jnp.int32)[None]
    place = jnp.minimum(runs.lead[stretch][:, None] + lane, num_requests - 1)
    request = runs.order[place]
    number = (ends - totals)[request] + (before[stretch] + index)[:, None]
    is_lane = lane < runs.num_lanes[stretch][:, None]
    most = sizes.num_entries * sizes.num_lanes
    lanes = SharedLanes(
        row=requests.query_starts[request],
        place=jnp.where(is_lane, number, most + lane),
    )
    return lanes, ends, totals


def list_lanes(
    requests: Requests,
    work: Work,
    owner: jax.Array,  # i32[W], request of each tile
    sizes: PositionSizes,
    shared: SharedPrefixes,
    block_size: int,
) -> Lanes:
    """Assign rows of requests with shared pieces to the tiles of other requests."""
    num_places, num_lanes = shared.order.shape[0], sizes.tile_rows
    common = lax.div(shared.common * block_size, jnp.int32(sizes.piece_tokens))
    common = _cut_runs(common, num_lanes)
    padded = jnp.pad(common, (0, num_lanes))
    along = [padded[lane : lane + num_places] for lane in range(1, num_lanes)]
    # End of the pieces that each of the next places shares, i32[B, Q].
    reach = jnp.stack([common, *itertools.accumulate(along, jnp.minimum)]).T
    lane = jnp.arange(num_lanes, dtype=jnp.int32)[None]
    place_of = _invert(shared.order)[owner]
    first = jnp.where(work.num_rows > 0, common[place_of], 0)
    goes_along = (lane > 0) & (reach[place_of] > first[:, None])
    goes_along &= (work.num_rows > 0)[:, None]
    which = shared.order[jnp.minimum(place_of[:, None] + lane, num_places - 1)]
    pieces = lax.div(work.end + (sizes.piece_tokens - 1), jnp.int32(sizes.piece_tokens))
    is_own = lane < work.num_rows[:, None]
    # Unused lanes get row numbers that are unique in the tile.
    own = jnp.where(is_own, work.row[:, None], sizes.num_rows) + lane

    def choose(others: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.where(goes_along, others, own)

    return Lanes(
        row=choose(requests.query_starts[which], own),
        position=choose(
            requests.context_lengths[which] - 1, work.position[:, None] + lane
        ),
        first=first,
        end=choose(reach[place_of], jnp.where(is_own, pieces[:, None], 0)),
    )


def _cut_runs(common: jax.Array, num_lanes: int) -> jax.Array:
    """Zero the common lengths so that runs have at most `num_lanes` places, i32[B]."""
    place = jnp.arange(common.shape[0], dtype=jnp.int32)
    begins = (common == 0)[None] & (place[None] <= place[:, None])
    start = jnp.max(jnp.where(begins, place[None], 0), axis=1)
    return jnp.where(lax.rem(place - start, jnp.int32(num_lanes)) == 0, 0, common)


# These functions minimize launches: a comparison of all pairs is one, a scan, scatter
# or search is several.
def _invert(order: jax.Array) -> jax.Array:
    """Return the place of each request, i32[B]."""
    place = jnp.arange(order.shape[0], dtype=jnp.int32)
    is_one = place[None] == order[:, None]
    return jnp.sum(jnp.where(is_one, place[:, None], 0), axis=0, dtype=jnp.int32)


def running_sum(counts: jax.Array) -> jax.Array:
    """Return inclusive running sums, i32[B]."""
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    before = index[None, :] <= index[:, None]
    return jnp.sum(jnp.where(before, counts[None, :], 0), 1, jnp.int32)
