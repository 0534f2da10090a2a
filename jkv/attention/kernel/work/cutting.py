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

from jkv.attention.call import Requests
from jkv.attention.kernel.work.lists import (
    DecodeSizes,
    DecodeWork,
    Lanes,
    Pieces,
    PositionSizes,
    PositionWork,
    PrefillSizes,
    PrefillWork,
    Work,
)
from jkv.attention.parts import find_held
from jkv.attention.shared_prefixes import SharedPrefixes

# Pieces start at multiples of this many tokens (any tile divides it), and are no
# shorter than four: below that, starting a program costs as much as its reading.
_UNIT_TOKENS = 64


_MIN_PIECE_UNITS = 4


def count_least(wanted: int) -> int:
    """Return how many pieces there shall be at the least, if need be short ones.

    A device with fewer waits for the loads of one piece after the other. Half of what
    keeps it busy are, on AMD's cards, one for each SIMD.

    Args:
      wanted: pieces that keep the device busy.
    """
    return -(-wanted // 2)


def count_pieces(programs: int, head_tiles: int) -> int:
    """Return the pieces that make so many programs, one for each head tile."""
    return -(-programs // head_tiles)


def size_decode_work(
    num_rows: int, num_requests: int, max_tokens: int, wanted: int
) -> DecodeSizes:
    """Return the sizes of a list in which pieces of one length fit any contexts.

    Args:
      num_rows: R.
      num_requests: B.
      max_tokens: most tokens of one context.
      wanted: pieces that keep the device busy.
    """
    # n requests over p pieces' worth of tokens make at most n + p pieces. More of them
    # than keep the device busy would find no room, and a second turn for a few.
    most_listed = min(num_rows, num_requests)
    least = count_least(wanted)
    spare = max(wanted - most_listed, least)
    most_pieces = most_listed * -(-max_tokens // (_UNIT_TOKENS * _MIN_PIECE_UNITS))
    most_short = most_listed * -(-max_tokens // _UNIT_TOKENS)
    num_entries = most_listed + min(spare, max(most_pieces, min(least, most_short)))
    return DecodeSizes(num_rows, num_entries, least)


def list_decode_work(
    requests: Requests,
    window: jax.Array | int | None,  # i32[]
    sizes: DecodeSizes,
    *,
    num_parts: int = 1,
    part_size: int = 1,
) -> DecodeWork:
    """Cut the contexts of all requests of one row into pieces of about equal length.

    Args:
      requests: B of them.
      window: tokens that a row sees at most, if not all.
      sizes: of the list.
      num_parts: parts of each block, of which the pools have any one; tokens are then
        counted as the part has them that has most.
      part_size: tokens of a part of a block.
    """
    num_rows, num_entries, least = sizes
    last = requests.context_lengths - 1
    first, context = _find_contexts(last, window, num_parts, part_size)
    listed = (requests.query_lengths == 1) & (context > 0)
    if window is not None:
        listed &= window > 0
    first_unit = first // _UNIT_TOKENS
    units = (context + _UNIT_TOKENS - 1) // _UNIT_TOKENS - first_unit
    units = jnp.where(listed, units, 0)  # sums of units stay far below 2**31

    num_listed = min(num_rows, context.shape[0])
    spare = max(num_entries - num_listed, 1)
    total = jnp.sum(units, dtype=jnp.int32)
    enough = jnp.clip(total // least, 1, _MIN_PIECE_UNITS)
    length = jnp.maximum((total + spare - 1) // spare, enough)
    counts = (units + length - 1) // length
    # The pieces of one request share its tokens evenly, which may take one less.
    length = jnp.maximum((units + counts - 1) // jnp.maximum(counts, 1), 1)
    counts = (units + length - 1) // length
    ends = _running_sum(counts)

    entry = jnp.arange(num_entries, dtype=jnp.int32)
    request, index = _owners(ends, counts, entry)
    length = length[request]
    start = (first_unit[request] + index * length) * _UNIT_TOKENS
    stop = jnp.minimum(start + length * _UNIT_TOKENS, context[request])
    start = jnp.maximum(start, first[request])
    alive = entry < ends[-1]
    work = Work(
        table=jnp.where(alive, requests.seq_ids[request], 0),
        row=jnp.where(alive, requests.query_starts[request], 0),
        num_rows=alive.astype(jnp.int32),
        position=last[request],
        first=jnp.where(alive, start, 0),
        end=jnp.where(alive, stop, 0),
    )
    # Each row looks for its request: no scatter, whose target XLA would copy first.
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    mine = listed[None, :] & (requests.query_starts[None, :] == row)
    pieces = Pieces(
        first=jnp.sum(jnp.where(mine, (ends - counts)[None, :], 0), 1, jnp.int32),
        end=jnp.sum(jnp.where(mine, ends[None, :], 0), 1, jnp.int32),
    )
    # A row that several requests name gets wrong numbers, but no piece past the list.
    pieces = pieces._replace(end=jnp.minimum(pieces.end, num_entries))
    return DecodeWork(
        work=work, pieces=pieces, sizes=sizes, is_windowed=window is not None
    )


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
    num_rows: int, num_requests: int, tile_rows: int, *, min_rows: int = 2
) -> PrefillSizes:
    """Return the sizes of a list that holds the tiles of any requests.

    Every request may end in a tile that is partly filled.

    Args:
      num_rows: R.
      num_requests: B.
      tile_rows: rows of a tile.
      min_rows: of the requests that are listed.
    """
    num_entries = num_rows // tile_rows + min(num_requests, num_rows // min_rows)
    return PrefillSizes(num_rows, num_entries, tile_rows)


def list_prefill_work(
    requests: Requests, sizes: PrefillSizes, *, min_rows: int = 2
) -> PrefillWork:
    """Cut the rows of all requests of at least `min_rows` into tiles.

    Args:
      requests: B of them.
      sizes: of the list.
      min_rows: as the sizes are made for.
    """
    work, _ = _list_tiles(requests, sizes.num_entries, sizes.tile_rows, min_rows)
    return PrefillWork(work=work, sizes=sizes)


def _list_tiles(
    requests: Requests, num_entries: int, tile_rows: int, min_rows: int
) -> tuple[Work, jax.Array]:
    """Cut the rows of all requests that have so many into tiles; whose each is."""
    lengths, context = requests.query_lengths, requests.context_lengths
    is_listed = lengths >= min_rows
    counts = jnp.where(is_listed, (lengths + tile_rows - 1) // tile_rows, 0)
    ends = _running_sum(counts)

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
    num_rows: int,
    num_requests: int,
    max_tokens: int,
    tile_rows: int,
    *,
    piece_tokens: int,
    max_pieces: int,
) -> PositionSizes:
    """Return the sizes of a list of tiles whose contexts are cut at fixed positions.

    They follow from sizes that no step changes, and so do the pieces.

    Args:
      num_rows: R.
      num_requests: B.
      max_tokens: most tokens of one context.
      tile_rows: rows of a tile.
      piece_tokens: a piece has no fewer.
      max_pieces: a context has no more.
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
    num_parts: int = 1,
    part_size: int = 1,
    shared: SharedPrefixes | None = None,
) -> PositionWork:
    """Cut the rows of all requests into tiles, single rows like those of chunks.

    Args:
      requests: B of them.
      sizes: of the list.
      num_parts: parts of each block, of which the pools have any one; tokens are then
        counted as the part has them that has most.
      part_size: tokens of a part of a block.
      shared: what requests of one row have in common, with whole blocks; None: nothing.
    """
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
        lanes = _list_lanes(requests, work, owner, sizes, shared, part_size)
    return PositionWork(
        work=work,
        pieces=Pieces(first=place, end=place + counts),
        lanes=lanes,
        sizes=sizes,
    )


def _list_lanes(
    requests: Requests,
    work: Work,
    owner: jax.Array,  # i32[W], request of each tile
    sizes: PositionSizes,
    shared: SharedPrefixes,
    block_size: int,
) -> Lanes:
    """Put rows of requests that share pieces into the tiles of others."""
    num_places, num_lanes = shared.order.shape[0], sizes.tile_rows
    place = jnp.arange(num_places, dtype=jnp.int32)
    common = lax.div(shared.common * block_size, jnp.int32(sizes.piece_tokens))
    # Of those that have something in common one in so many begins a tile of its own.
    begins = (common == 0)[None] & (place[None] <= place[:, None])
    start = jnp.max(jnp.where(begins, place[None], 0), axis=1)
    is_cut = lax.rem(place - start, jnp.int32(num_lanes)) == 0
    common = jnp.where(is_cut, 0, common)
    padded = jnp.pad(common, (0, num_lanes))
    along = [padded[lane : lane + num_places] for lane in range(1, num_lanes)]
    # Past the last piece that each of the next places goes along with one, i32[B, Q].
    reach = jnp.stack(
        [
            common,
            *(functools.reduce(jnp.minimum, along[:n]) for n in range(1, num_lanes)),
        ]
    ).T
    lane = jnp.arange(num_lanes, dtype=jnp.int32)[None]
    is_one = place[None] == shared.order[:, None]  # [place, request]
    place_of = jnp.sum(jnp.where(is_one, place[:, None], 0), axis=0)[owner]
    first = jnp.where(work.num_rows > 0, common[place_of], 0)
    goes_along = (lane > 0) & (reach[place_of] > first[:, None])
    goes_along &= (work.num_rows > 0)[:, None]
    which = shared.order[jnp.minimum(place_of[:, None] + lane, num_places - 1)]
    pieces = lax.div(work.end + (sizes.piece_tokens - 1), jnp.int32(sizes.piece_tokens))
    is_own = lane < work.num_rows[:, None]
    # Rows that nobody owns have numbers that no other row of the tile has.
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


# What these lists cost is launches: a comparison of all with all is one, a scan or a
# search is several.
def _running_sum(counts: jax.Array) -> jax.Array:
    """Return the sums up to and with each entry, i32[B]."""
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    before = index[None, :] <= index[:, None]
    return jnp.sum(jnp.where(before, counts[None, :], 0), 1, jnp.int32)


def _owners(
    ends: jax.Array,  # i32[B]
    counts: jax.Array,  # i32[B]
    entry: jax.Array,  # i32[W]
) -> tuple[jax.Array, jax.Array]:
    """Return each entry's request and its index among that request's entries."""
    request = jnp.sum(ends[None, :] <= entry[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, ends.shape[0] - 1)
    return request, entry - (ends - counts)[request]
