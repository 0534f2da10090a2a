"""The loop of a program over its tiles of tokens."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.loads import (
    Operands,
    Range,
    TokenTile,
    clamp_index,
    cut_head_dims,
    load_rows,
    load_tokens,
    to_operands,
)
from jkv.attention.kernel.bodies.rows import (
    QueryRows,
    VisibleRange,
    find_last,
    find_range,
    find_seen,
    read_window,
    see,
)
from jkv.attention.kernel.bodies.scores import (
    add_dot,
    cap_in_log2,
    dot_sections,
    exp2_in_pairs,
)
from jkv.attention.kernel.bodies.sums import LOG2E, ONES, TileSums, start_sums
from jkv.attention.kernel.elements.conversion import FLOAT32, round_by_bits
from jkv.attention.kernel.elements.sections import Section
from jkv.attention.kernel.tiles.table import Techniques
from jkv.attention.kernel.tiles.variant import Variant


class Walk(NamedTuple):
    """A program's rows and their range of tokens."""

    operands: Operands
    variant: Variant
    rows: QueryRows
    valid: jax.Array  # bool[rows], rows to store
    window: jax.Array | None  # i32[]
    seen: VisibleRange | None  # None: all rows attend to the whole range
    tokens: Range
    key_sections: list[Section]
    value_sections: list[Section]
    queries: list[jax.Array]  # [rows, size] for each section of the keys
    above: jax.Array | None  # f32[rows], common offset of the products with keys
    scale: jax.Array  # f32[], of scores in units of log2 or, with a soft cap, before it
    start: jax.Array  # i32[], a multiple of the tile, so that a tile lies in one block

    @property
    def has_one_factor(self) -> bool:
        """True if the maximum is taken before a common, nonnegative factor."""
        return (
            Techniques.EXP2_IN_PAIRS in self.variant.tile.ways
            and self.variant.soft_cap is None
            and self.operands.key_scales is None
        )

    @property
    def has_full_loop(self) -> bool:
        """True if a loop without mask precedes, over tiles visible to all rows."""
        is_causal = self.window is None and not self.variant.has_past
        return Techniques.FULL_FIRST in self.variant.tile.ways and is_causal

    def load(self, trip: jax.Array, *, is_whole: bool = False) -> TokenTile:
        """Load a tile; `is_whole` requires a range that begins at token 0."""
        start = trip * self.variant.tile.tokens
        start = start if is_whole else self.start + start
        sections = self.key_sections, self.value_sections
        given = self.operands, self.tokens, start, *sections, self.variant
        return load_tokens(*given, is_whole=is_whole)

    def is_visible(self, trip: jax.Array) -> jax.Array:
        """Return the mask of a tile's tokens, to broadcast over scores."""
        size = self.variant.tile.tokens
        token = self.start + trip * size + jnp.arange(size, dtype=jnp.int32)
        if self.seen is not None:
            return see(self.seen, token)
        visible = token < self.tokens.end
        if self.window is not None or self.variant.has_past:
            visible &= token >= self.tokens.first
        return visible[None, :]


def start_walk(o: Operands, variant: Variant, rows: QueryRows) -> Walk:
    """Set up the walk of this program, and load its queries."""
    key_sections, value_sections = cut_head_dims(o.queries, o.values, variant)
    window = read_window(o)
    first, end = find_range(o, rows, window, variant)
    seen = None if variant.is_decode else find_seen(o, rows, window, variant)
    valid = rows.valid if seen is None else seen.valid
    dtype = variant.operand_dtype
    queries = [
        load_rows(o.queries, rows.row, rows.head, valid, section, dtype)
        for section in key_sections
    ]
    walk = Walk(
        operands=o,
        variant=variant,
        rows=rows,
        valid=valid,
        window=window,
        seen=seen,
        tokens=Range(
            layer=jnp.clip(o.layer[0], 0, o.keys.shape[0] - 1),
            table=o.work.table[rows.entry],
            kv_head=rows.kv_head,
            first=first,
            end=end,
        ),
        key_sections=key_sections,
        value_sections=value_sections,
        queries=queries,
        above=_find_above(queries, variant.keys_above),
        scale=o.scale[0] * (LOG2E if variant.soft_cap is None else 1.0),
        start=first & -variant.tile.tokens,
    )
    if not walk.has_one_factor:
        return walk
    queries = [jnp.where(walk.scale < 0.0, -query, query) for query in queries]
    return walk._replace(queries=queries, scale=jnp.abs(walk.scale))


def _find_above(queries: list[jax.Array], above: float) -> jax.Array | None:
    if not above:
        return None
    sums = [jnp.sum(each.astype(FLOAT32), axis=1) for each in queries]
    return above * functools.reduce(jnp.add, sums)


def walk_tiles(walk: Walk) -> TileSums:
    """Return the sums over all tiles of the range."""
    o, variant, tokens = walk.operands, walk.variant, walk.tokens
    tile_tokens = variant.tile.tokens
    head, sink = walk.rows.head, None
    if o.sinks is not None:
        where = (clamp_index(head, o.queries.shape[1]),)
        sink = backend.load_masked(o.sinks, where, walk.valid)
    sections = walk.value_sections
    if variant.values_above:
        sections = [*sections, ONES]
    sums = start_sums(head.shape, sections, sink)
    num_tiles = lax.div(
        tokens.end - walk.start + (tile_tokens - 1), jnp.int32(tile_tokens)
    )
    num_full = jnp.int32(0)
    attend = functools.partial(_attend_tiles, walk)
    if walk.has_full_loop:
        position = walk.rows.position
        seen_by_all = jnp.clip(find_last(o, position, variant) + 1, 0, tokens.end)
        num_full = lax.div(seen_by_all, jnp.int32(tile_tokens))
        load_whole = functools.partial(walk.load, is_whole=True)
        whole = jnp.int32(0), num_full
        sums = attend(*whole, sums, load_whole, masked=False)
    return attend(num_full, num_tiles, sums, walk.load, masked=True)


def _attend_tiles(
    walk: Walk,
    start: jax.Array,
    stop: jax.Array,
    sums: TileSums,
    load_next: Callable[[jax.Array], TokenTile],
    *,
    masked: bool,
) -> TileSums:
    """Add the tiles `start .. stop - 1` to the sums."""
    variant = walk.variant
    attend = functools.partial(_attend_tile, walk, masked=masked)

    def attend_loaded(trip: jax.Array, sums: TileSums) -> TileSums:
        return attend(trip, load_next(trip), sums)

    # Loading the next tile overlaps with using this one: one wait per trip.
    def attend_carried(
        trip: jax.Array, carry: tuple[TileSums, TokenTile]
    ) -> tuple[TileSums, TokenTile]:
        sums, stored = carry
        following = load_next(jnp.minimum(trip + 1, stop - 1))
        tile = to_operands(stored, len(walk.value_sections), variant)
        return attend(trip, tile, sums, stored=stored), following

    if Techniques.CARRIED not in variant.tile.ways:
        return lax.fori_loop(start, stop, attend_loaded, sums)
    # With zero trips this tile lies outside the range: `walk.load` clamps it,
    # `load_next` may not.
    return lax.fori_loop(start, stop, attend_carried, (sums, walk.load(start)))[0]


def _attend_tile(
    walk: Walk,
    trip: jax.Array,  # index of the tile
    tile: TokenTile,
    sums: TileSums,  # over earlier tokens
    *,
    masked: bool,  # False if all tokens are visible to all rows
    stored: TokenTile | None = None,  # the tile in its encoding, if it was carried
) -> TileSums:
    """Add one tile to the sums."""
    variant, scale, ways = walk.variant, walk.scale, walk.variant.tile.ways
    scores = dot_sections(variant, walk.queries, tile.keys)
    if walk.above is not None:
        scores -= walk.above[:, None]
    factor = scale
    if tile.key_scales is not None:
        # An infinite scale becomes NaN, as inf * 0 is; else it would be -inf for some.
        factor = scale * (tile.key_scales + 0.0 * tile.key_scales)[None, :]
    largest, added = None, None
    if walk.has_one_factor and not masked:
        largest, added = scale * jnp.max(scores, axis=1), jnp.sum(scores, axis=1)
    scores = cap_in_log2(scores * factor, variant.soft_cap)
    visible = walk.is_visible(trip)
    if masked:
        scores = jnp.where(visible, scores, -jnp.inf)
    if largest is None:
        largest = jnp.max(scores, axis=1)
    maximum = jnp.maximum(sums.maximum, largest)
    exponents = scores - maximum[:, None]
    shrink = jnp.exp2(sums.maximum - maximum)
    if Techniques.EXP2_IN_PAIRS in ways:
        weights = exp2_in_pairs(exponents, interpret=variant.interpret)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
        # `exp2_in_pairs` may lose NaN, but a sum of exponents does not.
        added = jnp.sum(exponents, axis=1) if added is None else added
        total = jnp.where(added == added, total, added)
    else:
        weights = jnp.exp2(exponents)
        if walk.window is not None and not variant.is_partial:
            # The weights are 0 already. Repeating the mask saves 44 registers on gfx11,
            # where bytes of head dim 128 spill; by position it costs some on sm_90.
            weights = jnp.where(visible, weights, 0.0)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
    if stored is not None and variant.has_words:
        # Words are converted to values as late as possible, to save registers.
        tile = to_operands(stored, len(walk.value_sections), variant)
    if tile.value_scales is not None:
        weights *= tile.value_scales[None, :]
    if Techniques.ROUNDED_BY_BITS in ways and variant.weight_dtype == jnp.bfloat16:
        weights = round_by_bits(weights)
    weights = weights.astype(variant.weight_dtype)
    values = tile.values
    if variant.values_above:
        size = variant.tile.tokens, ONES.size
        values = [*values, jnp.ones(size, variant.weight_dtype)]
    summed = tuple(
        add_dot(variant, old * shrink[:, None], weights, value)
        for old, value in zip(sums.values, values, strict=True)
    )
    return TileSums(maximum, total, summed)
