"""The work lists of the kernels' programs, made by `cutting.py`.

`B` requests, `W` entries, `R` rows.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

import jax

from jkv.attention.backend import Call

# The value of `implementation=`, and the key of `Call.plans`.
NAME = "pallas"


class Work(NamedTuple):
    """The work of each program: rows of one request over a range of its tokens.

    The range covers all calls of the step. A program clips it to its own window and to
    the local part of the blocks, using the position.
    """

    table: jax.Array  # i32[W], row of the block tables
    row: jax.Array  # i32[W], the first query row
    num_rows: jax.Array  # i32[W], 0 for no work
    position: jax.Array  # i32[W], of the first row
    first: jax.Array  # i32[W], first token of the range
    end: jax.Array  # i32[W], past its last token; at most `first` for no work


class Lanes(NamedTuple):
    """The rows of tiles that several one-row requests may share, by position.

    For calls without a window. Requests with equal leading table entries are processed
    together over the pieces that they share, in the first one's tile. Q rows per tile.
    """

    row: jax.Array  # i32[W, Q], query row
    position: jax.Array  # i32[W, Q], of the row
    first: jax.Array  # i32[W], first piece of the tile
    end: jax.Array  # i32[W, Q], past the last piece of the row in this tile


class SharedLanes(NamedTuple):
    """The rows of each entry of a decode list, with shared prefixes.

    Every row of a tile attends to its whole range, which ends where a row diverges. The
    partial results of a row are consecutive. Q rows per tile.
    """

    row: jax.Array  # i32[W, Q], query row
    place: jax.Array  # i32[W, Q], of its partial result; W * Q or more for no row


class Pieces(NamedTuple):
    """The range of partial results (of entries or lanes) of each row."""

    first: jax.Array  # i32[R]
    end: jax.Array  # i32[R], equal to `first` for rows of other requests


class DecodeSizes(NamedTuple):
    """The static sizes of a decode list; calls of one step may share a list."""

    num_rows: int  # R
    num_entries: int  # W
    least: int  # target number of pieces, even if they become short
    spare: int  # entries beyond one per request, without shared prefixes
    num_lanes: int  # Q, most requests of a tile; 1 for none
    is_windowed: bool  # tokens before the window are skipped


class PrefillSizes(NamedTuple):
    """The static sizes of a prefill list."""

    num_rows: int  # R
    num_entries: int  # W
    tile_rows: int  # rows of a tile


class PositionSizes(NamedTuple):
    """The static sizes of a list of pieces by position."""

    num_rows: int  # R
    num_tiles: int
    tile_rows: int  # rows of a tile
    piece_tokens: int  # pieces begin at multiples of it
    num_pieces: int  # of the longest context


ListSizes: TypeAlias = DecodeSizes | PrefillSizes | PositionSizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkList:
    """The work of a call's programs.

    Decoding: contexts of one-row requests, in pieces of similar length. Prefill: rows
    of all other requests, in tiles. By position: all rows in tiles, with one program
    for each piece of a tile's range.
    """

    work: Work
    # By position, row r has places from r * num_pieces on. None: no partial results.
    pieces: Pieces | None
    # None: all rows of a tile belong to one request.
    lanes: SharedLanes | Lanes | None
    sizes: ListSizes = dataclasses.field(metadata={"static": True})


def find_list(call: Call, sizes: ListSizes) -> WorkList | None:
    """Return the list of these sizes in the call's plan, if there is one."""
    lists: tuple[WorkList, ...] = call.plans.get(NAME, ())
    return next((one for one in lists if one.sizes == sizes), None)


NODES = WorkList, Work, Pieces, Lanes, SharedLanes
SIZES = DecodeSizes, PrefillSizes, PositionSizes
