"""Mamba 2: each head remembers outer products of values and keys.

A head's memory [P, N] decays by one number a token, and the token adds the product of
its value x [P] and its key b [N], times its step; the output is the memory times the
query c [N]. Heads share keys and queries in groups.

One token follows that recurrence. Several at once are computed in the dual form, in
which the decays between two tokens are a mask on the scores of queries and keys, so
that all work is products of matrices (https://arxiv.org/abs/2405.21060, section 6).
The two forms differ by rounding only.

Symbols: `H` heads, `P` their dim, `G` groups, `J` heads of a group, `N` the dim of keys
and queries, `C` tokens of a piece.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Decays of many tokens and sums over them: nothing is rounded to fewer bits.
EXACT = dict(precision="highest", preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """The rule's inputs of a token or, with a leading axis C, of a piece.

    A token with a step of 0 changes nothing.
    """

    x: jax.Array  # f32[H, P], values
    b: jax.Array  # f32[G, N], keys
    c: jax.Array  # f32[G, N], queries
    step: jax.Array  # f32[H]
    rate: jax.Array  # f32[H], below 0: a step multiplies the memory by exp(rate * step)


def remember_token(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return the memory f32[H, P, N] after a token, and its query's result [H, P]."""
    heads, dim, state_dim = memory.shape
    groups = token.b.shape[0], heads // token.b.shape[0]
    kept = jnp.exp(token.rate * token.step).reshape(*groups, 1, 1)
    added = (token.step[:, None] * token.x).reshape(*groups, dim, 1)
    key, query = token.b[:, None, None, :], token.c[:, None, None, :]
    # Products by element, not of matrices: a step of one token waits for the memory.
    grouped = memory.reshape(*groups, dim, state_dim) * kept + added * key
    output = (grouped * query).sum(axis=-1)
    return grouped.reshape(memory.shape), output.reshape(heads, dim)


def remember_piece(memory: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return the memory f32[H, P, N] after a piece, and the outputs [C, H, P]."""
    (size, heads), (_, dim, state_dim) = tokens.step.shape, memory.shape
    groups = tokens.b.shape[1], heads // tokens.b.shape[1]
    grouped = memory.reshape(*groups, dim, state_dim)
    added = (tokens.step[..., None] * tokens.x).reshape(size, *groups, dim)
    decays = tokens.rate[None] * tokens.step  # [C, H], of each token, as logarithms
    since_start = jnp.exp(decays.cumsum(axis=0)).reshape(size, *groups, 1)
    between = jnp.exp(_sum_spans(decays)).reshape(*groups, size, size)

    # Additions of the piece's tokens, decayed until each later one.
    scores = jnp.einsum("lgn,sgn->gls", tokens.c, tokens.b, **EXACT)
    masked = scores[:, None] * between
    output = jnp.einsum("gjls,sgjp->lgjp", masked, added, **EXACT)

    # The memory before the piece, decayed until each token.
    earlier = jnp.einsum("lgn,gjpn->lgjp", tokens.c, grouped, **EXACT)
    output = output + earlier * since_start

    # The remainder of both behind the last token.
    left = added * between[:, :, -1].transpose(2, 0, 1)[..., None]
    new = jnp.einsum("sgjp,sgn->gjpn", left, tokens.b, **EXACT)
    grouped = grouped * since_start[-1][..., None] + new
    return grouped.reshape(memory.shape), output.reshape(size, heads, dim)


def _sum_spans(decays: jax.Array) -> jax.Array:
    """Return the sums over tokens s + 1 .. l, f32[H, C, C]; -inf where l < s.

    Each is summed on its own: the difference of two running sums would round as the
    larger of these does, which decays of many tokens make large (listing 1 of the
    paper).
    """
    numbers = jnp.arange(decays.shape[0], dtype=jnp.int32)
    since = numbers[None, :, None] - numbers[None, None, :]  # tokens from s to l
    parts = jnp.where(since > 0, decays.T[:, :, None], 0.0)
    return jnp.where(since >= 0, parts.cumsum(axis=1), -jnp.inf)
