"""Decoding in one launch: the program that finishes a row's last piece joins them all.

As in stream-K products (arXiv 2301.03598), whose tiles are finished so, programs do not
wait for each other: each counts itself in when its partial result is stored, and the
one that finds all others counted joins, in the order of the pieces, so that bits do not
depend on which one it is. A row of one piece is stored at once.

The counters are an operand that is changed while the kernel runs, and as it was, zeros,
when it has run: the last to arrive clears what it counted with. So nothing is copied or
cleared in any layer.
"""

import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.body import attend_rows
from jkv.attention.kernel.join import Joined, join_one, join_range
from jkv.attention.kernel.lists import Pieces
from jkv.attention.kernel.loads import Operands, clamp_index
from jkv.attention.kernel.sections import Section, cut
from jkv.attention.kernel.sums import TileSums, start_sums
from jkv.attention.kernel.variant import Variant

# An environment variable: "1" has decoding take one launch on every card.
# It is read when a program is traced.
LAUNCH_SWITCH = "JKV_ONE_LAUNCH"

# What a lane of a warp holds while it joins: numbers of the result, and of partial ones
# that are loaded at a time, of so many pieces at most. With more the registers of the
# walk do not do, or leave room for fewer programs.
_RESULTS, _LOADED, _MAX_PIECES, _LANES = 8, 128, 16, 32


def is_one_launch_asked() -> bool:
    """Return whether the environment asks for decoding in one launch."""
    return os.environ.get(LAUNCH_SWITCH) == "1"


def make_counters(num: int, seq_ids: jax.Array) -> jax.Array:
    """Return zeros, i32[num], in memory of their own.

    Constants may lie where nothing is written, and a constant would be made in each
    layer: so it is the sequences, none of which is negative, that are said to be zero.
    """
    return jnp.minimum(jnp.broadcast_to(seq_ids[:1], (num,)), 0)


def attend_and_join(
    operands: Operands,
    pieces: Pieces,  # i32[R] each
    sinks_ref: jax.Array | None,  # f32[H]
    counters_ref: jax.Array,  # i32[C], one for each row and head tile at least
    output_ref: jax.Array,  # [R, H, Dv]
    lse_ref: jax.Array,  # f32[R, H]
    partial_ref: jax.Array,  # f32[W, H, Dv]
    partial_lse_ref: jax.Array,  # f32[W, H], log2
    *,
    variant: Variant,
) -> None:
    """Attend from one row to a piece of its context; join the pieces if it is the last.

    Rows that no request of one row owns become zeros and -inf.
    """
    o, num_heads = operands, operands.queries.shape[1]
    sections = cut(variant.value_dim)

    def store(
        row: jax.Array, heads: Heads, what: Joined, sections: list[Section]
    ) -> None:
        row = jnp.broadcast_to(row, heads.head.shape)
        for section, value in zip(sections, what.values, strict=True):
            where = (row[:, None], heads.head[:, None], section.columns)
            value = value.astype(output_ref.dtype)
            backend.store_masked(output_ref, where, value, section.over(heads.valid))
        backend.store_masked(lse_ref, (row, heads.head), what.lse, heads.valid)

    def start(heads: Heads, sections: list[Section]) -> TileSums:
        sink = None
        if sinks_ref is not None:
            where = (clamp_index(heads.head, num_heads),)
            sink = backend.load_masked(sinks_ref, where, heads.valid)
        return start_sums(heads.head.shape, sections, sink)

    # The lists are loaded with what the walk needs of them. Nothing is stored before,
    # as CDNA loads no scalars from memory that may have been stored to.
    program, head_tiles = backend.program_id(0), jnp.int32(variant.head_tiles)
    entry, head_tile = lax.div(program, head_tiles), lax.rem(program, head_tiles)
    row = clamp_index(o.work.row[entry], pieces.first.shape[0])
    first, end = pieces.first[row], pieces.end[row]
    num_pieces = jnp.where(o.work.num_rows[entry] > 0, end - first, 0)
    is_free = _is_free(pieces, entry)
    heads = _locate_heads(o, head_tile, variant)
    attended = attend_rows(o, variant)
    all_heads = Heads(attended.rows.head, attended.valid)

    # The programs of entry r clear row r; steps with prompts may have more rows.
    num_rows, num_entries = pieces.first.shape[0], o.work.row.shape[0]

    def clear(row: jax.Array, is_free: jax.Array) -> None:
        mask = heads._replace(valid=heads.valid & is_free)
        shape = heads.head.shape
        values = [jnp.zeros((*shape, each.size), jnp.float32) for each in sections]
        nothing = Joined(values, jnp.full(shape, -jnp.inf, jnp.float32))
        store(row, mask, nothing, sections)

    def clear_more(trip: jax.Array, _: None) -> None:
        row = entry + trip * num_entries
        clear(row, _is_free(pieces, row))

    clear(entry, is_free)
    if num_rows > num_entries:
        lax.fori_loop(1, -(-num_rows // num_entries), clear_more, None)

    @backend.when(num_pieces == 1)
    def _() -> None:
        sums = start(all_heads, attended.sections)
        joined = join_one(attended.lse, attended.values, sums)
        store(row, all_heads, joined, attended.sections)

    @backend.when(num_pieces > 1)
    def _() -> None:
        places = jnp.broadcast_to(entry, all_heads.head.shape)
        for section, value in zip(attended.sections, attended.values, strict=True):
            where = (places[:, None], all_heads.head[:, None], section.columns)
            valid = section.over(all_heads.valid)
            backend.store_masked(partial_ref, where, value, valid)
        backend.store_masked(
            partial_lse_ref, (places, all_heads.head), attended.lse, all_heads.valid
        )
        counter = row * head_tiles + head_tile
        before = backend.arrive(counters_ref, counter, interpret=variant.interpret)

        @backend.when(before == num_pieces - 1)
        def _() -> None:
            counters_ref[counter] = jnp.int32(0)
            lanes = _LANES * variant.tile.num_warps
            fitting = _floor(_RESULTS * lanes // variant.value_dim)
            num = min(heads.head.shape[0], fitting)
            loaded = _floor(_LOADED * lanes // (num * variant.value_dim))

            def join(trip: jax.Array, _: None) -> None:
                some = _locate_heads(o, head_tile, variant, trip * num, num)
                joined = join_range(
                    (first, end),
                    functools.partial(_load_lse, partial_lse_ref, some),
                    functools.partial(_load_values, partial_ref, some),
                    start(some, sections),
                    num_loaded=min(loaded, _MAX_PIECES),
                )
                store(row, some, joined, sections)

            lax.fori_loop(0, heads.head.shape[0] // num, join, None)


class Heads(NamedTuple):
    """Query heads of one kv head, as many as are a power of two."""

    head: jax.Array  # i32[...]
    valid: jax.Array  # bool[...], the others do not exist


def _locate_heads(
    o: Operands,
    head_tile: jax.Array,
    variant: Variant,
    first: jax.Array | int = 0,
    num: int | None = None,
) -> Heads:
    """Find some query heads of a tile, or all without those that fill it up."""
    heads_per_kv = o.queries.shape[1] // o.keys.shape[2]
    if num is None:
        num = min(1 << (heads_per_kv - 1).bit_length(), variant.row_heads)
    tiles_per_head = jnp.int32(-(-heads_per_kv // variant.row_heads))
    head = lax.rem(head_tile, tiles_per_head) * variant.row_heads + first
    head += jnp.arange(num, dtype=jnp.int32)
    kv_head = lax.div(head_tile, tiles_per_head)
    return Heads(head + kv_head * heads_per_kv, head < heads_per_kv)


def _load_lse(partial_lse_ref: jax.Array, heads: Heads, piece: jax.Array) -> jax.Array:
    head = clamp_index(heads.head, partial_lse_ref.shape[1])
    return backend.load_masked(partial_lse_ref, (piece, head), heads.valid)


def _load_values(
    partial_ref: jax.Array, heads: Heads, piece: jax.Array
) -> list[jax.Array]:
    head = clamp_index(heads.head, partial_ref.shape[1])
    return [
        backend.load_masked(
            partial_ref,
            (piece, head[:, None], section.columns),
            section.over(heads.valid),
        )
        for section in cut(partial_ref.shape[2])
    ]


def _floor(number: int) -> int:
    """Return a power of two, the largest one up to a number, at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def _is_free(pieces: Pieces, row: jax.Array) -> jax.Array:
    """Return whether there is such a row and it has no pieces, bool[]."""
    num_rows = pieces.first.shape[0]
    place = clamp_index(row, num_rows)
    return (row < num_rows) & (pieces.first[place] >= pieces.end[place])
