"""Mixture-of-experts layers: top-k experts for each row, and no row is dropped.

Rows are sorted by expert, and a loop runs over tiles of rows of one expert. The cost of
a layer is the number of rows times k, rounded up to a tile for each used expert; the
weights of unused experts are not read. A tile has the average number of rows of an
expert: a step of 64 rows, 8 of 128 experts each, has up to 256 tiles of 4, twice the
work of its 512 pairs; with 2,048 rows a few per cent are padding.
`jax.lax.ragged_dot` gives the same products, but on a CPU multiplies every row by every
expert (`benchmarks/experts.py`).
"""

import jax
import jax.numpy as jnp

from .config import DecoderConfig
from .layers import Weights, activate, cap, linear, norm, perceptron, scale_to_unit
from .parts import Experts
from .routers import route_by_perceptron

# Minimum and maximum rows of a tile. On two cores a step of 16 rows, 4 of 24 experts
# each, takes 19 ms in tiles of 4 and 28 ms in tiles of 16.
_LEAST_TILE, _LARGEST_TILE = 4, 16


def mix_experts(
    config: DecoderConfig,
    weights: Weights,
    stacks: Weights,
    layer: jax.Array,
    hidden: jax.Array,
    x: jax.Array,
    valid: jax.Array,
    previous: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Apply a layer's experts and its shared expert.

    Args:
        config: the model's configuration.
        weights: the layer's parameters, except the experts'.
        stacks: the experts' parameters, as in `apply_experts`.
        layer: i32[], index of the layer in the run.
        hidden: [R, E], the norm's input.
        x: [R, E], the norm's output.
        valid: bool[R].
        previous: [R, N], state of the previous layer's router; None without one.

    Returns:
        [R, E], and the state of this layer's router; `previous` for a linear router.
    """
    experts = config.experts
    inputs = seen = x
    if experts.has_own_norms:
        inputs = norm(config, hidden, weights, "routed_norm")
        seen = scale_to_unit(hidden.astype(jnp.float32), config.norm_epsilon)
        seen = seen * weights["router_scale"].astype(jnp.float32)[None, :]
        seen = seen * config.hidden_size**-0.5
    if experts.router_inner is None:
        chosen = route(experts, weights, seen)
    else:
        *chosen, previous = route_by_perceptron(config, weights, seen, previous)
    inputs = linear(x, weights, "routed_in") if experts.latent else inputs
    fed = apply_experts(config, stacks, layer, inputs, *chosen, valid)
    if experts.latent:
        fed = linear(fed, weights, "routed_out")
    fed = norm(config, fed, weights, "routed_post_norm")
    if experts.shared_inner:
        shared = perceptron(config, x, weights, "shared_")
        if experts.shared_scale != 1:
            shared = shared * experts.shared_scale
        if experts.has_shared_gate:
            shared = shared * jax.nn.sigmoid(linear(x, weights, "shared_weight"))
        fed = fed + norm(config, shared, weights, "shared_post_norm")
    return fed, previous


def route(
    experts: Experts, weights: Weights, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Select each row's top-k experts with a linear router.

    Args:
        experts: the sizes.
        weights: the layer's parameters; ``router``, ``router_bias``, ``choice_bias``
            and ``routed_scale`` are read.
        x: [R, E].

    Returns:
        The experts, i32[R, C], and their weights, f32[R, C].
    """
    wide = x.astype(jnp.float32), weights["router"].astype(jnp.float32)
    scores = jnp.einsum("re,ne->rn", *wide)
    if experts.has_biases:
        scores = scores + weights["router_bias"].astype(jnp.float32)[None, :]
    scores = cap(scores, experts.score_cap)
    if experts.jitter is not None:
        return _mix_sparsely(scores, experts.per_token, experts.jitter)
    is_sigmoid = experts.has_sigmoid
    scores = jax.nn.sigmoid(scores) if is_sigmoid else jax.nn.softmax(scores, axis=-1)
    ranking = scores
    if experts.has_choice_bias:
        ranking = scores + weights["choice_bias"].astype(jnp.float32)[None, :]
    if experts.groups > 1:
        ranking = _limit_to_groups(experts, ranking)
    chosen = jax.lax.top_k(ranking, experts.per_token)[1]
    gates = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.is_normalised:
        total = gates.sum(axis=-1, keepdims=True) + experts.epsilon
        gates = gates / jnp.maximum(total, experts.least_sum)
    if experts.has_own_norms:
        gates = gates * weights["routed_scale"].astype(jnp.float32)[chosen]
    return chosen, gates * experts.scale


def apply_experts(
    config: DecoderConfig,
    weights: Weights,
    layer: jax.Array,
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """Return the weighted sum of each row's experts, [R, E].

    Args:
        config: the model's configuration.
        weights: the experts' parameters in all layers of a run, [layers, N, ...].
        layer: i32[], index of the layer in the run.
        x: [R, E].
        chosen: i32[R, C], each row's experts; N for no expert.
        gates: f32[R, C], their weights.
        valid: bool[R]; other rows use no expert and get zeros.
    """
    (num_rows, per_token), num_experts = chosen.shape, weights["expert_down"].shape[1]
    # Pairs of a row and an expert, sorted by expert; pairs of invalid rows are last.
    expert_of_pair = jnp.where(valid[:, None], chosen, num_experts).reshape(-1)
    pairs = jnp.argsort(expert_of_pair, stable=True)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    sizes = (expert_of_pair[:, None] == experts[None, :]).sum(0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    size = choose_tile(num_rows * per_token, num_experts)
    num_tiles = -(-sizes // size)
    tile_ends = jnp.cumsum(num_tiles)

    def run_tile(tile: jax.Array, total: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
        done = (tile - tile_ends[expert] + num_tiles[expert]) * size
        pair_numbers = done + jnp.arange(size, dtype=jnp.int32)
        pair = jnp.take(pairs, starts[expert] + pair_numbers, mode="clip")
        # Past the expert's last pair the row is out of range.
        row = jnp.where(pair_numbers < sizes[expert], pair // per_token, num_rows)
        inputs = jnp.take(x, row, axis=0, mode="fill", fill_value=0)
        outputs = _run_expert(config, weights, layer, expert, inputs)
        gate = jnp.take(gates.reshape(-1), pair)[:, None].astype(outputs.dtype)
        return total.at[row].add(outputs * gate, mode="drop", unique_indices=False)

    return jax.lax.fori_loop(0, tile_ends[-1], run_tile, jnp.zeros_like(x))


def choose_tile(num_pairs: int, num_experts: int) -> int:
    """Return the average pairs of an expert, rounded up to a power of two, 4 to 16."""
    mean = -(-num_pairs // num_experts)
    return min(max(_LEAST_TILE, 1 << (mean - 1).bit_length()), _LARGEST_TILE)


def _run_expert(
    config: DecoderConfig,
    weights: Weights,
    layer: jax.Array,
    expert: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """Apply one expert to the rows of a tile, [T, E]."""

    def multiply(name: str, inputs: jax.Array) -> jax.Array:
        product = inputs @ weights[f"expert_{name}"][layer, expert]
        bias = weights.get(f"expert_{name}_bias")
        return product if bias is None else product + bias[layer, expert][None, :]

    gate = multiply("gate", rows) if config.is_gated else None
    return multiply("down", activate(config, gate, multiply("up", rows)))


def _mix_sparsely(
    scores: jax.Array, per_token: int, jitter: float
) -> tuple[jax.Array, jax.Array]:
    """Select experts one by one, each with a softmax over experts of similar scores.

    This is SparseMixer (https://arxiv.org/abs/2409.12136) outside training: an expert's
    weight is its softmax among the remaining experts with scores, f32[R, N], within
    twice the jitter of its own, relative to the larger of the two.
    """
    experts = jnp.arange(scores.shape[1], dtype=jnp.int32)
    left, choices, gates = scores, [], []
    for _ in range(per_token):
        best = left.max(axis=-1, keepdims=True)
        choice = left.argmax(axis=-1, keepdims=True).astype(jnp.int32)
        far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * jitter
        near = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        choices.append(choice)
        gates.append(jnp.take_along_axis(near, choice, axis=-1))
        left = jnp.where(experts[None, :] == choice, -jnp.inf, left)
    return jnp.concatenate(choices, axis=-1), jnp.concatenate(gates, axis=-1)


def _limit_to_groups(experts: Experts, ranking: jax.Array) -> jax.Array:
    """Set the ranking, f32[R, N], to -inf outside each row's best groups.

    A group's score is that of its best expert or, with sigmoids, of its best two.
    """
    num_rows = ranking.shape[0]
    grouped = ranking.reshape(num_rows, experts.groups, -1)
    best = jax.lax.top_k(grouped, 2 if experts.has_sigmoid else 1)[0].sum(-1)
    kept = jax.lax.top_k(best, experts.groups_per_token)[1]
    groups = jnp.arange(experts.groups, dtype=kept.dtype)
    is_kept = (kept[:, :, None] == groups[None, None, :]).any(axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(num_rows, -1)
