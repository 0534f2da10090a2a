"""Cache-related settings of a model's layers: kinds, windows, heads and states.

The reader is jkv's own, which also plans caches from a config.json without weights.
"""

from typing import Any

from jkv.config import (
    WINDOWED,
    Heads,
    LayerState,
    all_windowed,
    early_windowed,
    find_family,
    is_switched_off,
    late_windowed,
    list_heads,
    list_states,
    list_windows,
    name_layers,
)

from .settings import Settings

KINDS_OF_WINDOWS = {"full_attention", WINDOWED}


def list_kinds(settings: Settings, num_layers: int = 0) -> list[str] | None:
    """Return the kind of each layer, as in `layer_types`; None if all have attention.

    Args:
        settings: the config.json.
        num_layers: expected number of layers; 0 for any.

    Raises:
        ValueError: if the number of layers differs.
    """
    for name in ("layer_types", "layers_block_type"):
        settings.names(name)
    for name in ("attn_layer_indices", "full_attn_idxs", "no_rope_layers"):
        settings.ints(name)
    pattern = settings.get("sliding_window_pattern")
    # EXAONE's is a string such as "LLLG", or 0 without windows.
    is_of_letters = isinstance(pattern, str) and not set(pattern) - {"L", "G"}
    if pattern is not None and not is_of_letters:
        settings.count("sliding_window_pattern", least=0)
    kinds = name_layers(_merge(settings), num_layers)
    if kinds is not None and num_layers not in (0, len(kinds)):
        raise ValueError(
            f"config.json: layer_types must name {num_layers} layers "
            f"(num_hidden_layers), got {len(kinds)}"
        )
    return kinds


def read_windows(settings: Settings, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, including the token itself; None for none.

    Raises:
        ValueError: for inconsistent settings.
    """
    windowed, model = list_windowed(settings, num_layers), _merge(settings)
    if settings.get("sliding_window") is not None:
        settings.count("sliding_window")
    name = find_family(model).kinds
    counts_layers = name in (late_windowed, early_windowed)
    if settings.flag("use_sliding_window") and counts_layers:
        settings.count("max_window_layers", least=0)
    has_window = model.get("sliding_window") and not is_switched_off(model)
    if has_window and name is all_windowed and not all(windowed):
        raise ValueError(
            "config.json: mixed layer_types are not supported for this architecture"
        )
    return list_windows(model, list_kinds(settings, num_layers), num_layers)


def list_windowed(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with a sliding window.

    Raises:
        ValueError: for layers of other kinds.
    """
    kinds = list_kinds(settings, num_layers) or ["full_attention"] * num_layers
    unknown = sorted({str(kind) for kind in kinds} - KINDS_OF_WINDOWS)
    if unknown:
        raise ValueError(
            f"config.json: layer_types must name layers of full_attention or "
            f"sliding_attention; unknown {unknown}"
        )
    return tuple(kind == WINDOWED for kind in kinds)


def read_state(settings: Settings, num_layers: int) -> LayerState | None:
    """Return the state of recurrent-state layers, or None without such layers.

    Raises:
        ValueError: for invalid sizes.
    """
    states = list_states(_merge(settings), list_kinds(settings, num_layers))
    return next(filter(None, states), None)


def list_turned(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with rotary position embeddings."""
    turned = settings.ints("no_rope_layers")  # 1 for RoPE
    if turned is None:
        every = settings.count("no_rope_layer_interval")
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    if len(turned) != num_layers:
        raise ValueError(
            f"config.json: no_rope_layers must have {num_layers} numbers, "
            f"got {len(turned)}"
        )
    return tuple(map(bool, turned))


def read_layer_heads(
    settings: Settings, windowed: tuple[bool, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the number of kv heads and the head dim of each layer.

    Raises:
        ValueError: for unsupported differences between layers.
    """
    heads, dim = settings.count("num_key_value_heads"), settings.count("head_dim")
    usual = Heads(heads, dim, dim)
    layers = list_heads(_merge(settings), usual, dict(enumerate(windowed)))
    return tuple((each.num_kv_heads, each.head_dim) for each in layers)


def _merge(settings: Settings) -> dict[str, Any]:
    return {**settings.defaults, **settings.raw}
