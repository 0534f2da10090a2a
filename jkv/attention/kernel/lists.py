"""The lists that a kernel's programs read; `work.py` makes them.

`B` requests, `W` entries, `R` rows.
"""

import dataclasses
from typing import NamedTuple

import jax


class Work(NamedTuple):
    """What each program does: some rows of one request over a range of its tokens."""

    table: jax.Array  # i32[W], row of the block tables
    row: jax.Array  # i32[W], the first query row
    num_rows: jax.Array  # i32[W], 0 for nothing to do
    position: jax.Array  # i32[W], of the token that the first row stands for
    first: jax.Array  # i32[W], first token that any of the rows sees
    end: jax.Array  # i32[W], past the last one; at most `first` for nothing to do


class Pieces(NamedTuple):
    """Which entries of the decode list belong to which row."""

    first: jax.Array  # i32[R]
    end: jax.Array  # i32[R], equal to `first` for rows of other requests


class DecodeSizes(NamedTuple):
    """What a decode list is made for; two calls of one step may share one of a size."""

    num_rows: int  # R
    num_entries: int  # W
    least: int  # pieces that there shall be, if need be short ones


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeWork:
    """The contexts of all requests of one row in pieces of about equal length."""

    work: Work
    pieces: Pieces
    sizes: DecodeSizes = dataclasses.field(metadata={"static": True})
