"""Cache configurations of a model: attention with or without windows, and states."""

import dataclasses
from typing import Any

import jkv

from .config import ATTENTION, DecoderConfig


def attention_fields(config: DecoderConfig, num_layers: int) -> dict[str, Any]:
    """Return the fields of ``jkv.CacheConfig`` that depend on the model's attention.

    Raises:
        ValueError: if layers have different heads, which do not fit into one pool.
    """
    if config.layer_heads:
        raise ValueError(
            "the model's layers differ in their heads, so that its cache needs a group "
            "for each kind; use Decoder.cache_config or GroupedConfig.from_model"
        )
    fields: dict[str, Any] = {
        "num_layers": num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    if config.latent:
        fields |= {"value_head_dim": config.latent.rank, "values_in_keys": True}
    return fields


def choose_config(
    config: DecoderConfig,
    max_context_length: int,
    *,
    max_sequences: int,
    step_tokens: int | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    prefix_caching: bool = False,
    max_pending: int = 0,
    num_snapshots: int | None = None,
    snapshot_every: int | None = None,
    **sizes: Any,
) -> jkv.CacheConfig | jkv.GroupedConfig:
    """Return a cache configuration with a group for each kind of layer.

    Args:
        config: the model's configuration.
        max_context_length: maximum tokens of a sequence.
        max_sequences: maximum number of sequences.
        step_tokens: maximum tokens per step and sequence; if given, layers with a
            sliding window have their own pool, which releases old tokens.
        num_blocks: pool size of attention layers; default: enough for all sequences.
        block_size: tokens per block.
        prefix_caching: enables prefix caching.
        max_pending: for recurrent-state layers, the number of tokens that can be rolled
            back, such as draft tokens of a step.
        num_snapshots, snapshot_every: for recurrent-state layers and `prefix_caching`,
            the number of snapshots and their interval in tokens; the defaults are two
            per sequence and 16 blocks.
        **sizes: further fields of ``jkv.CacheConfig``, such as a dtype.

    Raises:
        ValueError: for `observed_queries` if layers differ in their query heads.
    """
    sizes |= dict(max_sequences=max_sequences, block_size=block_size)
    if sizes.get("observed_queries"):
        if config.query_heads:
            raise ValueError(
                "observed_queries needs layers with equally many query heads, and this "
                f"model's have {sorted({*config.query_heads})}"
            )
        sizes |= dict(num_query_heads=config.num_heads)
    if config.has_states:
        if prefix_caching and num_snapshots is None:
            num_snapshots = 2 * max_sequences
        if prefix_caching and snapshot_every is None:
            snapshot_every = 16 * block_size
        return _group_by_mixer(
            config,
            max_context_length,
            sizes,
            step_tokens=step_tokens,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            max_pending=max_pending,
            num_snapshots=num_snapshots or 0,
            snapshot_every=snapshot_every,
        )
    if config.layer_heads:
        return _group_by_heads(
            config,
            max_context_length,
            sizes,
            step_tokens=step_tokens,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
        )
    fields = attention_fields(config, config.num_cached_layers) | sizes
    if step_tokens is not None:
        del fields["num_layers"]
        windows = [
            find_window(config, layer, max_context_length, step_tokens)
            for layer in range(len(config.windows))
        ]
        return jkv.GroupedConfig.for_context_length(
            max_context_length,
            layer_windows=windows,
            step_tokens=step_tokens,
            prefix_caching=prefix_caching,
            **fields,
        )
    chosen = jkv.CacheConfig.for_context_length(
        max_context_length, prefix_caching=prefix_caching, **fields
    )
    return dataclasses.replace(chosen, num_blocks=num_blocks) if num_blocks else chosen


def find_window(
    config: DecoderConfig, layer: int, max_context_length: int, step_tokens: int | None
) -> int | None:
    """Return a layer's window; None if its pool keeps all tokens, or never fills it."""
    window = config.windows[layer] if step_tokens is not None else None
    return None if window is None or window >= max_context_length else window


def _size_pool(
    group: jkv.CacheConfig, step_tokens: int | None, num_blocks: int | None
) -> jkv.CacheConfig:
    """Set the blocks of a pool; by default, no sequence ever lacks one."""
    most = group.most_blocks(step_tokens or group.max_context_length)
    return dataclasses.replace(
        group, num_blocks=num_blocks or group.max_sequences * most
    )


def _group_by_heads(
    config: DecoderConfig,
    max_context_length: int,
    sizes: dict[str, Any],
    *,
    step_tokens: int | None,
    num_blocks: int | None,
    prefix_caching: bool,
) -> jkv.GroupedConfig:
    """Return a group for each pair of heads and window, full attention first."""

    def find_kind(layer: int) -> tuple[int | None, tuple[int, int]]:
        window = find_window(config, layer, max_context_length, step_tokens)
        return window, config.find_heads(layer)

    layers = [find_kind(layer) for layer in range(config.num_cached_layers)]
    kinds = sorted(dict.fromkeys(layers), key=lambda kind: -(kind[0] or 2**31))
    groups = []
    for window, (num_kv_heads, head_dim) in kinds:
        group = jkv.CacheConfig(
            num_layers=layers.count((window, (num_kv_heads, head_dim))),
            num_blocks=1,
            max_context_length=max_context_length,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            sliding_window=window,
            **sizes,
        )
        groups.append(_size_pool(group, step_tokens, num_blocks))
    return jkv.GroupedConfig(
        groups=tuple(groups),
        layer_groups=tuple(map(kinds.index, layers)),
        prefix_caching=prefix_caching,
    )


def _group_by_mixer(
    config: DecoderConfig,
    max_context_length: int,
    sizes: dict[str, Any],
    *,
    step_tokens: int | None,
    num_blocks: int | None,
    prefix_caching: bool,
    **of_states: Any,
) -> jkv.GroupedConfig:
    """Return a group for each attention window and for each recurrent mixer."""

    def list_kinds(layer: int) -> tuple[tuple[str, int | None], ...]:
        window = find_window(config, layer, max_context_length, step_tokens)
        mixers = config.layer_mixers[layer]
        return tuple((name, window if name == ATTENTION else None) for name in mixers)

    layers = [list_kinds(layer) for layer in range(config.num_layers)]
    kinds = list(dict.fromkeys(kind for own in layers for kind in own))
    # Windows last, the longest first.
    kinds.sort(key=lambda kind: -(kind[1] or 2**31))
    groups = []
    for name, window in kinds:
        num_layers = sum((name, window) in own for own in layers)
        if name == ATTENTION:
            group = jkv.CacheConfig(
                num_blocks=1,
                max_context_length=max_context_length,
                sliding_window=window,
                **attention_fields(config, num_layers),
                **sizes,
            )
            group = _size_pool(group, step_tokens, num_blocks)
        else:
            group = jkv.StateConfig(
                num_layers=num_layers,
                max_sequences=sizes["max_sequences"],
                max_context_length=max_context_length,
                block_size=sizes["block_size"],
                # States are float32 for all dtypes of the model.
                **config.state.as_fields(
                    "float32", has_inputs=bool(of_states["max_pending"])
                ),
                **of_states,
            )
        groups.append(group)
    numbers = (tuple(map(kinds.index, own)) for own in layers)
    return jkv.GroupedConfig(
        groups=tuple(groups),
        layer_groups=tuple(each[0] if len(each) == 1 else each for each in numbers),
        prefix_caching=prefix_caching,
    )
