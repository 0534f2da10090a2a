"""Which layers of a model look back over a window of tokens only."""

from typing import Literal

from .settings import Settings, is_int

# Of layers that a config.json does not list: none of them have a window, or all, or all
# but each n-th; and only if `use_sliding_window` is set, all of them, those from
# `max_window_layers` on, every other one before it, or those without rotary positions.
Pattern = Literal["none", "all", "used", "late", "early", "unturned"] | int
SWITCHED = ("used", "late", "early", "unturned")


def read_windows(
    settings: Settings, pattern: Pattern, num_layers: int
) -> tuple[int | None, ...]:
    """Return what each layer sees in tokens, itself counted; None is everything.

    Raises:
        ValueError: for settings that do not fit each other or the pattern.
    """
    if pattern in SWITCHED and not settings.flag("use_sliding_window"):
        return (None,) * num_layers
    if pattern == "none" or settings.get("sliding_window") is None:
        return (None,) * num_layers
    length = settings.count("sliding_window")
    windowed = list_windowed(settings, pattern, num_layers)
    return tuple(length if is_windowed else None for is_windowed in windowed)


def list_windowed(
    settings: Settings, pattern: Pattern, num_layers: int
) -> tuple[bool, ...]:
    """Return for each layer whether it is of the kind that has a window."""
    kinds = settings.get("layer_types")
    if kinds is not None:
        return _read_kinds(kinds, pattern, num_layers)
    if pattern == "unturned":
        return tuple(not turns for turns in list_turned(settings, num_layers))
    if pattern == "late":
        first = settings.count("max_window_layers", least=0)
        return tuple(i >= first for i in range(num_layers))
    if pattern == "early":
        last = settings.count("max_window_layers", least=0)
        return tuple(i < last and i % 2 == 0 for i in range(num_layers))
    if is_int(pattern):
        # Gemma 3 has the number in early files.
        every = settings.count("sliding_window_pattern", pattern)
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    return (pattern != "none",) * num_layers


def list_turned(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether positions turn its queries and keys."""
    turned = settings.ints("no_rope_layers")  # 1 where they do
    if turned is None:
        every = settings.count("no_rope_layer_interval")
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    if len(turned) != num_layers:
        raise ValueError(
            f"config.json: no_rope_layers must have {num_layers} numbers, "
            f"got {len(turned)}"
        )
    return tuple(map(bool, turned))


def _read_kinds(kinds: object, pattern: Pattern, num_layers: int) -> tuple[bool, ...]:
    if not isinstance(kinds, list):
        raise ValueError(f"config.json: 'layer_types' must be a list, got {kinds!r}")
    known = {"full_attention", "sliding_attention"}
    unknown = sorted({str(kind) for kind in kinds} - known)
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"config.json: layer_types must name {num_layers} layers, each "
            f"full_attention or sliding_attention; got {len(kinds)}, unknown {unknown}"
        )
    if pattern == "all" and "full_attention" in kinds:
        raise ValueError(
            "config.json: mixed layer_types are not supported for this architecture"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)
