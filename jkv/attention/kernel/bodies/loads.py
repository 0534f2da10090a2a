"""Loads of the attention kernel: rows of queries and tiles of tokens.

Tokens are clamped into the visible range, so unwritten slots are never loaded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.elements.conversion import BFLOAT16, FLOAT32, WORD, bitcast
from jkv.attention.kernel.elements.formats import KernelFormat
from jkv.attention.kernel.elements.sections import Section, cut
from jkv.attention.kernel.tiles.table import Techniques
from jkv.attention.kernel.tiles.variant import Variant
from jkv.attention.kernel.work.lists import Lanes, SharedLanes, Work

# Most blocks of a tile for loading their ids as scalars.
_MOST_BLOCKS = 4


class Operands(NamedTuple):
    """The operands of the attention kernel: refs inside it, arrays outside."""

    work: Work  # i32[W] each
    lanes: Lanes | SharedLanes | None
    layer: jax.Array  # i32[1]
    scale: jax.Array  # f32[1]
    window: jax.Array | None  # i32[1]
    part: jax.Array | None  # i32[1], of each block; None for whole blocks
    sinks: jax.Array | None  # f32[H], unless rows are joined from pieces
    block_tables: jax.Array  # i32[S, M]
    queries: jax.Array  # [R, H, D]
    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of the keys
    # Both may be i32[..., D / 4]: words of four elements of one byte.
    key_scales: jax.Array | None  # [L, N, K, T], as in `Pools`
    value_scales: jax.Array | None


class Range(NamedTuple):
    """The tokens of a program, as scalars."""

    layer: jax.Array
    table: jax.Array  # row of the block tables
    kv_head: jax.Array
    first: jax.Array  # first token to load
    end: jax.Array  # past the last one


class TokenTile(NamedTuple):
    """Consecutive tokens of one kv head, encoded as in the pool or as operands."""

    # [tokens, size] for each section of the key head dim, or i32[tokens, size / 4]
    keys: list[jax.Array]
    values: list[jax.Array]  # likewise of the value head dim; empty if part of the keys
    key_scales: jax.Array | None  # [tokens], u16 or f32
    value_scales: jax.Array | None


def cut_head_dims(
    queries: jax.Array,  # [R, H, D]
    values: jax.Array | None,
    variant: Variant,
) -> tuple[list[Section], list[Section]]:
    """Return the sections of keys and values; latent values are leading key columns."""
    head_dim, max_size = queries.shape[2], variant.tile.section

    def cut_all(kept: KernelFormat, width: int) -> list[Section]:
        return kept.spread(cut(width // kept.parts, max_size=max_size), width)

    value_sections = cut_all(variant.value_format, variant.value_dim)
    if values is not None:
        return cut_all(variant.key_format, head_dim), value_sections
    if head_dim == variant.value_dim:
        return value_sections, value_sections
    rest = cut(head_dim - variant.value_dim, variant.value_dim, max_size)
    return value_sections + rest, value_sections


def load_rows(
    rows: jax.Array,  # [R, H, D]
    row: jax.Array,  # i32[rows]
    head: jax.Array,  # i32[rows]
    valid: jax.Array,  # bool[rows]
    section: Section,
    dtype: np.dtype[Any],
) -> jax.Array:
    """Load one section of rows, zeros where invalid or repeated."""
    num_rows, num_heads, _ = rows.shape
    row, head = clamp_index(row, num_rows), clamp_index(head, num_heads)
    where = (row[:, None], head[:, None], section.columns)
    tile = backend.load_masked(rows, where, section.over(valid))
    return tile.astype(dtype)


def load_numbers(
    numbers: jax.Array,  # f32[R, H]
    row: jax.Array,  # i32[rows]
    head: jax.Array,  # i32[rows]
    valid: jax.Array,  # bool[rows]
) -> jax.Array:
    """Load one number per row, zeros where invalid."""
    num_rows, num_heads = numbers.shape
    where = clamp_index(row, num_rows), clamp_index(head, num_heads)
    return backend.load_masked(numbers, where, valid)


def find_nan(
    rows: jax.Array,  # [R, H, D]
    row: jax.Array,  # i32[rows]
    head: jax.Array,  # i32[rows]
    valid: jax.Array,  # bool[rows]
) -> jax.Array:
    """Return True for rows whose first column is NaN, bool[rows]."""
    num_rows, num_heads, _ = rows.shape
    row, head = clamp_index(row, num_rows), clamp_index(head, num_heads)
    number = backend.load_masked(rows, (row, head, jnp.zeros_like(row)), valid)
    return number != number


def load_tokens(
    o: Operands,
    tokens: Range,
    start: jax.Array,  # i32[], a multiple of the tile
    key_sections: list[Section],
    value_sections: list[Section],
    variant: Variant,
    *,
    is_whole: bool = False,
) -> TokenTile:
    """Load the tile of tokens at `start`; arbitrary tokens for an empty range.

    A tile that lies completely in the range (`is_whole`) is not clamped, so that the
    compiler can vectorize the loads of adjacent scales. A carried tile stays encoded,
    in fewer registers; otherwise each part is converted when it is loaded.
    """
    num_blocks, block_size = o.keys.shape[1], o.keys.shape[3]
    tile_tokens = variant.tile.tokens
    is_in_one_block = block_size % tile_tokens == 0
    offsets = jnp.arange(tile_tokens, dtype=jnp.int32)
    column: jax.Array | None
    last = jnp.maximum(tokens.end - 1, 0)
    if is_in_one_block and is_whole:
        column = lax.div(start, jnp.int32(block_size))
        slot = start - column * block_size + offsets
    elif is_in_one_block:
        # A scalar block id; offsets are clamped in edge tiles only.
        column, slot = split_token(start, block_size)
        slot += jnp.clip(offsets, tokens.first - start, last - start)
    elif is_whole and _selects_blocks(block_size, variant):
        column, slot = None, lax.rem(offsets, jnp.int32(block_size))
    elif is_whole:
        token = start + offsets
        column = lax.div(token, jnp.int32(block_size))
        slot = lax.rem(token, jnp.int32(block_size))
    else:
        token = jnp.clip(start + offsets, tokens.first, last)
        column, slot = split_token(token, block_size)

    def read_block(column: jax.Array) -> jax.Array:
        # An invalid table may give wrong numbers, but no memory fault.
        return jnp.clip(o.block_tables[tokens.table, column], 0, num_blocks - 1)

    if column is not None:
        block = read_block(column)
    else:
        # The ids of a few blocks, loaded as scalars.
        first_column = lax.div(start, jnp.int32(block_size))
        block = read_block(first_column)
        which = lax.div(offsets, jnp.int32(block_size))
        for number in range(1, tile_tokens // block_size):
            block = jnp.where(which >= number, read_block(first_column + number), block)
    row = block if is_in_one_block else block[:, None]
    is_stored = Techniques.CARRIED in variant.tile.ways

    def load(
        pool: jax.Array,
        sections: list[Section],
        dtype: np.dtype[Any],
        kept: KernelFormat,
    ) -> list[jax.Array]:
        where = (tokens.layer, row, tokens.kv_head, slot[:, None])
        has_words = pool.dtype == WORD
        stored = [
            pool[*where, section.words if has_words else section.columns]
            for section in sections[: len(sections) // kept.parts]
        ]
        return stored if is_stored else _convert(stored, dtype, kept, variant)

    def load_scales(scales: jax.Array | None) -> jax.Array | None:
        if scales is None:
            return None
        stored = scales[tokens.layer, block, tokens.kv_head, slot]
        return stored if is_stored else _convert_scales(stored)

    key_scales = load_scales(o.key_scales)
    of_keys, of_values = variant.key_format, variant.value_format
    keys = load(o.keys, key_sections, variant.operand_dtype, of_keys)
    if o.values is not None:
        value_scales = load_scales(o.value_scales)
        values = load(o.values, value_sections, variant.weight_dtype, of_values)
        return TokenTile(keys, values, key_scales, value_scales)
    values = [] if is_stored else keys[: len(value_sections)]
    if not is_stored and variant.weight_dtype != variant.operand_dtype:
        values = load(o.keys, value_sections, variant.weight_dtype, of_keys)
    return TokenTile(keys, values, key_scales, key_scales)


def _selects_blocks(block_size: int, variant: Variant) -> bool:
    """True if a whole tile consists of few whole blocks with scalar ids."""
    num_blocks, rest = divmod(variant.tile.tokens, block_size)
    is_few = rest == 0 and num_blocks <= _MOST_BLOCKS
    return Techniques.SCALAR_IDS in variant.tile.ways and is_few


def to_operands(
    stored: TokenTile,
    num_sections: int,  # of the value head dim
    variant: Variant,  # determines the dtypes of operands
) -> TokenTile:
    """Convert a carried tile to operands of products."""
    of_keys, of_values = variant.key_format, variant.value_format
    keys = _convert(stored.keys, variant.operand_dtype, of_keys, variant)
    key_scales = _convert_scales(stored.key_scales)
    if stored.values:
        values = _convert(stored.values, variant.weight_dtype, of_values, variant)
        value_scales = _convert_scales(stored.value_scales)
        return TokenTile(keys, values, key_scales, value_scales)
    values = keys[:num_sections]
    if variant.weight_dtype != variant.operand_dtype:
        shared = stored.keys[:num_sections]
        values = _convert(shared, variant.weight_dtype, of_keys, variant)
    return TokenTile(keys, values, key_scales, key_scales)


def find_broken(
    rows: list[jax.Array],  # [rows, size] for each section
    scales: jax.Array | None = None,  # f32[rows], of the rows
) -> jax.Array:
    """Return True for rows with non-finite numbers, bool[rows]."""
    parts = [jnp.sum(_mark(each.astype(jnp.float32)), axis=1) for each in rows]
    parts += [] if scales is None else [_mark(scales)]
    return functools.reduce(jnp.add, parts) > 0.0


def _mark(numbers: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(numbers) < jnp.inf, 0.0, 1.0)


def _convert(
    tiles: list[jax.Array], dtype: np.dtype[Any], kept: KernelFormat, variant: Variant
) -> list[jax.Array]:
    return kept.to_operands(
        tiles, dtype, is_exact=not variant.is_partial, interpret=variant.interpret
    )


def _convert_scales(scales: jax.Array | None) -> jax.Array | None:
    if scales is None:
        return None
    if scales.dtype == jnp.uint16:
        scales = bitcast(scales, BFLOAT16)
    return scales.astype(FLOAT32)


def split_token(token: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Return the table column of a token, and its offset in the block."""
    if block_size & (block_size - 1) == 0:
        return token >> (block_size.bit_length() - 1), token & (block_size - 1)
    # The divisor is a constant, so the compiler emits a product and a shift.
    return lax.div(token, jnp.int32(block_size)), lax.rem(token, jnp.int32(block_size))


def clamp_index(index: jax.Array, size: int) -> jax.Array:
    """Clamp an index of a masked load, as interpret mode requires."""
    return jnp.minimum(index, size - 1)
