"""The lists that a kernel's programs read; `cutting.py` makes them.

`B` requests, `W` entries, `R` rows.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

import jax

from jkv.attention.call import Call

# What `implementation=` calls the kernel, and a step's plan its lists.
NAME = "pallas"


class Work(NamedTuple):
    """What each program does: some rows of one request over a range of its tokens.

    The range holds what the rows see in any call of the step. What a window or the part
    of the blocks at hand leaves of it, a program finds by itself, from the position.
    """

    table: jax.Array  # i32[W], row of the block tables
    row: jax.Array  # i32[W], the first query row
    num_rows: jax.Array  # i32[W], 0 for nothing to do
    position: jax.Array  # i32[W], of the token that the first row stands for
    first: jax.Array  # i32[W], first token that any of the rows sees
    end: jax.Array  # i32[W], past the last one; at most `first` for nothing to do


class Lanes(NamedTuple):
    """Which rows stand in tiles, where those of several requests may share one.

    For calls without a window; for others the tiles are as without.

    Of requests of one row those whose tables begin alike go together through the pieces
    that they have in common, in the tile of the first of them. Q rows of a tile.
    """

    row: jax.Array  # i32[W, Q], query row
    position: jax.Array  # i32[W, Q], of the token that it stands for
    first: jax.Array  # i32[W], the first piece that the tile is taken to
    end: jax.Array  # i32[W, Q], past the last piece that it is taken to for the row


class SharedLanes(NamedTuple):
    """The rows of each entry of a decode list whose tiles requests may share.

    Rows of a tile see all tokens of its range: it is cut where one leaves. The results
    of a row have places one after the other. Q rows of a tile.
    """

    row: jax.Array  # i32[W, Q], query row
    place: jax.Array  # i32[W, Q], of its partial result; W * Q or more for no row


class Pieces(NamedTuple):
    """Which partial results, those of entries or of their lanes, each row has."""

    first: jax.Array  # i32[R]
    end: jax.Array  # i32[R], equal to `first` for rows of other requests


class DecodeSizes(NamedTuple):
    """What a decode list is made for; two calls of one step may share one of a size."""

    num_rows: int  # R
    num_entries: int  # W
    least: int  # pieces that there shall be, if need be short ones
    spare: int  # entries beside one for each request, where nothing is shared
    num_lanes: int  # Q, requests that may share a tile; 1 for none
    is_windowed: bool  # whether it leaves out what comes before a window


class PrefillSizes(NamedTuple):
    """What a prefill list is made for, likewise."""

    num_rows: int  # R
    num_entries: int  # W
    tile_rows: int  # rows of a tile


class PositionSizes(NamedTuple):
    """What a list of pieces by position is made for, likewise."""

    num_rows: int  # R
    num_tiles: int
    tile_rows: int  # rows of a tile
    piece_tokens: int  # pieces begin at multiples of so many tokens
    num_pieces: int  # that the longest context has


ListSizes: TypeAlias = DecodeSizes | PrefillSizes | PositionSizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkList:
    """What the programs of a call do, by one kind of list.

    Decoding, the contexts of all requests of one row in pieces of about equal length;
    prefill, the rows of all requests of several rows in tiles; by position all rows in
    tiles, of which a program finds its piece of the range by itself.
    """

    work: Work
    # Row r has by position places r * num_pieces and the following ones. None: whole.
    pieces: Pieces | None
    # None: all rows of a tile are of one request.
    lanes: SharedLanes | Lanes | None
    sizes: ListSizes = dataclasses.field(metadata={"static": True})


def find_list(call: Call, sizes: ListSizes) -> WorkList | None:
    """Return what was listed of a size when the call's step was planned, if it was."""
    lists: tuple[WorkList, ...] = call.plans.get(NAME, ())
    return next((one for one in lists if one.sizes == sizes), None)


NODES = WorkList, Work, Pieces, Lanes, SharedLanes
SIZES = DecodeSizes, PrefillSizes, PositionSizes
