"""The kernel of the keys' and values' gradients: tiles of tokens over their readers.

A program holds some tokens of one kv head, of a block or a run of small ones, loads
their keys and values once, and walks over the rows that attend to them: all query heads
of all rows of each request with the block in its table (`readers.py`). So the gradient
of a shared prefix is summed by one program, in a fixed order, and written once.

In all products, tokens are the rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Cotangents
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.loads import (
    clamp_index,
    cut_head_dims,
    load_numbers,
    load_rows,
    split_token,
)
from jkv.attention.kernel.bodies.scores import (
    add_dot,
    cap_in_log2,
    dot_sections,
    slope_of_cap,
)
from jkv.attention.kernel.bodies.sums import LOG2E
from jkv.attention.kernel.elements.sections import Section
from jkv.attention.kernel.tiles.table import Techniques
from jkv.attention.kernel.tiles.variant import Variant
from jkv.attention.kernel.work.readers import Readers


class TokenOperands(NamedTuple):
    """The operands of the kernel: refs inside it, arrays outside."""

    readers: Readers
    query_starts: jax.Array  # i32[B]
    query_lengths: jax.Array  # i32[B]
    context_lengths: jax.Array  # i32[B]
    layer: jax.Array  # i32[1]
    scale: jax.Array  # f32[1]
    window: jax.Array | None  # i32[1]
    part: jax.Array | None  # i32[1], of each block; None for whole blocks
    queries: jax.Array  # [R, H, D]
    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of the keys
    cotangents: Cotangents


class PoolGradients(NamedTuple):
    """The gradients of the pools, in their dtypes."""

    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv], None if they are part of the keys


_Sum = tuple[jax.Array, ...]  # f32[tokens, size] for each section
_Sums = tuple[_Sum, _Sum]  # of keys and of values


class _Tokens(NamedTuple):
    """The tokens of a program, in sections of the head dims."""

    keys: list[jax.Array]  # [tokens, size] each
    values: list[jax.Array]


class _Tile(NamedTuple):
    """The tokens of a program: slots of a block or a run of them, and one kv head."""

    operands: TokenOperands
    variant: Variant
    first_reader: jax.Array  # i32[]
    end_reader: jax.Array  # i32[], past the last one
    layer: jax.Array  # i32[]
    block: jax.Array  # i32[], or i32[tokens, 1] for a run
    kv_head: jax.Array  # i32[]
    first_slot: jax.Array  # i32[]
    length: int  # the most positions from the first token to the last
    slot: jax.Array  # i32[tokens], in the last tile partly past the block
    step: jax.Array  # i32[tokens], positions relative to slot 0 of the first block
    stored: jax.Array  # bool[tokens], allocated slots
    key_sections: list[Section]
    value_sections: list[Section]
    scale: jax.Array  # f32[], of scores in units of log2 or, with a soft cap, before it

    @property
    def block_size(self) -> int:
        """T."""
        return self.operands.keys.shape[3]

    @property
    def heads_per_kv(self) -> int:
        """Query heads of a kv head."""
        return self.operands.queries.shape[1] // self.operands.keys.shape[2]

    def load(self, shift: jax.Array | int) -> _Tokens:
        """Load the tokens; `shift` must be zero."""
        o, dtype = self.operands, self.variant.operand_dtype
        clamped = clamp_index(self.slot, self.block_size) + shift

        def load(pool: jax.Array, sections: list[Section]) -> list[jax.Array]:
            where = self.layer, self.block, self.kv_head, clamped[:, None]
            return [pool[*where, each.columns].astype(dtype) for each in sections]

        keys = load(o.keys, self.key_sections)
        if o.values is None:
            return _Tokens(keys, keys[: len(self.value_sections)])
        return _Tokens(keys, load(o.values, self.value_sections))

    def store(self, ref: jax.Array, sections: list[Section], sums: _Sum) -> None:
        """Store the sums of tokens in allocated blocks."""
        for section, value in zip(sections, sums, strict=True):
            where = self.layer, self.block, self.kv_head, self.slot[:, None]
            value, mask = value.astype(ref.dtype), section.over(self.stored)
            backend.store_masked(ref, (*where, section.columns), value, mask)


class _Reader(NamedTuple):
    """A request that reads the tile, and its rows that attend to it."""

    request_start: jax.Array  # i32[], its first row
    first_position: jax.Array  # i32[], of that row
    first: jax.Array  # i32[], the first row that attends to any of the tokens
    num_pairs: jax.Array  # i32[], number of (row, query head) pairs
    token: jax.Array  # i32[tokens], positions
    window: jax.Array | None  # i32[]
    none: jax.Array  # i32[], always zero, but not a constant to the compiler


def differentiate_tokens(
    operands: TokenOperands,
    before: PoolGradients,
    d_keys_ref: jax.Array,
    d_values_ref: jax.Array | None,
    *,
    variant: Variant,
) -> None:
    """Write the gradients of the tokens of one block and one kv head.

    Blocks in no table keep the contents of the aliased `before`.
    """
    del before
    tile = _locate_tile(operands, variant)
    of_keys, of_values = _walk_readers(tile)
    of_keys = tuple(each * operands.scale[0] for each in of_keys)
    if operands.values is None:
        num_shared = len(tile.value_sections)
        shared = zip(of_keys[:num_shared], of_values, strict=True)
        of_keys = tuple(one + other for one, other in shared) + of_keys[num_shared:]
    tile.store(d_keys_ref, tile.key_sections, of_keys)
    if d_values_ref is not None:
        tile.store(d_values_ref, tile.value_sections, of_values)


def _locate_tile(o: TokenOperands, variant: Variant) -> _Tile:
    """Return the tokens of this program."""
    num_layers, _, _, block_size, _ = o.keys.shape
    key_sections, value_sections = cut_head_dims(o.queries, o.values, variant)
    program, kv_head = backend.program_id(0), backend.program_id(1)
    tile_tokens = variant.tile.tokens
    offset = jnp.arange(tile_tokens, dtype=jnp.int32)
    num_joined = o.readers.block.shape[0] // o.readers.first.shape[0]
    if num_joined == 1:
        # The last tile of a block may extend past it.
        tiles = jnp.int32(-(-block_size // tile_tokens))
        entry = lax.div(program, tiles)
        first_slot = lax.rem(program, tiles) * tile_tokens
        block, step = o.readers.block[entry], first_slot + offset
        slot, stored = step, step < block_size
        length = min(tile_tokens, block_size)
    else:
        entry, first_slot = program, jnp.int32(0)
        number, slot = split_token(offset, block_size)
        block = o.readers.block[entry * num_joined]
        for other in range(1, num_joined):
            named = o.readers.block[entry * num_joined + other]
            block = jnp.where(number >= other, named, block)
        block = block[:, None]
        step = number * (variant.num_parts * block_size) + slot
        stored = number < o.readers.length[entry]
        # Stores must not share an address, masked ones neither.
        slot = jnp.where(stored, slot, block_size + offset)
        length = ((num_joined - 1) * variant.num_parts + 1) * block_size
    first_reader, end_reader = o.readers.first[entry], o.readers.end[entry]
    return _Tile(
        operands=o,
        variant=variant,
        first_reader=first_reader,
        end_reader=end_reader,
        layer=jnp.clip(o.layer[0], 0, num_layers - 1),
        block=block,
        kv_head=kv_head,
        first_slot=first_slot,
        length=length,
        slot=slot,
        step=step,
        stored=stored & (first_reader < end_reader),
        key_sections=key_sections,
        value_sections=value_sections,
        scale=o.scale[0] * (LOG2E if variant.soft_cap is None else 1.0),
    )


def _walk_readers(tile: _Tile) -> _Sums:
    """Sum the contributions of all rows of all requests that read the tile."""
    variant = tile.variant
    kept = None if Techniques.RELOADED in variant.tile.ways else tile.load(0)
    num_rows = variant.tile.rows

    def add_reader(index: jax.Array, sums: _Sums) -> _Sums:
        reader = _find_reader(tile, index)

        def add(trip: jax.Array, sums: _Sums) -> _Sums:
            pair = trip * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
            tokens = tile.load(trip * reader.none) if kept is None else kept
            return _add_pairs(tile, reader, pair, tokens, sums)

        trips = lax.div(reader.num_pairs + (num_rows - 1), jnp.int32(num_rows))
        return lax.fori_loop(jnp.int32(0), trips, add, sums)

    def zeros(sections: list[Section]) -> _Sum:
        shape = variant.tile.tokens
        return tuple(jnp.zeros((shape, each.size), jnp.float32) for each in sections)

    sums = zeros(tile.key_sections), zeros(tile.value_sections)
    return lax.fori_loop(tile.first_reader, tile.end_reader, add_reader, sums)


def _find_reader(tile: _Tile, index: jax.Array) -> _Reader:
    """Return the range of a request's rows that attend to the tile."""
    o, block_size = tile.operands, tile.block_size
    request, column = o.readers.request[index], o.readers.column[index]
    length, context = o.query_lengths[request], o.context_lengths[request]
    column_of_part = column * tile.variant.num_parts
    if o.part is not None:
        column_of_part += o.part[0]
    first_position = context - length
    first_token = column_of_part * block_size + tile.first_slot
    first = jnp.clip(first_token - first_position, 0, length)
    end, window = length, None
    if o.window is not None:
        # Bounded by the context, so that no sum overflows.
        window = jnp.clip(o.window[0], 0, context)
        last_token = first_token + tile.length - 1
        end = jnp.clip(last_token + window - first_position, first, length)
    return _Reader(
        request_start=o.query_starts[request],
        first_position=first_position,
        first=first,
        num_pairs=(end - first) * tile.heads_per_kv,
        token=column_of_part * block_size + tile.step,
        window=window,
        none=jnp.minimum(length, 0),
    )


def _add_pairs(
    tile: _Tile, reader: _Reader, pair: jax.Array, tokens: _Tokens, sums: _Sums
) -> _Sums:
    """Add the contributions of i32[rows] pairs of the reader's rows and query heads."""
    o, variant, token = tile.operands, tile.variant, reader.token
    heads_per_kv, dtype = jnp.int32(tile.heads_per_kv), variant.operand_dtype
    offset = reader.first + lax.div(pair, heads_per_kv)
    head = tile.kv_head * heads_per_kv + lax.rem(pair, heads_per_kv)
    position, valid = reader.first_position + offset, pair < reader.num_pairs
    where = reader.request_start + offset, head, valid

    def load(array: jax.Array, sections: list[Section]) -> list[jax.Array]:
        return [load_rows(array, *where, each, dtype) for each in sections]

    queries = load(o.queries, tile.key_sections)
    d_output = load(o.cotangents.d_output, tile.value_sections)
    lse = load_numbers(o.cotangents.lse, *where) * LOG2E
    delta = load_numbers(o.cotangents.delta, *where)

    visible = (token[:, None] <= position[None, :]) & valid[None, :]
    if reader.window is not None:
        visible &= token[:, None] > (position - reader.window)[None, :]
    scores = dot_sections(variant, tokens.keys, queries) * tile.scale
    scores = cap_in_log2(scores, variant.soft_cap)
    weights = jnp.where(visible, jnp.exp2(scores - lse[None, :]), 0.0)
    d_weights = dot_sections(variant, tokens.values, d_output)
    d_scores = weights * (d_weights - delta[None, :])
    if variant.soft_cap is not None:
        d_scores *= slope_of_cap(scores, variant.soft_cap)
    # Masked slots may hold NaN, and 0 * NaN is NaN.
    d_scores = jnp.where(visible, d_scores, 0.0).astype(dtype)
    weights = weights.astype(dtype)

    def add(sums: _Sum, factor: jax.Array, rows: list[jax.Array]) -> _Sum:
        pairs = zip(sums, rows, strict=True)
        return tuple(add_dot(variant, old, factor, each) for old, each in pairs)

    return add(sums[0], d_scores, queries), add(sums[1], weights, d_output)
