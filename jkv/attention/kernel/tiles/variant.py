"""Variants of the attention kernel, each a compilation of one body."""

import dataclasses
from typing import Any

import numpy as np

from jkv.attention.backend import Call
from jkv.attention.kernel.backend import Way
from jkv.attention.kernel.elements.formats import KERNEL_FORMATS, E4m3, KernelFormat
from jkv.attention.kernel.tiles.table import Backward, Techniques, Tile, Tuning
from jkv.attention.kernel.tiles.tuning import find_operand_dtype, find_weight_dtype

# The least rows of a tile of matrix instructions.
_MIN_ROWS = 16
# Most blocks in a tile of the derivative; their ids are scalars, selected by lane.
_MOST_JOINED = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """The compile-time parameters of the attention kernel, beside operand shapes."""

    is_decode: bool  # every row attends to its whole range; partial results
    tile: Tile
    row_tokens: int  # tokens (in decoding, lanes) with rows in one tile
    row_heads: int  # query heads of one kv head in a tile; rows = tokens * heads
    head_tiles: int  # tiles of all query heads, an axis of the grid
    value_dim: int
    operand_dtype: np.dtype[Any]  # of query-key products
    weight_dtype: np.dtype[Any]  # of weight-value products
    key_format: KernelFormat
    value_format: KernelFormat
    soft_cap: float | None
    num_parts: int  # of a block; the pools hold one of them
    way: Way
    # By position: tokens of a piece, and pieces of the longest context; else 0.
    piece_tokens: int = 0
    num_pieces: int = 0
    has_past: bool = False  # the work list limits the tokens of each row

    @property
    def interpret(self) -> bool:
        """True in interpret mode."""
        return self.way.interpret

    @property
    def has_words(self) -> bool:
        """True if one-byte elements are loaded as words of four."""
        formats, ways = (self.key_format, self.value_format), self.tile.ways
        if Techniques.WORDS not in ways or not any(each.has_bytes for each in formats):
            return False
        has_e4m3 = any(isinstance(each, E4m3) for each in formats)
        return Techniques.E4M3_WORDS in ways or not has_e4m3

    @property
    def keys_above(self) -> float:
        """The common offset of keys as operands.

        In tiles of few rows conversion dominates, so the offset is subtracted later.
        """
        return self.key_format.above(self.operand_dtype) if self.is_partial else 0.0

    @property
    def values_above(self) -> float:
        """The common offset of values as operands."""
        return self.value_format.above(self.weight_dtype) if self.is_partial else 0.0

    @property
    def is_partial(self) -> bool:
        """True if float32 partial results are written, to be joined."""
        return self.is_decode or self.num_pieces > 0


def decode_variant(call: Call, tuning: Tuning, num_lanes: int, *, way: Way) -> Variant:
    """Return the variant for one-row requests, some of which may share a tile."""
    row_heads = count_decode_heads(call.heads_per_kv, tuning) // num_lanes
    tile = tuning.decode_tile(call.soft_cap)
    variant = _make_variant(call, tile, row_heads, num_lanes, True, way)
    # Ranges end at their last visible token anyway.
    has_past = call.past is not None and call.past.first is not None
    return dataclasses.replace(variant, has_past=has_past)


def prefill_variant(call: Call, tuning: Tuning, *, way: Way) -> Variant:
    """Return the variant for requests of several rows."""
    row_heads, row_tokens = cut_rows(call.heads_per_kv, tuning.prefill)
    variant = _make_variant(call, tuning.prefill, row_heads, row_tokens, False, way)
    return dataclasses.replace(variant, has_past=call.past is not None)


def position_variant(
    call: Call, tuning: Tuning, piece_tokens: int, num_pieces: int, *, way: Way
) -> Variant:
    """Return the batch-invariant variant for all rows, in pieces by position."""
    tile = tuning.position_tile(call.soft_cap)
    row_heads, row_tokens = cut_rows(call.heads_per_kv, tile)
    variant = _make_variant(call, tile, row_heads, row_tokens, False, way)
    return dataclasses.replace(
        variant,
        piece_tokens=piece_tokens,
        num_pieces=num_pieces,
        has_past=call.past is not None,
    )


def query_variant(call: Call, tuning: Backward, *, way: Way) -> Variant:
    """Return the variant for the queries' gradient."""
    row_heads, row_tokens = cut_rows(call.heads_per_kv, tuning.queries)
    return _make_variant(call, tuning.queries, row_heads, row_tokens, False, way)


def token_variant(call: Call, tuning: Backward, *, way: Way) -> Variant:
    """Return the variant for the keys' and values' gradients.

    A tile of tokens is part of one block (the last tile may extend past it) or holds
    some small ones. Its rows are numbered consecutively instead of by heads and tokens.
    """
    tile, block_size = tuning.tokens, call.pools.block_size
    tokens = _pad(block_size) * count_joined(block_size, tuning)
    tokens = min(max(tokens, _MIN_ROWS), tile.tokens)
    tile = dataclasses.replace(tile, tokens=tokens)
    return _make_variant(call, tile, tile.rows, 1, False, way)


def count_joined(block_size: int, tuning: Backward) -> int:
    """Return the most blocks in a tile of tokens."""
    if block_size != _pad(block_size):
        return 1
    return min(max(tuning.tokens.tokens // block_size, 1), _MOST_JOINED)


def count_decode_heads(heads_per_kv: int, tuning: Tuning) -> int:
    """Return the query heads of a kv head in a decode tile."""
    # Padded to the least rows of matrix instructions.
    return max(_MIN_ROWS, min(_pad(heads_per_kv), tuning.decode.rows))


def count_lanes(heads_per_kv: int, tuning: Tuning) -> int:
    """Return the number of one-row requests with query heads that fill a tile."""
    row_heads = min(_pad(heads_per_kv), tuning.decode.rows)
    return count_decode_heads(heads_per_kv, tuning) // row_heads


def cut_rows(heads_per_kv: int, tile: Tile) -> tuple[int, int]:
    """Return the query heads of a kv head, and the tokens, that fill a tile."""
    row_heads = min(_pad(heads_per_kv), tile.rows)
    return row_heads, tile.rows // row_heads


def count_head_tiles(num_kv_heads: int, heads_per_kv: int, row_heads: int) -> int:
    """Return the number of tiles of `row_heads` query heads."""
    return num_kv_heads * -(-heads_per_kv // row_heads)


def count_decode_pieces(num_kv_heads: int, heads_per_kv: int, tuning: Tuning) -> int:
    """Return the number of pieces for the target number of programs."""
    row_heads = count_decode_heads(heads_per_kv, tuning)
    return -(
        -tuning.programs // count_head_tiles(num_kv_heads, heads_per_kv, row_heads)
    )


def _pad(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def _make_variant(
    call: Call,
    tile: Tile,
    row_heads: int,
    row_tokens: int,
    is_decode: bool,
    way: Way,
) -> Variant:
    return Variant(
        is_decode=is_decode,
        tile=tile,
        row_tokens=row_tokens,
        row_heads=row_heads,
        head_tiles=count_head_tiles(
            call.pools.num_kv_heads, call.heads_per_kv, row_heads
        ),
        value_dim=call.pools.value_dim,
        operand_dtype=find_operand_dtype(call.queries, call.pools),
        weight_dtype=find_weight_dtype(call.queries, call.pools),
        key_format=KERNEL_FORMATS[call.pools.formats.key].of(call.pools.head_dim),
        value_format=KERNEL_FORMATS[call.pools.formats.value].of(call.pools.value_dim),
        soft_cap=call.soft_cap,
        num_parts=call.num_parts,
        way=way,
    )
