"""Mamba 2: each head remembers outer products of what it reads and where to keep it.

A head's memory [P, N] decays by one number a token, and the token adds the product of
its value x [P] and its key b [N], scaled by its step dt; what comes out is the memory
times the query c [N], and D times x. Heads share b and c in groups. Values, keys and
queries go through a short convolution first.

One token follows that recurrence. Several at once are computed in the dual form, in
which the decays between two tokens are a mask on the scores of queries and keys, so
that all work is products of matrices (https://arxiv.org/abs/2405.21060, section 6).
The two forms differ by rounding only.

Symbols: `H` heads, `P` their dim, `G` groups, `J` heads of a group, `N` the dim of keys
and queries, `K` tokens that the convolution sees, `C` tokens of a chunk.
"""

import jax
import jax.numpy as jnp

from ..layers import Weights, linear, scale_to_unit
from ..parts import StateSpace
from .short_convolution import (
    Arrays,
    ChunkRule,
    Rule,
    convolve,
    convolve_chunk,
    keep_tokens,
)

# What is convolved; of each the layer has `conv_<name>`, and the state `past_<name>`.
CONVOLVED = ("x", "b", "c")


def project(
    sizes: StateSpace, weights: Weights, x: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return what each row is gated with and what it feeds to the rules.

    Args:
        sizes: of the layer.
        weights: of the layer; of them ``mixer_gate``, ``mixer_x``, ``mixer_b``,
            ``mixer_c`` and ``mixer_dt``, perhaps with biases.
        x: [R, E].

    Returns:
        [R, H, P], and the inputs of `make_rules` for each row, of the dtype of `x`.
    """
    scaled = x * sizes.input_scale
    heads = sizes.num_heads, sizes.head_dim
    shared = sizes.num_groups, sizes.state_dim
    shapes = dict(gate=heads, x=heads, b=shared, c=shared, dt=heads[:1])
    rows = {
        name: (linear(scaled, weights, f"mixer_{name}") * scale).reshape(-1, *shape)
        for (name, shape), scale in zip(shapes.items(), sizes.scales, strict=True)
    }
    return rows.pop("gate"), rows


def gather_heads(
    sizes: StateSpace,
    epsilon: float,
    weights: Weights,
    outputs: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Gate and norm what the rules return, and come back to the hidden size.

    Args:
        sizes: of the layer.
        epsilon: added to the mean square of a norm.
        weights: of the layer; of them ``mixer_output``, and ``mixer_norm`` [H * P].
        outputs: f32[R, H, P].
        gates: [R, H, P], from `project`.

    Returns:
        [R, E], of the dtype of the gates.
    """
    gated, norm = jax.nn.silu(_widen(gates)), sizes.norm
    heads = outputs if norm == "before" else outputs * gated
    if norm is not None:
        groups = heads.reshape(heads.shape[0], sizes.num_groups, -1)
        weight = _widen(weights["mixer_norm"]).reshape(1, *heads.shape[1:])
        heads = scale_to_unit(groups, epsilon).reshape(heads.shape) * weight
    if norm == "before":
        heads = heads * gated
    rows = heads.reshape(heads.shape[0], -1).astype(gates.dtype)
    return linear(rows, weights, "mixer_output") * sizes.output_scale


def make_rules(sizes: StateSpace, weights: Arrays) -> tuple[Rule, ChunkRule]:
    """Return the forms of a layer for one token and for a chunk of tokens.

    Inputs are ``x`` [H, P], ``b`` and ``c`` [G, N] before their convolutions, and
    ``dt`` [H]: the state follows from these alone, so they are what has to be kept of a
    token to take it back. The state is ``memory`` f32[H, P, N] and, for the
    convolutions, ``past_x`` [K - 1, H, P], ``past_b`` and ``past_c`` [K - 1, G, N].
    Outputs are f32[H, P].

    Args:
        sizes: of the layer.
        weights: ``conv_x`` [K, H, P], ``conv_b`` and ``conv_c`` [K, G, N], perhaps
            their biases, and ``decay``, ``step_bias`` and ``skip``, [H] each.
    """

    def rule(state: Arrays, input: Arrays) -> tuple[dict[str, jax.Array], jax.Array]:
        return _advance(sizes, weights, state, input)

    def chunk_rule(
        state: Arrays, inputs: Arrays, count: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        return _advance_chunk(sizes, weights, state, inputs, count)

    return rule, chunk_rule


def _advance(
    sizes: StateSpace, weights: Arrays, state: Arrays, input: Arrays
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Follow the recurrence by one token."""
    moved, read = {}, {}
    for name in CONVOLVED:
        bias = weights.get(f"conv_{name}_bias")
        row, past = convolve(
            state[f"past_{name}"], input[name], weights[f"conv_{name}"], bias
        )
        moved[f"past_{name}"] = past
        read[name] = _activate(row, input[name].dtype)
    x, b, c = read["x"], read["b"], read["c"]

    # Heads in their groups: [G, J] in the place of [H].
    groups = sizes.num_groups, sizes.num_heads // sizes.num_groups
    steps, decays = _discretize(sizes, weights, input["dt"])
    added = (steps[:, None] * x).reshape(*groups, sizes.head_dim)
    memory = state["memory"].reshape(*groups, sizes.head_dim, sizes.state_dim)
    memory = (
        memory * jnp.exp(decays).reshape(*groups, 1, 1)
        + added[..., None] * b[:, None, None, :]
    )
    output = (memory * c[:, None, None, :]).sum(axis=-1).reshape(x.shape)
    moved["memory"] = memory.reshape(state["memory"].shape)
    return moved, output + _widen(weights["skip"])[:, None] * x


def _advance_chunk(
    sizes: StateSpace,
    weights: Arrays,
    state: Arrays,
    inputs: Arrays,
    count: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Follow the recurrence by the first `count` of C tokens, in the dual form."""
    inputs, moved, read = keep_tokens(inputs, count), {}, {}
    for name in CONVOLVED:
        bias = weights.get(f"conv_{name}_bias")
        rows, past = convolve_chunk(
            state[f"past_{name}"], inputs[name], count, weights[f"conv_{name}"], bias
        )
        moved[f"past_{name}"] = past
        read[name] = _activate(rows, inputs[name].dtype)
    x = read["x"]
    # Of the inputs' dtype again, so that matrix units multiply that.
    b, c = (read[name].astype(inputs[name].dtype) for name in "bc")

    # A token that is not there has a step of 0: it adds nothing and nothing decays.
    steps, decays = _discretize(sizes, weights, inputs["dt"])
    is_token = jnp.arange(x.shape[0], dtype=jnp.int32) < count
    steps = jnp.where(is_token[:, None], steps, 0.0)
    decays = jnp.where(is_token[:, None], decays, 0.0)

    groups = sizes.num_groups, sizes.num_heads // sizes.num_groups
    added = (steps[..., None] * x).reshape(-1, *groups, sizes.head_dim)
    memory = state["memory"].reshape(*groups, sizes.head_dim, sizes.state_dim)
    spans = _sum_spans(decays).reshape(*groups, *2 * x.shape[:1])
    output, memory = _fold_chunk(memory, added, b, c, spans, decays.cumsum(axis=0))
    moved["memory"] = memory.reshape(state["memory"].shape)
    skipped = _widen(weights["skip"])[None, :, None] * x
    return moved, output.reshape(x.shape) + skipped


def _fold_chunk(
    memory: jax.Array,
    added: jax.Array,
    b: jax.Array,
    c: jax.Array,
    spans: jax.Array,
    decays: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return what a chunk reads from the memory, and the memory after it.

    Args:
        memory: f32[G, J, P, N].
        added: f32[C, G, J, P], values times their steps.
        b, c: [C, G, N], keys and queries.
        spans: f32[G, J, C, C], logarithms of the decays from a token to a later one.
        decays: f32[C, H], those from before the chunk to each token.
    """
    exact = dict(precision="highest", preferred_element_type=jnp.float32)
    since = jnp.exp(decays).reshape(decays.shape[0], *memory.shape[:2])  # [C, G, J]

    # What tokens of the chunk have added, masked and decayed on the way.
    scores = jnp.einsum("lgn,sgn->gls", c, b, **exact)[:, None] * jnp.exp(spans)
    output = jnp.einsum("gjls,sgjp->lgjp", scores, added, **exact)

    # What was in the memory before, decayed until each token.
    earlier = jnp.einsum("lgn,gjpn->lgjp", c.astype(jnp.float32), memory, **exact)
    output = output + earlier * since[..., None]

    # What is left of both behind the last token.
    kept = added * jnp.exp(spans[:, :, -1]).transpose(2, 0, 1)[..., None]
    new = jnp.einsum("sgjp,sgn->gjpn", kept, b.astype(jnp.float32), **exact)
    return output, memory * since[-1][..., None, None] + new


def _activate(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return what the convolution's activation lets through, rounded to a dtype.

    A pair of casts would round too, unless XLA removes it, which it does in one of the
    two forms and not in the other.
    """
    precision = jnp.finfo(dtype)
    return jax.lax.reduce_precision(jax.nn.silu(rows), precision.nexp, precision.nmant)


def _discretize(
    sizes: StateSpace, weights: Arrays, dt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return steps and logarithms of decays, f32[..., H] both."""
    lead = range(dt.ndim - 1)
    bias = jnp.expand_dims(_widen(weights["step_bias"]), lead)
    steps = jnp.clip(jax.nn.softplus(_widen(dt) + bias), *sizes.step_limits)
    return steps, -jnp.exp(jnp.expand_dims(_widen(weights["decay"]), lead)) * steps


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


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32)
