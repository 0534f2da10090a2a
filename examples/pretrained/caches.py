"""The cache of a sequence: keys and values, with or without a window, and states."""

import dataclasses
from typing import Any

import jkv

from .config import ATTENTION, DecoderConfig


def attention_fields(config: DecoderConfig, num_layers: int) -> dict[str, Any]:
    """Return the fields of ``jkv.CacheConfig`` that a model's attention decides.

    Raises:
        ValueError: when layers differ in their heads, so that one pool has no place
            for all of them.
    """
    if config.layer_heads:
        raise ValueError(
            "the model's layers differ in their heads, so that its cache needs a group "
            "for each kind: take Decoder.cache_config, or GroupedConfig.from_model"
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
    """Return a configuration whose groups are the kinds of the model's layers.

    Args:
        config: the model's settings.
        max_context_length: most tokens of a sequence.
        max_sequences: sequences at one time, which never lack blocks.
        step_tokens: most tokens that a step adds to one sequence; then layers with a
            window have a pool of their own, which releases tokens outside the window.
        num_blocks: of the layers with keys and values, instead of enough for all.
        block_size: tokens of a block.
        prefix_caching: enables prefix cache hits of later prompts.
        max_pending: of layers with a state: tokens that may be taken back, as many as
            a step guesses.
        num_snapshots, snapshot_every: of layers with a state, for `prefix_caching`: how
            many copies are kept, and after how many tokens one is made. None: two for
            each sequence, after 16 blocks.
        **sizes: further fields of ``jkv.CacheConfig``: a dtype.
    """
    sizes |= dict(max_sequences=max_sequences, block_size=block_size)
    if config.has_states:
        if prefix_caching and num_snapshots is None:
            num_snapshots = 2 * max_sequences
        if prefix_caching and snapshot_every is None:
            snapshot_every = 16 * block_size
        return _group_by_mixer(
            config,
            max_context_length,
            sizes,
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
            None if window is None or window >= max_context_length else window
            for window in config.windows
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


def _group_by_heads(
    config: DecoderConfig,
    max_context_length: int,
    sizes: dict[str, Any],
    *,
    step_tokens: int | None,
    num_blocks: int | None,
    prefix_caching: bool,
) -> jkv.GroupedConfig:
    """Return a group for each kind of heads and window, that without a window first."""

    def find_kind(layer: int) -> tuple[int | None, tuple[int, int]]:
        window = config.windows[layer] if step_tokens is not None else None
        is_seen = window is not None and window < max_context_length
        return window if is_seen else None, config.find_heads(layer)

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
        most = group.most_blocks(step_tokens or max_context_length)
        blocks = num_blocks or sizes["max_sequences"] * most
        groups.append(dataclasses.replace(group, num_blocks=blocks))
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
    num_blocks: int | None,
    prefix_caching: bool,
    **of_states: Any,
) -> jkv.GroupedConfig:
    """Return a group for attention, and one for each mixer that keeps a state."""
    kinds = list(dict.fromkeys(kind for kinds in config.layer_mixers for kind in kinds))
    groups = []
    for kind in kinds:
        num_layers = sum(kind in mixers for mixers in config.layer_mixers)
        if kind == ATTENTION:
            group = jkv.CacheConfig.for_context_length(
                max_context_length, **attention_fields(config, num_layers), **sizes
            )
            if num_blocks:
                group = dataclasses.replace(group, num_blocks=num_blocks)
        else:
            group = jkv.StateConfig(
                num_layers=num_layers,
                max_sequences=sizes["max_sequences"],
                max_context_length=max_context_length,
                block_size=sizes["block_size"],
                # States are kept in float32, for every dtype of the model.
                **config.state.as_fields(
                    "float32", has_inputs=bool(of_states["max_pending"])
                ),
                **of_states,
            )
        groups.append(group)
    numbers = (tuple(map(kinds.index, mixers)) for mixers in config.layer_mixers)
    return jkv.GroupedConfig(
        groups=tuple(groups),
        layer_groups=tuple(each[0] if len(each) == 1 else each for each in numbers),
        prefix_caching=prefix_caching,
    )
