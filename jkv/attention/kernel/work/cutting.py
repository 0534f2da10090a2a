"""Construction of the work lists, with one entry per program.

A Pallas grid is static and programs should be equally long, while requests vary a
hundredfold in length between requests and steps. So the number of entries is static and
their sizes are not. Decoding cuts all contexts into a flat list of pieces of one
length, chosen per call so that the pieces just fit the list: FlashInfer's schedule
(arXiv 2501.01005) without its plan on the host. A grid of requests times splits would
launch as many programs for short requests as for the longest possible one, or leave the
longest to a few programs.

All functions are plain JAX on small integers: `B` requests, `W` entries, `R` rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Past, Requests, find_held
from jkv.attention.kernel.work.lists import (
    DecodeSizes,
    ListSizes,
    Pieces,
    PositionSizes,
    PrefillSizes,
    Work,
    WorkList,
)
from jkv.attention.kernel.work.sharing import (
    Stretches,
    find_lanes,
    list_lanes,
    running_sum,
    share,
)
from jkv.attention.shared_prefixes import SharedPrefixes

# Pieces start at multiples of this many tokens (any tile divides it), and have at least
# four such units: starting a program costs as much as reading a shorter piece.
_UNIT_TOKENS = 64
_MIN_PIECE_UNITS = 4


def list_work(
    requests: Requests,
    sizes: ListSizes,
    window: jax.Array | int | None,
    *,
    num_parts: int,
    part_size: int,
    shared: SharedPrefixes | None = None,
    past: Past | None = None,
) -> WorkList:
    """List the work for the given sizes; see the functions below."""
    if isinstance(sizes, PrefillSizes):
        return list_prefill_work(requests, sizes, past=past)
    may_share = sizes.tile_rows if isinstance(sizes, PositionSizes) else sizes.num_lanes
    given: dict[str, Any] = {
        "num_parts": num_parts,
        "part_size": part_size,
        "shared": shared if may_share > 1 else None,
        "past": past,
    }
    if isinstance(sizes, PositionSizes):
        return list_position_work(requests, sizes, **given)
    return list_decode_work(requests, window, sizes, **given)


def size_decode_work(
    num_rows: int,  # R
    num_requests: int,  # B
    max_tokens: int,  # most tokens of one context
    wanted: int,  # number of pieces that keeps the device busy
    *,
    num_lanes: int = 1,  # requests that may share a tile
    is_windowed: bool = False,  # skip tokens before the window
) -> DecodeSizes:
    """Return the sizes of a list that fits pieces of any contexts."""
    # n requests in p pieces' worth of tokens make at most n + p pieces. More than keep
    # the device busy would need a second wave of a few programs.
    most_listed = min(num_rows, num_requests)
    # Fewer programs would wait for the loads of one piece after the other. Half of the
    # busy number is one per SIMD on AMD GPUs.
    least = -(-wanted // 2)
    spare = max(wanted - most_listed, least)
    most_pieces = most_listed * -(-max_tokens // (_UNIT_TOKENS * _MIN_PIECE_UNITS))
    most_short = most_listed * -(-max_tokens // _UNIT_TOKENS)
    spare = min(spare, max(most_pieces, min(least, most_short)))
    # Each lane but the first may share a stretch with the lane before only.
    most_shared = most_listed * (num_lanes - 1) // num_lanes
    num_entries = most_listed + max(spare, most_shared + min(spare, least))
    return DecodeSizes(num_rows, num_entries, least, spare, num_lanes, is_windowed)


def list_decode_work(
    requests: Requests,
    window: jax.Array | int | None,  # i32[]; None for full attention
    sizes: DecodeSizes,
    *,
    # parts of each block, one of which the pools hold; tokens are counted as in the
    # fullest part
    num_parts: int = 1,
    part_size: int = 1,  # tokens of a part of a block
    # shared prefixes in whole blocks, without windows; None to read each request
    # separately
    shared: SharedPrefixes | None = None,
    past: Past | None = None,  # without shared prefixes
) -> WorkList:
    """Cut the contexts of all one-row requests into pieces of similar length.

    A shared prefix is cut once, with its requests as lanes.
    """
    last = requests.context_lengths - 1
    first, context = _find_contexts(last, window, num_parts, part_size)
    if past is not None:
        first, context = _clip(past, None, first, context)
    listed = (requests.query_lengths == 1) & (context > 0)
    if window is not None:
        listed &= window > 0
    request = jnp.arange(context.shape[0], dtype=jnp.int32)
    read, runs = Stretches(request, first, jnp.where(listed, context, 0)), None
    spare: jax.Array | int = sizes.spare
    if shared is not None:
        unit, num_lanes = _UNIT_TOKENS, sizes.num_lanes
        read, runs = share(read, shared, num_lanes, block_size=part_size, unit=unit)
        num_read = jnp.sum(read.end > read.first, dtype=jnp.int32)
        spare = jnp.minimum(spare, sizes.num_entries - num_read)
    counts, length = _cut_evenly(read, spare, sizes.least)
    ends = running_sum(counts)

    entry = jnp.arange(sizes.num_entries, dtype=jnp.int32)
    which, index = _owners(ends, counts, entry)
    alive = entry < ends[-1]
    lanes, ends_of, num_pieces = None, ends, counts
    num_rows = alive.astype(jnp.int32)
    if runs is not None:
        given = requests, runs, counts, which, index
        lanes, ends_of, num_pieces = find_lanes(*given, sizes)
        num_rows *= runs.num_lanes[which]
    request, length = read.request[which], length[which]
    start = (read.first[which] // _UNIT_TOKENS + index * length) * _UNIT_TOKENS
    stop = jnp.minimum(start + length * _UNIT_TOKENS, read.end[which])
    start = jnp.maximum(start, read.first[which])
    work = Work(
        table=jnp.where(alive, requests.seq_ids[request], 0),
        row=jnp.where(alive, requests.query_starts[request], 0),
        num_rows=num_rows,
        position=last[request],
        first=jnp.where(alive, start, 0),
        end=jnp.where(alive, stop, 0),
    )
    # A comparison instead of a scatter, whose target XLA would copy first.
    row = jnp.arange(sizes.num_rows, dtype=jnp.int32)[:, None]
    mine = listed[None, :] & (requests.query_starts[None, :] == row)
    both = [jnp.where(mine, n[None, :], 0) for n in (ends_of - num_pieces, ends_of)]
    first, end = (jnp.sum(n, 1, jnp.int32) for n in both)
    # If several requests name a row its numbers are wrong, but in bounds.
    end = jnp.minimum(end, sizes.num_entries * sizes.num_lanes)
    pieces = Pieces(first, end)
    return WorkList(work=work, pieces=pieces, lanes=lanes, sizes=sizes)


def _cut_evenly(
    read: Stretches, spare: jax.Array | int, least: int
) -> tuple[jax.Array, jax.Array]:
    """Return the number of pieces of each stretch, and their lengths, i32[n]."""
    units = (read.end + _UNIT_TOKENS - 1) // _UNIT_TOKENS - read.first // _UNIT_TOKENS
    units = jnp.where(read.end > read.first, units, 0)  # the sum is below 2**31
    total = jnp.sum(units, dtype=jnp.int32)
    enough = jnp.clip(total // least, 1, _MIN_PIECE_UNITS)
    length = jnp.maximum((total + spare - 1) // spare, enough)
    counts = (units + length - 1) // length
    # Pieces of a stretch divide its tokens evenly, which may need one piece less.
    length = jnp.maximum((units + counts - 1) // jnp.maximum(counts, 1), 1)
    return (units + length - 1) // length, length


def _find_contexts(
    last: jax.Array,  # i32[B]
    window: jax.Array | int | None,
    num_parts: int,
    part_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the range of tokens visible at positions, i32[B] each."""

    def find_in_part(positions: jax.Array, part: int) -> jax.Array:
        which = None if num_parts == 1 else jnp.int32(part)
        return find_held(positions, which, num_parts, part_size)

    # A block's first part fills first: it has the most tokens, the last part the least.
    context = find_in_part(last, 0) + 1
    if window is None:
        return jnp.zeros_like(context), context
    before = find_in_part(last - jnp.maximum(window, 1), num_parts - 1)
    return jnp.maximum(before + 1, 0), context


def size_prefill_work(
    num_rows: int,  # R
    num_requests: int,  # B
    tile_rows: int,  # rows of a tile
    *,
    min_rows: int = 2,  # of listed requests
) -> PrefillSizes:
    """Return the sizes of a list that fits the tiles of any requests.

    The last tile of each request may be partly filled.
    """
    num_entries = num_rows // tile_rows + min(num_requests, num_rows // min_rows)
    return PrefillSizes(num_rows, num_entries, tile_rows)


def list_prefill_work(
    requests: Requests,
    sizes: PrefillSizes,
    *,
    min_rows: int = 2,
    past: Past | None = None,
) -> WorkList:
    """Cut the rows of all requests of at least `min_rows` into tiles."""
    work, _ = _list_tiles(requests, sizes.num_entries, sizes.tile_rows, min_rows, past)
    return WorkList(work=work, pieces=None, lanes=None, sizes=sizes)


def _list_tiles(
    requests: Requests,
    num_entries: int,
    tile_rows: int,
    min_rows: int,
    past: Past | None,
) -> tuple[Work, jax.Array]:
    """Cut requests of at least `min_rows` rows into tiles; also return the owners."""
    lengths, context = requests.query_lengths, requests.context_lengths
    is_listed = lengths >= min_rows
    counts = jnp.where(is_listed, (lengths + tile_rows - 1) // tile_rows, 0)
    ends = running_sum(counts)

    entry = jnp.arange(num_entries, dtype=jnp.int32)
    request, index = _owners(ends, counts, entry)
    # The last rows have the longest contexts, so their tiles come first.
    offset = (counts[request] - 1 - index) * tile_rows
    num_rows = jnp.minimum(lengths[request] - offset, tile_rows)
    position = context[request] - lengths[request] + offset
    first, end = jnp.zeros_like(position), position + num_rows
    if past is not None:
        first, end = _clip(past, request, first, end)
    alive = (entry < ends[-1]) & (end > 0)
    work = Work(
        table=jnp.where(alive, requests.seq_ids[request], 0),
        row=jnp.where(alive, requests.query_starts[request] + offset, 0),
        num_rows=jnp.where(alive, num_rows, 0),
        position=position,
        first=first,
        end=jnp.where(alive, end, 0),
    )
    return work, request


def _clip(
    past: Past,
    request: jax.Array | None,  # i32[W]; None if entry i is request i
    first: jax.Array,  # i32[W]
    end: jax.Array,  # i32[W]
) -> tuple[jax.Array, jax.Array]:
    """Clip ranges of tokens to the limits of their requests; empty ranges end at 0."""

    def of_entries(limits: jax.Array) -> jax.Array:
        return limits if request is None else limits[request]

    end = jnp.minimum(end, of_entries(past.end))
    if past.first is not None:
        first = jnp.maximum(first, of_entries(past.first))
    is_empty = first >= end
    return jnp.where(is_empty, 0, first), jnp.where(is_empty, 0, end)


def size_position_work(
    num_rows: int,  # R
    num_requests: int,  # B
    max_tokens: int,  # most tokens of one context
    tile_rows: int,  # rows of a tile
    *,
    piece_tokens: int,  # least tokens of a piece
    max_pieces: int,  # most pieces of a context
) -> PositionSizes:
    """Return the sizes of a list of tiles with contexts cut at fixed positions.

    They are independent of the requests of a step, and so are the pieces.
    """
    while piece_tokens * max_pieces < max_tokens:
        piece_tokens *= 2
    # The last tile of each request may be partly filled.
    most = (num_rows + num_requests * (tile_rows - 1)) // tile_rows
    return PositionSizes(
        num_rows=num_rows,
        num_tiles=min(num_rows, most),
        tile_rows=tile_rows,
        piece_tokens=piece_tokens,
        num_pieces=max(1, -(-max_tokens // piece_tokens)),
    )


def list_position_work(
    requests: Requests,
    sizes: PositionSizes,
    *,
    num_parts: int = 1,  # as above
    part_size: int = 1,
    # shared prefixes of one-row requests in whole blocks
    shared: SharedPrefixes | None = None,
    past: Past | None = None,  # without parts and shared prefixes
) -> WorkList:
    """Cut the rows of all requests into tiles, single rows like chunks."""
    first_part = None if num_parts == 1 else jnp.int32(0)
    find_last = functools.partial(
        find_held, part=first_part, num_parts=num_parts, block_size=part_size
    )
    work, owner = _list_tiles(requests, sizes.num_tiles, sizes.tile_rows, 1, past)
    work = work._replace(end=find_last(work.end - 1) + 1)
    # A comparison instead of a scatter, as in `list_decode_work`.
    row = jnp.arange(sizes.num_rows, dtype=jnp.int32)[:, None]
    start, length = requests.query_starts[None, :], requests.query_lengths[None, :]
    mine = (start <= row) & (row < start + length)
    last = requests.context_lengths[None, :] - (start + length - row)
    if past is not None:
        last = jnp.minimum(last, past.end[None, :] - 1)
    last = jnp.max(jnp.where(mine, last, -1), axis=1)
    size = sizes.piece_tokens
    counts = lax.div(find_last(last) + size, jnp.int32(size))
    place = row[:, 0] * sizes.num_pieces
    lanes = None
    if shared is not None:
        lanes = list_lanes(requests, work, owner, sizes, shared, part_size)
    pieces = Pieces(first=place, end=place + counts)
    return WorkList(work=work, pieces=pieces, lanes=lanes, sizes=sizes)


def _owners(
    ends: jax.Array,  # i32[B]
    counts: jax.Array,  # i32[B]
    entry: jax.Array,  # i32[W]
) -> tuple[jax.Array, jax.Array]:
    """Return each entry's request and its index among that request's entries."""
    request = jnp.sum(ends[None, :] <= entry[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, ends.shape[0] - 1)
    return request, entry - (ends - counts)[request]
