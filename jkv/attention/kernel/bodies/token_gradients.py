"""The kernel of the keys' and values' derivative: tiles of tokens, over their readers.

A program has some tokens of one block and one kv head, loads their keys and values
once, and walks over the rows that see them: request by request of those whose tables
name the block (`readers.py`), and in each over the query heads of all its rows. What a
prefix collects from all texts that share it is so added up by one program, in one
order, and written once.

Tokens are the rows of all products here, as those of the sums are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.derivative import Cotangents
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.loads import (
    clamp_index,
    cut_head_dims,
    load_numbers,
    load_rows,
)
from jkv.attention.kernel.bodies.scores import (
    add_dot,
    cap_in_log2,
    dot_sections,
    slope_of_cap,
)
from jkv.attention.kernel.bodies.sums import LOG2E
from jkv.attention.kernel.elements.sections import Section
from jkv.attention.kernel.tiles.variant import Variant
from jkv.attention.kernel.work.readers import Readers


class TokenOperands(NamedTuple):
    """What the kernel reads. Refs inside it, arrays outside."""

    readers: Readers
    query_starts: jax.Array  # i32[B]
    query_lengths: jax.Array  # i32[B]
    context_lengths: jax.Array  # i32[B]
    layer: jax.Array  # i32[1]
    scale: jax.Array  # f32[1]
    window: jax.Array | None  # i32[1]
    part: jax.Array | None  # i32[1], of each block, where the pools have only one
    queries: jax.Array  # [R, H, D]
    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of the keys
    cotangents: Cotangents


class PoolGradients(NamedTuple):
    """The gradients of the pools, in their dtypes."""

    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv], None if they lie in the keys


class _Tokens(NamedTuple):
    """The tokens of a program, in sections of the head dims."""

    keys: list[jax.Array]  # [tokens, size] each
    values: list[jax.Array]


class _Rows(NamedTuple):
    """Some rows of one request: a query head of a token each."""

    row: jax.Array  # i32[rows]
    head: jax.Array  # i32[rows]
    position: jax.Array  # i32[rows]
    valid: jax.Array  # bool[rows]


_Sums = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


def differentiate_tokens(
    operands: TokenOperands,
    before: PoolGradients,
    d_keys_ref: jax.Array,
    d_values_ref: jax.Array | None,
    *,
    variant: Variant,
) -> None:
    """Write the gradients of the tokens of one block and one kv head.

    Blocks that no table names keep what the arrays before, which are aliased, have.
    """
    del before
    o, readers, tile_tokens = operands, operands.readers, variant.tile.tokens
    num_layers, _, num_kv_heads, block_size, _ = o.keys.shape
    heads_per_kv = o.queries.shape[1] // num_kv_heads
    key_sections, value_sections = cut_head_dims(o.queries, o.values, variant)

    program, kv_head = backend.program_id(0), backend.program_id(1)
    tiles = jnp.int32(-(-block_size // tile_tokens))
    entry = lax.div(program, tiles)
    first_slot = lax.rem(program, tiles) * tile_tokens
    slot = first_slot + jnp.arange(tile_tokens, dtype=jnp.int32)
    is_slot = slot < block_size  # the last tile of a block may be larger than the rest
    layer = jnp.clip(o.layer[0], 0, num_layers - 1)
    block = readers.block[entry]

    def load_tokens(shift: jax.Array | int) -> _Tokens:
        clamped = clamp_index(slot, block_size) + shift

        def load(pool: jax.Array, sections: list[Section]) -> list[jax.Array]:
            where = layer, block, kv_head, clamped[:, None]
            dtype = variant.operand_dtype
            return [pool[*where, each.columns].astype(dtype) for each in sections]

        keys = load(o.keys, key_sections)
        if o.values is None:
            return _Tokens(keys, keys[: len(value_sections)])
        return _Tokens(keys, load(o.values, value_sections))

    kept = None if variant.tile.is_reloaded else load_tokens(0)
    scale = o.scale[0] * (LOG2E if variant.soft_cap is None else 1.0)

    def add_rows(
        rows: _Rows,
        tile: _Tokens,
        token: jax.Array,
        window: jax.Array | None,
        sums: _Sums,
    ) -> _Sums:
        """Add what some rows bring to the tokens at positions i32[tokens]."""
        where = rows.row, rows.head, rows.valid

        def load(array: jax.Array, sections: list[Section]) -> list[jax.Array]:
            dtype = variant.operand_dtype
            return [load_rows(array, *where, each, dtype) for each in sections]

        queries = load(o.queries, key_sections)
        d_output = load(o.cotangents.d_output, value_sections)
        lse = load_numbers(o.cotangents.lse, *where) * LOG2E
        delta = load_numbers(o.cotangents.delta, *where)

        visible = token[:, None] <= rows.position[None, :]
        visible &= rows.valid[None, :]
        if window is not None:
            visible &= token[:, None] > (rows.position - window)[None, :]
        scores = cap_in_log2(
            dot_sections(variant, tile.keys, queries) * scale, variant.soft_cap
        )
        weights = jnp.where(visible, jnp.exp2(scores - lse[None, :]), 0.0)
        d_weights = dot_sections(variant, tile.values, d_output)
        d_scores = weights * (d_weights - delta[None, :])
        if variant.soft_cap is not None:
            d_scores *= slope_of_cap(scores, variant.soft_cap)
        # Slots that no row sees may hold NaN, and 0 * NaN is NaN.
        d_scores = jnp.where(visible, d_scores, 0.0).astype(variant.operand_dtype)
        weights = weights.astype(variant.operand_dtype)
        of_keys, of_values = sums
        of_keys = tuple(
            add_dot(variant, old, d_scores, query)
            for old, query in zip(of_keys, queries, strict=True)
        )
        of_values = tuple(
            add_dot(variant, old, weights, each)
            for old, each in zip(of_values, d_output, strict=True)
        )
        return of_keys, of_values

    def add_reader(index: jax.Array, sums: _Sums) -> _Sums:
        """Add what the rows of one request bring that see the tile."""
        request, column = readers.request[index], readers.column[index]
        start, length = o.query_starts[request], o.query_lengths[request]
        context = o.context_lengths[request]
        column_of_part = column * variant.num_parts
        if o.part is not None:
            column_of_part += o.part[0]
        token = column_of_part * block_size + slot
        first_position = context - length
        first_token = column_of_part * block_size + first_slot
        first = jnp.clip(first_token - first_position, 0, length)
        end, window = length, None
        if o.window is not None:
            # No larger than what it can hide, so that no sum overflows.
            window = jnp.clip(o.window[0], 0, context)
            last_token = first_token + (min(tile_tokens, block_size) - 1)
            end = jnp.clip(last_token + window - first_position, first, length)
        num_pairs = (end - first) * heads_per_kv
        none = jnp.minimum(length, 0)  # zero, but not to the compiler's knowledge

        def add(trip: jax.Array, sums: _Sums) -> _Sums:
            pair = trip * variant.tile.rows
            pair += jnp.arange(variant.tile.rows, dtype=jnp.int32)
            offset = first + lax.div(pair, jnp.int32(heads_per_kv))
            rows = _Rows(
                row=start + offset,
                head=kv_head * heads_per_kv + lax.rem(pair, jnp.int32(heads_per_kv)),
                position=first_position + offset,
                valid=pair < num_pairs,
            )
            tile = load_tokens(trip * none) if kept is None else kept
            return add_rows(rows, tile, token, window, sums)

        rows = variant.tile.rows
        trips = lax.div(num_pairs + (rows - 1), jnp.int32(rows))
        return lax.fori_loop(jnp.int32(0), trips, add, sums)

    def zeros(sections: list[Section]) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((tile_tokens, s.size), jnp.float32) for s in sections)

    sums = zeros(key_sections), zeros(value_sections)
    first, end = readers.first[entry], readers.end[entry]
    of_keys, of_values = lax.fori_loop(first, end, add_reader, sums)
    of_keys = tuple(each * o.scale[0] for each in of_keys)
    if o.values is None:
        num_shared = len(value_sections)
        shared = zip(of_keys[:num_shared], of_values, strict=True)
        of_keys = tuple(one + other for one, other in shared) + of_keys[num_shared:]

    def store(
        ref: jax.Array, sections: list[Section], sums: tuple[jax.Array, ...]
    ) -> None:
        valid = is_slot & (first < end)
        for section, value in zip(sections, sums, strict=True):
            where = layer, block, kv_head, slot[:, None], section.columns
            value = value.astype(ref.dtype)
            backend.store_masked(ref, where, value, section.over(valid))

    store(d_keys_ref, key_sections, of_keys)
    if d_values_ref is not None:
        store(d_values_ref, value_sections, of_values)
