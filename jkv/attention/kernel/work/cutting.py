"""The lists that a kernel's programs read, one entry per program.

A Pallas grid is static and its programs should be equally long, while requests differ
a hundredfold in length and change from step to step. So the number of entries is
static and their sizes are not. Decoding cuts all contexts into one flat list of pieces
of one length, chosen per call so that the pieces just fit the list: the schedule of
FlashInfer (arXiv 2501.01005) without its plan on the host. A rectangle of requests
times splits would either launch as many programs for a short request as for the
longest one possible, or leave the long one to a few programs.

Everything here is plain JAX on small integers: `B` requests, `W` entries, `R` rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Requests, find_held
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

# Pieces start at multiples of this many tokens (any tile divides it), and are no
# shorter than four: below that, starting a program costs as much as its reading.
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
) -> WorkList:
    """Return the list of these sizes; arguments as below."""
    parts = {"num_parts": num_parts, "part_size": part_size}
    if isinstance(sizes, PrefillSizes):
        return list_prefill_work(requests, sizes)
    if isinstance(sizes, PositionSizes):
        shared = shared if sizes.tile_rows > 1 else None
        return list_position_work(requests, sizes, **parts, shared=shared)
    shared = shared if sizes.num_lanes > 1 else None
    return list_decode_work(requests, window, sizes, **parts, shared=shared)


def size_decode_work(
    num_rows: int,  # R
    num_requests: int,  # B
    max_tokens: int,  # most tokens of one context
    wanted: int,  # pieces that keep the device busy
    *,
    num_lanes: int = 1,  # requests that may share a tile
    is_windowed: bool = False,  # whether what comes before a window is left out
) -> DecodeSizes:
    """Return the sizes of a list in which pieces of one length fit any contexts."""
    # n requests over p pieces' worth of tokens make at most n + p pieces. More of them
    # than keep the device busy would find no room, and a second turn for a few.
    most_listed = min(num_rows, num_requests)
    # A device with fewer waits for the loads of one piece after the other. Half of what
    # keeps it busy are, on AMD's cards, one for each SIMD.
    least = -(-wanted // 2)
    spare = max(wanted - most_listed, least)
    most_pieces = most_listed * -(-max_tokens // (_UNIT_TOKENS * _MIN_PIECE_UNITS))
    most_short = most_listed * -(-max_tokens // _UNIT_TOKENS)
    spare = min(spare, max(most_pieces, min(least, most_short)))
    # Each lane of a tile but the first may share something with the one before alone.
    most_shared = most_listed * (num_lanes - 1) // num_lanes
    num_entries = most_listed + max(spare, most_shared + min(spare, least))
    return DecodeSizes(num_rows, num_entries, least, spare, num_lanes, is_windowed)


def list_decode_work(
    requests: Requests,
    window: jax.Array | int | None,  # i32[], tokens that a row sees, None for all
    sizes: DecodeSizes,
    *,
    # parts of each block, of which the pools have any one; tokens are then counted as
    # the part has them that has most
    num_parts: int = 1,
    part_size: int = 1,  # tokens of a part of a block
    # what they have in common, without windows and of whole blocks; None where each
    # is read for itself
    shared: SharedPrefixes | None = None,
) -> WorkList:
    """Cut the contexts of all requests of one row into pieces of about equal length.

    What some of them share is cut once: they are lanes of its pieces.
    """
    last = requests.context_lengths - 1
    first, context = _find_contexts(last, window, num_parts, part_size)
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
    # Each row looks for its request: no scatter, whose target XLA would copy first.
    row = jnp.arange(sizes.num_rows, dtype=jnp.int32)[:, None]
    mine = listed[None, :] & (requests.query_starts[None, :] == row)
    both = [jnp.where(mine, n[None, :], 0) for n in (ends_of - num_pieces, ends_of)]
    first, end = (jnp.sum(n, 1, jnp.int32) for n in both)
    # A row that several requests name gets wrong numbers, but no piece past the list.
    end = jnp.minimum(end, sizes.num_entries * sizes.num_lanes)
    pieces = Pieces(first, end)
    return WorkList(work=work, pieces=pieces, lanes=lanes, sizes=sizes)


def _cut_evenly(
    read: Stretches, spare: jax.Array | int, least: int
) -> tuple[jax.Array, jax.Array]:
    """Return into how many pieces each stretch is cut, and their lengths, i32[n]."""
    units = (read.end + _UNIT_TOKENS - 1) // _UNIT_TOKENS - read.first // _UNIT_TOKENS
    units = jnp.where(read.end > read.first, units, 0)  # whose sums are below 2**31
    total = jnp.sum(units, dtype=jnp.int32)
    enough = jnp.clip(total // least, 1, _MIN_PIECE_UNITS)
    length = jnp.maximum((total + spare - 1) // spare, enough)
    counts = (units + length - 1) // length
    # The pieces of one stretch share its tokens evenly, which may take one less.
    length = jnp.maximum((units + counts - 1) // jnp.maximum(counts, 1), 1)
    return (units + length - 1) // length, length


def _find_contexts(
    last: jax.Array,  # i32[B]
    window: jax.Array | int | None,
    num_parts: int,
    part_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return what rows at positions see: the first token, i32[B], and past the last."""

    def find_in_part(positions: jax.Array, part: int) -> jax.Array:
        which = None if num_parts == 1 else jnp.int32(part)
        return find_held(positions, which, num_parts, part_size)

    # Of each block the first part fills first: it has most, and the last one least.
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
    min_rows: int = 2,  # of the requests that are listed
) -> PrefillSizes:
    """Return the sizes of a list that holds the tiles of any requests.

    Every request may end in a tile that is partly filled.
    """
    num_entries = num_rows // tile_rows + min(num_requests, num_rows // min_rows)
    return PrefillSizes(num_rows, num_entries, tile_rows)


def list_prefill_work(
    requests: Requests, sizes: PrefillSizes, *, min_rows: int = 2
) -> WorkList:
    """Cut the rows of all requests of at least `min_rows` into tiles."""
    work, _ = _list_tiles(requests, sizes.num_entries, sizes.tile_rows, min_rows)
    return WorkList(work=work, pieces=None, lanes=None, sizes=sizes)


def _list_tiles(
    requests: Requests, num_entries: int, tile_rows: int, min_rows: int
) -> tuple[Work, jax.Array]:
    """Cut the rows of all requests that have so many into tiles; whose each is."""
    lengths, context = requests.query_lengths, requests.context_lengths
    is_listed = lengths >= min_rows
    counts = jnp.where(is_listed, (lengths + tile_rows - 1) // tile_rows, 0)
    ends = running_sum(counts)

    entry = jnp.arange(num_entries, dtype=jnp.int32)
    request, index = _owners(ends, counts, entry)
    # The last rows of a request see most: their tiles come first.
    offset = (counts[request] - 1 - index) * tile_rows
    num_rows = jnp.minimum(lengths[request] - offset, tile_rows)
    position = context[request] - lengths[request] + offset
    end = position + num_rows
    alive = (entry < ends[-1]) & (end > 0)
    work = Work(
        table=jnp.where(alive, requests.seq_ids[request], 0),
        row=jnp.where(alive, requests.query_starts[request] + offset, 0),
        num_rows=jnp.where(alive, num_rows, 0),
        position=position,
        first=jnp.zeros_like(end),
        end=jnp.where(alive, end, 0),
    )
    return work, request


def size_position_work(
    num_rows: int,  # R
    num_requests: int,  # B
    max_tokens: int,  # most tokens of one context
    tile_rows: int,  # rows of a tile
    *,
    piece_tokens: int,  # a piece has no fewer
    max_pieces: int,  # a context has no more
) -> PositionSizes:
    """Return the sizes of a list of tiles whose contexts are cut at fixed positions.

    They follow from sizes that no step changes, and so do the pieces.
    """
    while piece_tokens * max_pieces < max_tokens:
        piece_tokens *= 2
    # Every request may end in a tile that is partly filled.
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
    # what requests of one row have in common, with whole blocks; None: nothing
    shared: SharedPrefixes | None = None,
) -> WorkList:
    """Cut the rows of all requests into tiles, single rows like those of chunks."""
    first_part = None if num_parts == 1 else jnp.int32(0)
    find_last = functools.partial(
        find_held, part=first_part, num_parts=num_parts, block_size=part_size
    )
    work, owner = _list_tiles(requests, sizes.num_tiles, sizes.tile_rows, 1)
    work = work._replace(end=find_last(work.end - 1) + 1)
    # Each row looks for its request, as in a list to decode.
    row = jnp.arange(sizes.num_rows, dtype=jnp.int32)[:, None]
    start, length = requests.query_starts[None, :], requests.query_lengths[None, :]
    mine = (start <= row) & (row < start + length)
    last = requests.context_lengths[None, :] - (start + length - row)
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
