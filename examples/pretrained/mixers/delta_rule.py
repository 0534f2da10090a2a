"""The gated delta rule: a matrix that each token reads, corrects and lets fade.

A head keeps a matrix that maps keys to values. A token lowers it by its decay, reads
the value for the token's key, and moves that towards the token's value; its query then
reads the output (Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.1).
With a rate for each channel of the key it is Kimi Delta Attention
(https://arxiv.org/abs/2510.26692).

Many tokens at once: a token's change depends on the changes before it, by products of
their keys. In a piece of `C` tokens that is one triangular system for all changes
together, and everything else are products of matrices (the WY representation,
https://arxiv.org/abs/2406.06484, section 3.2, with the rates of 2412.06464, section
3.3).

Symbols: `H` heads, `C` tokens of a piece, `D` and `V` components of a key and a value.
All is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# With a rate for each channel, tokens are compared in blocks of this size.
BLOCK = 16

PRECISE = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """The rule's inputs of tokens, each array with or without the axis of a piece."""

    queries: jax.Array  # [C, H, D], scaled
    keys: jax.Array  # [C, H, D], of length 1
    values: jax.Array  # [C, H, V]
    decays: jax.Array  # [C, H, 1] or [C, H, D], the logarithm of the remaining share
    strengths: jax.Array  # [C, H], how far a value is corrected


def correct_once(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """Read one token.

    Args:
        memory: [H, D, V].
        token: without the axis C.

    Returns:
        The matrix after it, and the output [H, V].
    """
    left = jnp.exp(token.decays)
    # Key and query read the old matrix together; the query's share of the change
    # follows from its product with the key.
    readers = jnp.stack([token.keys, token.queries]) * left[None]
    found, output = jnp.einsum("xhd,hdv->xhv", readers, memory, precision=PRECISE)
    change = (token.values - found) * token.strengths[:, None]
    memory = memory * left[..., None] + token.keys[..., None] * change[:, None, :]
    overlap = (token.queries * token.keys).sum(-1, keepdims=True)
    return memory, output + overlap * change


def correct_piece(memory: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Read all tokens of a piece; their number is a power of two.

    A token that does not count has the strength 0 and the decay 0.

    Args:
        memory: [H, D, V], before the piece.
        tokens: of the piece.

    Returns:
        The matrix after it, and the outputs [C, H, V].
    """
    queries, keys, values, decays, strengths = (
        jnp.moveaxis(array, 1, 0) for array in tokens
    )
    faded = jnp.cumsum(decays, axis=1)  # [H, C, 1 or D], since before the piece
    left = jnp.exp(faded)
    size = keys.shape[1]
    earlier = jnp.tril(jnp.ones((1, size, size), bool), -1)

    # Each change is the difference of its value from the old matrix's value for the key
    # plus the additions of earlier changes in the piece.
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

    Blocks of the diagonal are inverted by halves, blocks of one element first:
    of [[P, 0], [R, Q]] the inverse is [[P', 0], [-Q' R P', Q']]. Products alone, and
    none of them grows beyond the inverse's own values, as powers of the triangle would.
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
    """Return products of rows with keys that faded up to the row, [H, C, C].

    That is ``sum_d rows[i, d] keys[j, d] exp(faded[i, d] - faded[j, d])`` for keys j up
    to the row i; the other entries are finite and mean nothing.

    Args:
        rows: [H, C, D].
        keys: [H, C, D].
        faded: [H, C, 1] or [H, C, D], sums of decays, which fall from token to token.
    """
    if faded.shape[-1] == 1:
        between = faded - jnp.swapaxes(faded, 1, 2)
        products = jnp.einsum("hid,hjd->hij", rows, keys)
        return products * jnp.exp(jnp.minimum(between, 0.0))
    return _compare_channels(rows, keys, faded)


def _compare_channels(rows: jax.Array, keys: jax.Array, faded: jax.Array) -> jax.Array:
    """Return `_compare` where each channel fades by its own rate.

    Neither factor of ``exp(faded[i]) exp(-faded[j])`` can be had alone: the second
    overflows. So a block of rows has both of them from its first row, where no exponent
    of an earlier key is above 0; and inside a block the sum is taken as it is.
    """
    heads, size, dim = rows.shape
    width = min(BLOCK, size)
    number = size // width

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(heads, number, width, dim)

    blocks = split(faded)
    start = blocks[:, :, :1]
    near = split(rows) * jnp.exp(blocks - start)
    # [H, blocks, C, D]: every key, as it has faded when a block begins.
    far = keys[:, None] * jnp.exp(jnp.minimum(start - faded[:, None], 0.0))
    products = jnp.einsum("hbid,hbjd->hbij", near, far)

    between = blocks[:, :, :, None] - blocks[:, :, None]
    weights = jnp.exp(jnp.minimum(between, 0.0)) * split(keys)[:, :, None]
    inside = (split(rows)[:, :, :, None] * weights).sum(-1)  # [H, blocks, width, width]
    apart = products.reshape(heads, number, width, number, width)
    same = jnp.eye(number, dtype=bool)[None, :, None, :, None]
    return jnp.where(same, inside[:, :, :, None], apart).reshape(heads, size, size)
