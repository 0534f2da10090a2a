"""The lists that a kernel's programs read; `cutting.py` makes them.

`B` requests, `W` entries, `R` rows.
"""

import dataclasses
from typing import NamedTuple

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeWork:
    """The contexts of all requests of one row in pieces of about equal length."""

    work: Work
    pieces: Pieces
    lanes: SharedLanes | None  # None: each request is read for itself
    sizes: DecodeSizes = dataclasses.field(metadata={"static": True})
    # Whether tokens before a window are left out: for calls with no larger one.
    is_windowed: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillWork:
    """The rows of all requests of several rows in tiles."""

    work: Work
    sizes: PrefillSizes = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PositionWork:
    """All rows in tiles, and which pieces of its context each row is joined from."""

    work: Work  # of tiles: a program finds its piece of the range by itself
    pieces: Pieces  # row r has places r * num_pieces and the following ones
    lanes: Lanes | None  # None: all rows of a tile are of one request
    sizes: PositionSizes = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkLists:
    """The lists of a step for all that its calls may be cut into.

    How many query heads there are only a call knows. What no call asks for the compiler
    leaves out.
    """

    decode: tuple[DecodeWork, ...]
    prefill: tuple[PrefillWork, ...]
    # Instead of both, where bits depend on a row's position alone.
    by_position: tuple[PositionWork, ...] = ()

    def find_decode(self, sizes: DecodeSizes, has_window: bool) -> DecodeWork | None:
        """Return the decode list that suits a call, None if there is none."""
        suit = [each for each in self.decode if has_window or not each.is_windowed]
        return next((one for one in suit if one.sizes == sizes), None)

    def find_prefill(self, sizes: PrefillSizes) -> PrefillWork | None:
        """Return the prefill list that suits a call, None if there is none."""
        return next((one for one in self.prefill if one.sizes == sizes), None)

    def find_by_position(self, sizes: PositionSizes) -> PositionWork | None:
        """Return the list by position that suits a call, None if there is none."""
        return next((one for one in self.by_position if one.sizes == sizes), None)


def lists_of(call: Call) -> WorkLists:
    """Return what was listed when the call's step was planned, if anything was."""
    listed: WorkLists = call.plans.get(NAME, WorkLists(decode=(), prefill=()))
    return listed


NODES = (
    *(WorkLists, DecodeWork, PrefillWork, PositionWork),
    *(Work, Pieces, Lanes, SharedLanes),
)
SIZES = DecodeSizes, PrefillSizes, PositionSizes
