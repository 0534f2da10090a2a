"""A decoder as plain functions over a paged cache.

Symbols: `R` token rows in the batch, `E` hidden size, `H` query heads, `K` key-value
heads, `D` head dim, `V` vocabulary, `L` layers, `B` requests.

Each layer has arrays of its own, since a step of few rows takes as long as reading
them. Two fields of ``DecoderConfig`` make deep models faster to compile: equal layers
share one loop. With ``scan_layers`` the loop copies each layer's weights out of a
stack, which doubles the time of such a step, but is fast to differentiate. With
``loop_layers`` each matrix has a branch of its own, which reads it in place
(`layers.Layers`): as fast as separate layers on a CPU; on a GPU a branch waits for the
host. The cache is carried by the loop, which updates it in place; as scanned inputs and
outputs the whole pool would be copied in every call.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jkv

from .attention import Rotations, attend
from .caches import attention_fields, choose_config
from .checkpoint import Params
from .config import ATTENTION, DecoderConfig, Run
from .experts import mix_experts
from .layer_inputs import apply_layer_input, embed_layer_inputs
from .layers import (
    Layers,
    Weights,
    cap,
    embed,
    multiply,
    norm,
    norm_plainly,
    perceptron,
)
from .mixers import MIXERS
from .rope import turns

# Id of given rows in the lookup of embeddings and of Gemma 4's per-layer embeddings.
PADDING = 0

# A window beyond all positions: full attention in a scan with sliding windows.
NO_WINDOW = 2**30


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model: static settings, called with parameters.

    Hashable and without arrays, so that jit can close over it or take it as a static
    argument.
    """

    config: DecoderConfig

    @property
    def cache_fields(self) -> dict[str, int]:
        """Fields of ``jkv.CacheConfig`` for a model without recurrent states."""
        return attention_fields(self.config, self.config.num_cached_layers)

    def cache_config(
        self, max_context_length: int, **sizes: Any
    ) -> jkv.CacheConfig | jkv.GroupedConfig:
        """Return the configuration for ``jkv.init``, including recurrent states.

        Args:
            max_context_length: maximum tokens of a sequence.
            **sizes: keyword arguments of ``caches.choose_config``.
        """
        return choose_config(self.config, max_context_length, **sizes)

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
        *,
        all_rows: bool = False,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jkv.Cache] | tuple[jax.Array, jkv.Cache, jax.Array]:
        """Compute logits of a batch of tokens, and write their keys and values.

        The caller has appended the rows to the cache (``jkv.append``) and commits the
        batch afterwards. Activations have the parameters' dtype.

        Args:
            params: the parameters from ``load``. Optional "given_rows", [N, E], replace
                the embeddings of ids `V` to `V + N - 1`, for example by image features.
            tokens: i32[R], packed like the batch's rows; invalid rows are ignored.
                Other ids outside the vocabulary make their sequence NaN.
            cache: the cache from ``append``.
            batch: the batch from ``append``.
            all_rows: return logits of every row, instead of each request's last row.
            aux_layers: layers to return the inputs of, for a drafter; the number of
                layers selects the output of the final norm.

        Returns:
            f32[B, V] logits (zeros for a request without rows) or, with ``all_rows``,
            f32[R, V]; the cache with the written rows; and, with ``aux_layers``, the
            concatenated inputs, [R, A].

        Raises:
            jkv.UsageError: if `aux_layers` are not in 0..`num_layers`.
        """
        config = self.config
        if any(not 0 <= layer <= config.num_layers for layer in aux_layers):
            raise jkv.UsageError(
                f"aux_layers of the drafter must be in 0..{config.num_layers}, the "
                f"layers of the target, got {aux_layers}; take a drafter made for it"
            )
        tokens, hidden = _embed_rows(config, params, tokens, batch)
        layer_inputs = None
        if config.layer_inputs is not None:
            layer_inputs = embed_layer_inputs(
                config, params, tokens, batch.valid, hidden
            )
        dtype = hidden.dtype
        if config.has_residual_scales:
            hidden = _scale_rows(params, "input", hidden)
        hidden, cache, found = self.run_layers(
            params, hidden, cache, batch, layer_inputs, aux_layers
        )
        if config.has_residual_scales:
            hidden = hidden.astype(dtype)
        if config.num_layers in aux_layers:
            found[config.num_layers] = norm(config, hidden, params, "final_norm")
        if not all_rows:
            # The last row of a request without rows is past the end: zeros.
            hidden = jnp.take(
                hidden, batch.last_rows, axis=0, mode="fill", fill_value=0
            )
        hidden = norm(config, hidden, params, "final_norm")
        logits = find_logits(config, params, hidden)
        if not aux_layers:
            return logits, cache
        aux = jnp.concatenate([found[layer] for layer in aux_layers], axis=-1)
        return logits, cache, aux

    def run_layers(
        self,
        params: Params,
        hidden: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
        layer_inputs: jax.Array | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jkv.Cache, dict[int, jax.Array]]:
        """Run hidden states [R, E] through the layers.

        Args:
            params: the parameters.
            hidden: [R, E], inputs of the first layer.
            cache: the cache.
            batch: the batch.
            layer_inputs: [L, R, P], per-layer embeddings; None for models without them.
            aux_layers: layers to return the inputs of.

        Returns:
            [R, E], the cache, and the inputs of layers, [R, E], by layer.
        """
        config = self.config
        all_turns = stack_turns(config, batch)
        found: dict[int, jax.Array] = {}
        # The state of the previous layer's router, in models with MLP routers.
        routed: jax.Array | None = None
        runs = _join_runs(config, params["layers"])
        for run, weights in _cut_runs(runs, aux_layers):
            found[run.start] = hidden
            hidden, cache, routed = _run_layers(
                config,
                run,
                weights,
                hidden,
                layer_inputs,
                all_turns,
                cache,
                batch,
                routed,
            )
        return hidden, cache, found


def find_logits(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Return the logits, f32[R, V], of normed hidden states [R, E]."""
    head = params["embedding" if config.tied else "head"]
    logits = multiply(hidden, head, jnp.float32)
    if config.has_head_bias:
        logits = logits + params["head_bias"].astype(jnp.float32)[None, :]
    return cap(logits * config.logit_scale, config.logit_cap)


def _embed_rows(
    config: DecoderConfig, params: Params, tokens: jax.Array, batch: jkv.Batch
) -> tuple[jax.Array, jax.Array]:
    """Return ids in the vocabulary, i32[R], and the first layer's inputs, [R, E]."""
    given, number = params.get("given_rows"), tokens - config.vocab_size
    is_given = None
    if given is not None:
        is_given = (number >= 0) & (number < given.shape[0])
        tokens = jnp.where(is_given, PADDING, tokens)
    hidden = embed(params["embedding"], tokens, batch.valid)
    if config.has_embedding_norm:
        hidden = norm_plainly(config, hidden)
    hidden = hidden * config.embedding_scale
    if is_given is None:
        return tokens, hidden
    rows = given.at[number].get(mode="clip").astype(hidden.dtype)
    return tokens, jnp.where(is_given[:, None], rows, hidden)


def _join_runs(
    config: DecoderConfig, layers: Sequence[Weights]
) -> list[tuple[Run, Weights | Layers]]:
    """Return the runs with their arrays; with ``loop_layers``, join equal runs.

    Runs with experts stay apart, since experts are read out of a stack.
    """
    pairs = list(zip(config.runs, layers, strict=True))
    if not config.has_loops:
        return pairs

    def kind(pair: tuple[Run, Weights]) -> Any:
        run, weights = pair
        if run.feeds == "experts" or run.mixers != (ATTENTION,):
            return run.start
        shapes = tuple((n, a.shape, a.dtype) for n, a in sorted(weights.items()))
        return run.mixers, run.feeds, config.has_spans(run.start), shapes

    joined: list[tuple[Run, Weights | Layers]] = []
    for _, alike in itertools.groupby(pairs, kind):
        runs, each = zip(*alike, strict=True)
        if len(runs) == 1:
            joined.append((runs[0], each[0]))
            continue
        alone = [{name: array[0] for name, array in layer.items()} for layer in each]
        run = runs[0]._replace(stop=runs[-1].stop)
        joined.append((run, Layers(alone)))
    return joined


def _cut_runs(
    runs: list[tuple[Run, Weights | Layers]], layers: tuple[int, ...]
) -> list[tuple[Run, Weights | Layers]]:
    """Split runs so that each layer of `layers` is the first of one."""
    parts: list[tuple[Run, Weights | Layers]] = []
    for run, weights in runs:
        inside = sorted({i for i in layers if run.start < i < run.stop})
        edges = [run.start, *inside, run.stop]
        for start, stop in itertools.pairwise(edges):
            part = weights
            if len(edges) > 2:
                own = slice(start - run.start, stop - run.start)
                part = (
                    Layers(weights.each[own])
                    if isinstance(weights, Layers)
                    else {name: array[own] for name, array in weights.items()}
                )
            parts.append((run._replace(start=start, stop=stop), part))
    return parts


def _run_layers(
    config: DecoderConfig,
    run: Run,
    weights: Weights | Layers,
    hidden: jax.Array,
    layer_inputs: jax.Array | None,
    all_turns: Rotations,
    cache: jkv.Cache,
    batch: jkv.Batch,
    routed: jax.Array | None,
) -> tuple[jax.Array, jkv.Cache, jax.Array | None]:
    """Run hidden states through the layers of one run."""
    experts: Weights = {}
    others = weights
    if not isinstance(weights, Layers):
        # A scan copies each layer's weights. A step uses few of many experts.
        experts = {n: w for n, w in weights.items() if n.startswith("expert_")}
        others = {n: w for n, w in weights.items() if n not in experts}

    def run_layer(carry, index, number, weights, window, kind):
        hidden, cache, routed = carry
        if run.mixers:
            normed = _norm_input(config, hidden, weights, "attention_norm")
            turns = tuple(array[kind] for array in all_turns)
            mixed, cache = _mix(
                config, run, weights, normed, turns, cache, number, batch, window
            )
            mixed = norm(config, mixed, weights, "attention_post_norm")
            hidden = _add(config, weights, hidden, mixed, "attention")
        if run.feeds:
            if not config.is_parallel:
                normed = _norm_input(config, hidden, weights, "mlp_norm")
            if run.feeds == "experts":
                fed, routed = mix_experts(
                    config,
                    weights,
                    experts,
                    index,
                    hidden,
                    normed,
                    batch.valid,
                    routed,
                )
            else:
                fed = perceptron(config, normed, weights)
            fed = norm(config, fed, weights, "mlp_post_norm")
            hidden = _add(config, weights, hidden, fed, "mlp")
        if layer_inputs is not None:
            hidden = hidden + apply_layer_input(
                config, weights, hidden, layer_inputs[number]
            )
        if config.has_layer_scales:
            hidden = hidden * weights["layer_scale"][None, :]
        return hidden, cache, routed

    carry = hidden, cache, routed
    if run.stop - run.start == 1:
        return _run_alone(config, run, 0, run_layer, carry, others)
    scan = _scan_periods if len(cache.storage) > 1 else _scan_layers
    return scan(config, run, run_layer, carry, others)


def _norm_input(config, hidden, weights, name):
    """Return the normed input of attention or the MLP."""
    if config.has_residual_scales:
        hidden = hidden.astype(weights[name].dtype)
    return norm(config, hidden, weights, name)


def _add(config, weights, hidden, mixed, part):
    """Add the output of attention or the MLP to the residual, [R, E]."""
    if not config.has_residual_scales:
        return hidden + mixed * config.residual_scale
    kept = _scale_rows(weights, f"{part}_kept", hidden)
    return _scale_rows(weights, f"{part}_mixed", mixed) + kept


def _scale_rows(weights, name, rows):
    """Add learnt biases to rows [R, E], then multiply by learnt scales, in float32."""
    bias, scale = (
        weights[f"{name}_{kind}"].astype(jnp.float32)[None, :]
        for kind in ("bias", "scale")
    )
    return (rows.astype(jnp.float32) + bias) * scale


def _mix(config, run, weights, x, turns, cache, number, batch, window):
    """Return the sum of a layer's token mixers, [R, E], and the cache."""
    parts, projected = [], None
    mixers = [MIXERS[name] for name in run.state_mixers]
    for mixer in mixers:
        if mixer.feeds_attention:
            fold = functools.partial(jkv.fold_state, cache, number, batch)
            projected, cache = mixer.apply(config, weights, x, fold)
    # Layers with shared keys run one by one, so that their index is static.
    of_keys = config.key_layers[number] if config.key_layers else number
    if run.has_attention:
        if config.query_heads:
            own = config.find_query_heads(run.start)
            config = dataclasses.replace(config, num_heads=own)
        scale_in, scale_out = config.attention_scales
        attended, cache = attend(
            config,
            weights,
            x * scale_in,
            turns,
            cache,
            of_keys,
            batch,
            window,
            causal=not config.has_spans(run.start),
            projected=projected,
        )
        parts.append(attended * scale_out)
    for mixer in mixers:
        if not mixer.feeds_attention:
            fold = functools.partial(jkv.fold_state, cache, number, batch)
            mixed, cache = mixer.apply(config, weights, x, fold)
            parts.append(mixed)
    return sum(parts[1:], parts[0]), cache


def _run_alone(config, run, index, run_layer, carry, weights):
    """Run one layer of a run, outside a scan."""
    number, layer = run.start + index, _pick(weights, index)
    window, kind = config.windows[number], config.turn_kinds[number]
    return run_layer(carry, index, number, layer, window, kind)


def _pick(weights: Weights | Layers, index: Any) -> Weights:
    """Return the arrays of one layer of a run; the index may be traced."""
    if isinstance(weights, Layers):
        return weights.each[index] if isinstance(index, int) else weights.at(index)
    return {name: array[index] for name, array in weights.items()}


def _scan_layers(config, run, run_layer, carry, weights):
    """Scan over layers, and over their windows and ropes if these differ."""

    def step(counted, layer):
        (index, carry), (stacked, window, kind) = counted, layer
        of_layer = _pick(weights, index) if stacked is None else stacked
        window = config.windows[run.start] if window is None else window
        kind = config.turn_kinds[run.start] if kind is None else kind
        carry = run_layer(carry, index, index + run.start, of_layer, window, kind)
        return (index + 1, carry), None

    windows = [NO_WINDOW if window is None else window for window in config.windows]
    layers = (
        None if isinstance(weights, Layers) else weights,
        _differing(windows[run.start : run.stop]),
        _differing(config.turn_kinds[run.start : run.stop]),
    )
    # The index is carried: reading it from a scanned array is one more GPU launch.
    first, length = jnp.int32(0), run.stop - run.start
    (_, carry), _ = jax.lax.scan(step, (first, carry), layers, length)
    return carry


def _scan_periods(config, run, run_layer, carry, weights):
    """Run layers of a grouped cache, which needs each layer's window statically.

    A step of the scan runs one period of the windows; the remaining layers run one by
    one.
    """
    windows, num_layers = config.windows, run.stop - run.start
    period = next(
        n
        for n in range(1, len(windows) + 1)
        if all(window == windows[i % n] for i, window in enumerate(windows))
    )
    num_steps = 0 if run.start % period else num_layers // period

    kinds = jnp.asarray(config.turn_kinds, jnp.int32)

    def step(carry, step_number):
        for i in range(period):
            index, window = step_number * period + i, windows[run.start + i]
            layer = _pick(weights, index)
            periods = run.start // period + step_number
            number = carry[1].find_periodic(i, period, periods)
            kind = kinds[run.start + index]
            carry = run_layer(carry, index, number, layer, window, kind)
        return carry, None

    # A scan of zero steps would be traced too, with the windows of other layers.
    if num_steps:
        carry, _ = jax.lax.scan(step, carry, jnp.arange(num_steps, dtype=jnp.int32))
    for index in range(num_steps * period, num_layers):
        carry = _run_alone(config, run, index, run_layer, carry, weights)
    return carry


def stack_turns(config: DecoderConfig, batch: jkv.Batch) -> Rotations:
    """Return cosine and sine of each different rope, f32[ropes, R, 1, dim / 2] each.

    Tuples over ropes if these rotate different dims; such layers run one by one.
    """
    # A row belongs to the last request that starts at or before it.
    rows = jnp.arange(batch.num_rows, dtype=jnp.int32)
    owner = jnp.searchsorted(batch.query_starts, rows, side="right") - 1
    # Lengths from positions, which count tokens dropped by `prune`; slots do not.
    last = jnp.clip(batch.query_starts + batch.query_lengths - 1, 0, len(rows) - 1)
    lengths = batch.positions[last][owner] + 1
    pairs = [
        turns(rope, config.turned_dim, batch.positions, lengths)
        for rope in dict.fromkeys(config.ropes)
    ]
    cos, sin = zip(*pairs, strict=True)
    if len({each.shape for each in cos}) > 1:
        return cos, sin
    return jnp.stack(cos), jnp.stack(sin)


def _differing(numbers: Sequence[int]) -> jax.Array | None:
    """Return one number per layer to scan over, i32[L]; None if all are equal."""
    return None if len(set(numbers)) == 1 else jnp.asarray(numbers, jnp.int32)
