"""Isolation of non-finite values from rows that do not attend to them.

Masked tokens of a tile have weight 0, but 0 * NaN is NaN. As this is rare, the
attention kernel (`attention.py`) leaves rows with any NaN as NaN in all columns. A
second launch over the same tiles, which exits at once without such rows, repeats the
walk between each two non-finite values, by the same loops and with the same bits. Rows
whose visible tokens all lie between the two are stored again; other rows are unchanged.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel.bodies.attention import find_places, store_means
from jkv.attention.kernel.bodies.loads import (
    Operands,
    cut_head_dims,
    find_broken,
    find_nan,
    to_operands,
)
from jkv.attention.kernel.bodies.rows import locate_rows
from jkv.attention.kernel.bodies.walk import Walk, start_walk, walk_tiles
from jkv.attention.kernel.elements.sections import Section
from jkv.attention.kernel.tiles.table import Techniques
from jkv.attention.kernel.tiles.variant import Variant

# A position past all tokens.
NOWHERE = 2**31 - 1
# Columns per pass: at least as many as a matrix instruction, which is then the same.
_NUM_COLUMNS = 64


def isolate_range(
    operands: Operands,
    output_before: jax.Array,
    output_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Recompute the NaN rows of one tile, like `attend_range`."""
    o, rows = operands, locate_rows(operands, variant)
    place = find_places(o, rows, variant)
    is_nan = find_nan(output_before, place, rows.head, rows.valid)
    _, sections = cut_head_dims(o.queries, o.values, variant)
    size, kept = min(_NUM_COLUMNS, sections[0].size), variant.value_format
    num_columns = variant.value_dim // kept.parts
    save = functools.partial(store_means, output_ref=output_ref)

    def isolate(trip: jax.Array, _: None) -> None:
        start = jnp.minimum(trip * size, num_columns - size)
        walk = start_walk(o, variant, rows)
        of_part = [Section(start, size)]
        walk = _of_columns(walk, kept.spread(of_part, variant.value_dim))
        walk = walk._replace(valid=walk.valid & is_nan)

        def attend(before: jax.Array, behind: jax.Array) -> None:
            part = between(walk, before, behind)
            save(part, walk_tiles(part))

        take_between(walk, attend)

    times = jnp.max(is_nan.astype(jnp.int32)) * -(-num_columns // size)
    lax.fori_loop(jnp.int32(0), times, isolate, None)


def take_between(
    walk: Walk,
    # called with two tokens, exclusive bounds of the rows' visible tokens
    take: Callable[[jax.Array, jax.Array], None],
    *,
    of_keys: bool = False,  # check keys instead of values
) -> None:
    """Call `take` for each pair of consecutive non-finite tokens of the range."""
    before, find = jnp.int32(-1), functools.partial(_find_broken, walk, of_keys)
    behind = find(before)
    if walk.window is None and not walk.variant.has_past:
        # Rows that end later attend to the first one, too.
        take(before, behind)
        return

    def take_next(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        take(*carry)
        return carry[1], find(carry[1])

    lax.while_loop(lambda carry: carry[0] < NOWHERE, take_next, (before, behind))


def _of_columns(walk: Walk, sections: list[Section]) -> Walk:
    """Return the walk restricted to some columns of the values."""
    o = walk.operands
    if o.values is None:
        o = o._replace(values=o.keys, value_scales=o.key_scales)
    return walk._replace(operands=o, value_sections=sections)


def between(walk: Walk, before: jax.Array, behind: jax.Array) -> Walk:
    """Restrict the walk to rows with all visible tokens between two tokens."""
    assert walk.seen is not None
    first, last = walk.seen.bound(walk.tokens.first, walk.tokens.end)
    valid = walk.valid & (before < first) & (last < behind)
    start = jnp.maximum(walk.tokens.first, before + 1)
    tokens = walk.tokens._replace(first=start, end=jnp.minimum(walk.tokens.end, behind))
    start = start & -walk.variant.tile.tokens
    return walk._replace(valid=valid, tokens=tokens, start=start)


def _find_broken(walk: Walk, of_keys: bool, before: jax.Array) -> jax.Array:
    """Return the first non-finite token after `before`, or NOWHERE."""
    tokens, size = walk.tokens, walk.variant.tile.tokens
    start = tokens.first & -size

    def find(trip: jax.Array, found: jax.Array) -> jax.Array:
        tile = walk.load(trip)
        if Techniques.CARRIED in walk.variant.tile.ways:
            tile = to_operands(tile, len(walk.value_sections), walk.variant)
        looked_at = tile.keys, tile.key_scales
        if not of_keys:
            looked_at = tile.values, tile.value_scales
        token = start + trip * size + jnp.arange(size, dtype=jnp.int32)
        is_next = find_broken(*looked_at) & (token > before) & (token < tokens.end)
        return jnp.minimum(found, jnp.min(jnp.where(is_next, token, NOWHERE)))

    num_tiles = lax.div(tokens.end - start + (size - 1), jnp.int32(size))
    found: jax.Array = lax.fori_loop(jnp.int32(0), num_tiles, find, jnp.int32(NOWHERE))
    return found
