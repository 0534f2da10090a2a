"""Mamba 2 recurrence: a head's state is a sum of outer products of values and keys.

A token multiplies a head's matrix [P, N] by one decay, and adds the outer product of
its value x [P] and key b [N], times its step; the output is the matrix times the query
c [N]. Groups of heads share keys and queries.

One token is computed by this recurrence, a chunk in the dual form: the decays between
two tokens mask the scores of queries and keys, so that all work is matrix products
(https://arxiv.org/abs/2405.21060, section 6). Both forms differ by rounding only.

Symbols: `H` heads, `P` head dim, `G` groups, `J` heads of a group, `N` dim of keys and
queries, `C` tokens of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Products over many tokens and their decays are float32 throughout.
EXACT = dict(precision="highest", preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """Inputs of the recurrence: of a token or, with a leading axis C, of a chunk.

    A token with a step of 0 does not change the matrix.
    """

    x: jax.Array  # f32[H, P], values
    b: jax.Array  # f32[G, N], keys
    c: jax.Array  # f32[G, N], queries
    step: jax.Array  # f32[H]
    rate: jax.Array  # f32[H], below 0; the decay is exp(rate * step)


def remember_token(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return the matrices, f32[H, P, N], after a token, and the output, f32[H, P]."""
    heads, dim, state_dim = memory.shape
    groups = token.b.shape[0], heads // token.b.shape[0]
    kept = jnp.exp(token.rate * token.step).reshape(*groups, 1, 1)
    added = (token.step[:, None] * token.x).reshape(*groups, dim, 1)
    key, query = token.b[:, None, None, :], token.c[:, None, None, :]
    # Elementwise products, since a step of one token is memory-bound.
    grouped = memory.reshape(*groups, dim, state_dim) * kept + added * key
    output = (grouped * query).sum(axis=-1)
    return grouped.reshape(memory.shape), output.reshape(heads, dim)


def remember_piece(memory: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return the matrices, f32[H, P, N], after a chunk, and outputs f32[C, H, P]."""
    (size, heads), (_, dim, state_dim) = tokens.step.shape, memory.shape
    groups = tokens.b.shape[1], heads // tokens.b.shape[1]
    grouped = memory.reshape(*groups, dim, state_dim)
    added = (tokens.step[..., None] * tokens.x).reshape(size, *groups, dim)
    decays = tokens.rate[None] * tokens.step  # [C, H], logarithms
    since_start = jnp.exp(decays.cumsum(axis=0)).reshape(size, *groups, 1)
    between = jnp.exp(_sum_spans(decays)).reshape(*groups, size, size)

    # Contributions of the chunk's tokens, decayed until each later token.
    scores = jnp.einsum("lgn,sgn->gls", tokens.c, tokens.b, **EXACT)
    masked = scores[:, None] * between
    output = jnp.einsum("gjls,sgjp->lgjp", masked, added, **EXACT)

    # The matrix before the chunk, decayed until each token.
    earlier = jnp.einsum("lgn,gjpn->lgjp", tokens.c, grouped, **EXACT)
    output = output + earlier * since_start

    # Both, decayed until the last token.
    left = added * between[:, :, -1].transpose(2, 0, 1)[..., None]
    new = jnp.einsum("sgjp,sgn->gjpn", left, tokens.b, **EXACT)
    grouped = grouped * since_start[-1][..., None] + new
    return grouped.reshape(memory.shape), output.reshape(size, heads, dim)


def _sum_spans(decays: jax.Array) -> jax.Array:
    """Return the sums over tokens s + 1 .. l, f32[H, C, C]; -inf where l < s.

    Each is summed separately: a difference of two cumulative sums has the rounding
    error of the larger one, which grows with the tokens (listing 1 of the paper).
    """
    numbers = jnp.arange(decays.shape[0], dtype=jnp.int32)
    since = numbers[None, :, None] - numbers[None, None, :]  # tokens from s to l
    parts = jnp.where(since > 0, decays.T[:, :, None], 0.0)
    return jnp.where(since >= 0, parts.cumsum(axis=1), -jnp.inf)
