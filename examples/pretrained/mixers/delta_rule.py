"""Gated delta rule: each token decays, reads and corrects a matrix.

A head's matrix maps keys to values. A token multiplies it by a decay, reads the value
of its key, and corrects that towards its own value; the token's query then reads the
output (Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.1). With a
decay per channel of the key it is Kimi Delta Attention
(https://arxiv.org/abs/2510.26692).

In a chunk, a token's change depends on earlier changes, by products of their keys. For
`C` tokens this is one triangular system, and the rest are matrix products (the WY
representation, https://arxiv.org/abs/2406.06484, section 3.2, with the decays of
2412.06464, section 3.3).

Symbols: `H` heads, `C` tokens of a chunk, `D` and `V` components of a key and a value.
All arrays are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Tokens per block in `_compare_channels`, for decays per channel.
BLOCK = 16

PRECISE = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """Inputs of the delta rule: of a chunk, or of one token without the axis C."""

    queries: jax.Array  # [C, H, D], scaled
    keys: jax.Array  # [C, H, D], of length 1
    values: jax.Array  # [C, H, V]
    decays: jax.Array  # [C, H, 1] or [C, H, D], logarithms of the remaining fraction
    strengths: jax.Array  # [C, H], factor of a correction


def correct_once(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """Apply the delta rule to one token.

    Args:
        memory: [H, D, V], the matrices.
        token: inputs without the axis C.

    Returns:
        The matrices after the token, and the output, [H, V].
    """
    left = jnp.exp(token.decays)
    # One product reads the old matrix for key and query; the query's output of the
    # change follows from its product with the key.
    readers = jnp.stack([token.keys, token.queries]) * left[None]
    found, output = jnp.einsum("xhd,hdv->xhv", readers, memory, precision=PRECISE)
    change = (token.values - found) * token.strengths[:, None]
    memory = memory * left[..., None] + token.keys[..., None] * change[:, None, :]
    overlap = (token.queries * token.keys).sum(-1, keepdims=True)
    return memory, output + overlap * change


def correct_piece(memory: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Apply the delta rule to a chunk; C is a power of two.

    Strength 0 and log decay 0 mark invalid tokens.

    Args:
        memory: [H, D, V], the matrices before the chunk.
        tokens: inputs of the chunk.

    Returns:
        The matrices after the chunk, and the outputs, [C, H, V].
    """
    queries, keys, values, decays, strengths = (
        jnp.moveaxis(array, 1, 0) for array in tokens
    )
    faded = jnp.cumsum(decays, axis=1)  # [H, C, 1 or D], since the chunk's start
    left = jnp.exp(faded)
    size = keys.shape[1]
    earlier = jnp.tril(jnp.ones((1, size, size), bool), -1)

    # A change is the value minus the old matrix's value of the key, and minus the
    # contributions of earlier changes in the chunk.
    between = _compare(keys, keys, faded) * strengths[..., None]
    lacking = values - jnp.einsum("hcd,hdv->hcv", keys * left, memory)
    solver = invert_unit_triangle(jnp.where(earlier, between, 0.0))
    changes = jnp.einsum("hij,hjv->hiv", solver, lacking * strengths[..., None])

    upto = jnp.tril(jnp.ones((1, size, size), bool))
    seen = jnp.where(upto, _compare(queries, keys, faded), 0.0)
    outputs = jnp.einsum("hcd,hdv->hcv", queries * left, memory)
    outputs = outputs + jnp.einsum("hij,hjv->hiv", seen, changes)

    kept = keys * jnp.exp(faded[:, -1:] - faded)
    memory = memory * left[:, -1, :, None]
    memory = memory + jnp.einsum("hcd,hcv->hdv", kept, changes)
    return memory, jnp.moveaxis(outputs, 0, 1)


def invert_unit_triangle(below: jax.Array) -> jax.Array:
    """Invert the unit matrix plus a strictly lower triangle, [H, C, C].

    Diagonal blocks are inverted in pairs, from one element up: the inverse of
    [[P, 0], [R, Q]] is [[P', 0], [-Q' R P', Q']]. This needs products only, and no
    value exceeds the inverse's own, unlike in powers of the triangle.
    """
    heads, size = below.shape[:2]
    inverse = jnp.ones((heads, size, 1, 1), below.dtype)
    width = 1
    while width < size:
        number = size // (2 * width)
        blocks = jnp.arange(number)
        parts = below.reshape(heads, number, 2, width, number, 2, width)
        lower = jnp.moveaxis(parts[:, blocks, 1, :, blocks, 0], 0, 1)
        pairs = inverse.reshape(heads, number, 2, width, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        corner = -jnp.matmul(
            jnp.matmul(second, lower, precision=PRECISE), first, precision=PRECISE
        )
        top = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
        bottom = jnp.concatenate([corner, second], axis=-1)
        inverse = jnp.concatenate([top, bottom], axis=-2)
        width *= 2
    return inverse[:, 0]


def _compare(rows: jax.Array, keys: jax.Array, faded: jax.Array) -> jax.Array:
    """Return products of rows with keys decayed until the row, [H, C, C].

    Entry (i, j) is ``sum_d rows[i, d] keys[j, d] exp(faded[i, d] - faded[j, d])`` for
    j <= i; other entries are finite and have no meaning.

    Args:
        rows: [H, C, D].
        keys: [H, C, D].
        faded: [H, C, 1] or [H, C, D], cumulative sums of decays, not increasing.
    """
    if faded.shape[-1] == 1:
        between = faded - jnp.swapaxes(faded, 1, 2)
        products = jnp.einsum("hid,hjd->hij", rows, keys)
        return products * jnp.exp(jnp.minimum(between, 0.0))
    return _compare_channels(rows, keys, faded)


def _compare_channels(rows: jax.Array, keys: jax.Array, faded: jax.Array) -> jax.Array:
    """Return `_compare` for decays per channel.

    In ``exp(faded[i]) exp(-faded[j])`` the second factor alone overflows. So both
    factors of a block of rows are relative to its first row, where the exponents of
    earlier keys are at most 0; inside a block the sum is computed directly.
    """
    heads, size, dim = rows.shape
    width = min(BLOCK, size)
    number = size // width

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(heads, number, width, dim)

    blocks = split(faded)
    start = blocks[:, :, :1]
    near = split(rows) * jnp.exp(blocks - start)
    # [H, blocks, C, D]: every key, decayed until the start of a block.
    far = keys[:, None] * jnp.exp(jnp.minimum(start - faded[:, None], 0.0))
    products = jnp.einsum("hbid,hbjd->hbij", near, far)

    between = blocks[:, :, :, None] - blocks[:, :, None]
    weights = jnp.exp(jnp.minimum(between, 0.0)) * split(keys)[:, :, None]
    inside = (split(rows)[:, :, :, None] * weights).sum(-1)  # [H, blocks, width, width]
    apart = products.reshape(heads, number, width, number, width)
    same = jnp.eye(number, dtype=bool)[None, :, None, :, None]
    return jnp.where(same, inside[:, :, :, None], apart).reshape(heads, size, size)
