"""RoPE settings of a config.json, in the format before or since transformers 5.

Before: ``rope_theta`` at the top level, and ``rope_scaling``, null or a dict with its
kind under ``rope_type`` or ``type``. Since: all settings in ``rope_parameters``.
"""

import math
from collections.abc import Mapping
from typing import Any

from .rope import SCALINGS, Rope
from .settings import Settings, is_int, is_number, is_set

# The name of longrope in early checkpoints of Phi-3.
OLD_NAMES = {"su": "longrope"}
DEFAULT_THETA = 10_000.0
KINDS = "full_attention", "sliding_attention"


def rope_parameters(settings: Settings) -> Mapping[str, Any]:
    """Return the dict of either format; empty without one."""
    return settings.part("rope_scaling", {}) or settings.part("rope_parameters", {})


def pair_rope_parameters(
    settings: Settings, full: Mapping[str, Any], windowed: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return RoPE settings of full attention and sliding window layers.

    As in transformers: a ``rope_scaling`` without kinds of layers applies to full
    attention only, and a ``rope_parameters`` without kinds is ignored.

    Args:
        settings: the config.json.
        full, windowed: default settings of both kinds.
    """
    of_kinds = [{**full}, {**windowed}]
    for name in ("rope_parameters", "rope_scaling"):
        given = settings.part(name, {})
        if given.keys() & {*KINDS}:
            for own, kind in zip(of_kinds, KINDS, strict=True):
                own |= Settings(given).part(kind, {})
        elif name == "rope_scaling":
            of_kinds[0] |= given
    return of_kinds[0], of_kinds[1]


def list_rope_parameters(
    settings: Settings, usual: Mapping[str, Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the RoPE settings of each kind of layer, in the order of `usual`.

    Args:
        settings: the config.json.
        usual: by kind, default settings of a file without any.

    Raises:
        ValueError: if the file has settings, but not of every kind.
    """
    given = rope_parameters(settings) or usual
    missing = [kind for kind in usual if not isinstance(given.get(kind), Mapping)]
    if missing:
        raise ValueError(
            f"config.json: RoPE settings must have those of {' and '.join(usual)} in "
            f"rope_parameters, got {sorted(given)}"
        )
    return [given[kind] for kind in usual]


def read_rope(
    settings: Settings,
    dim: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    can_be_partial: bool = False,
) -> Rope:
    """Read the rotary embedding of heads with `dim` components.

    Args:
        settings: the config.json.
        dim: components of a head, before ``partial_rotary_factor`` is applied.
        parameters: RoPE settings to use instead of `rope_parameters`.
        can_be_partial: True if the architecture may rotate a part of each head.

    Raises:
        ValueError: for an unsupported scaling, or a missing or invalid number.
    """
    given = rope_parameters(settings) if parameters is None else parameters
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(
            "config.json gives RoPE settings per kind of layer, which is not supported "
            f"for this architecture: {sorted(given)}; its layers rotate alike"
        )
    scaling = given.get("rope_type", given.get("type"))
    scaling = "default" if scaling is None else scaling
    scaling = OLD_NAMES.get(scaling, scaling) if isinstance(scaling, str) else scaling
    if scaling not in SCALINGS:
        raise ValueError(
            f"config.json: RoPE scaling has the rope_type or type {scaling!r}; "
            "supported are " + ", ".join(SCALINGS)
        )
    rope = Rope(
        dim=dim
        if scaling == "proportional"
        else _read_dim(settings, given, dim, can_be_partial),
        theta=_number(given, "rope_theta", settings.get("rope_theta", DEFAULT_THETA)),
        is_interleaved=settings.flag("rope_interleave"),
        scaling=scaling,
        **READERS[scaling](settings, given),
    )
    # Their formulas divide by dim - 2 and by the logarithm of theta.
    if (scaling == "dynamic" and rope.dim <= 2) or (
        scaling == "yarn" and rope.theta == 1
    ):
        raise ValueError(
            f"config.json: {scaling} RoPE scaling needs more than 2 rotated components "
            f"and a rope_theta other than 1, got {rope.dim} and {rope.theta}"
        )
    for name in ("short_factors", "long_factors"):
        if scaling == "longrope" and len(getattr(rope, name)) != rope.dim // 2:
            raise ValueError(
                f"config.json: RoPE scaling needs {rope.dim // 2} {name}, one for each "
                "pair of rotated components (partial_rotary_factor), got "
                f"{len(getattr(rope, name))}"
            )
    return rope


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return yarn's scale of queries and keys, for frequencies divided by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _read_dim(
    settings: Settings, given: Mapping[str, Any], dim: int, can_be_partial: bool
) -> int:
    """Return the number of rotated components."""
    part = given.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if part != 1.0 and not can_be_partial:
        raise ValueError(
            f"config.json rotates only a part of each head (partial_rotary_factor "
            f"{part!r}), which is not supported for this architecture"
        )
    if not is_number(part) or not 0 < part <= 1 or int(dim * part) % 2:
        raise ValueError(
            f"config.json: partial_rotary_factor must leave an even part of {dim} "
            f"components, got {part!r}"
        )
    return int(dim * part)


def _number(given: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = given.get(key)
    value = default if value is None else value
    if not is_number(value) or value <= 0:
        raise ValueError(
            f"config.json: RoPE scaling needs a positive {key!r}, got {value!r}"
        )
    return float(value)


def _original_context(settings: Settings, given: Mapping[str, Any]) -> int:
    """Return the context length before scaling, looked up as in transformers."""
    key = "original_max_position_embeddings"
    found = settings.get(key) or given.get(key)
    found = settings.get("max_position_embeddings") if found is None else found
    if not is_int(found) or found < 1:
        raise ValueError(f"config.json: RoPE scaling needs a positive {key}: {found!r}")
    return int(found)


def _read_linear(_: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    return dict(factor=_number(given, "factor"))


def _read_dynamic(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    longest = settings.count("max_position_embeddings")
    return dict(factor=_number(given, "factor"), original_context=longest)


def _read_llama3(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if high <= low:
        raise ValueError(
            "config.json: llama3 RoPE scaling needs high_freq_factor above "
            f"low_freq_factor, got {high} and {low}"
        )
    return dict(
        factor=_number(given, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_original_context(settings, given),
    )


def _read_yarn(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    original = _original_context(settings, given)
    longest = settings.count("max_position_embeddings")
    factor = _number(given, "factor", longest / original)
    magnitude = yarn_magnitude(factor)
    if is_set(given, "mscale") and is_set(given, "mscale_all_dim"):
        # DeepSeek: the scale of the scores already includes `mscale_all_dim`.
        magnitude = yarn_magnitude(factor, _number(given, "mscale"))
        magnitude /= yarn_magnitude(factor, _number(given, "mscale_all_dim"))
    return dict(
        factor=factor,
        original_context=original,
        fast_turns=_number(given, "beta_fast", 32.0),
        slow_turns=_number(given, "beta_slow", 1.0),
        is_truncated=Settings(given).flag("truncate", True),
        magnitude=_number(given, "attention_factor", magnitude),
    )


def _read_longrope(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    original = _original_context(settings, given)
    longest = settings.count("max_position_embeddings")
    factor = _number(given, "factor", longest / original)
    magnitude = 1.0
    if factor > 1 and original < 2:
        raise ValueError(
            "config.json: longrope needs an original_max_position_embeddings of 2 or "
            f"more, got {original}"
        )
    if factor > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {}
    for name in ("short_factor", "long_factor"):
        values = given.get(name)
        if not isinstance(values, list) or not all(
            is_number(value) and value > 0 for value in values
        ):
            raise ValueError(
                f"config.json: {name} must be numbers above 0, got {values!r}"
            )
        factors[f"{name}s"] = tuple(map(float, values))
    return dict(
        original_context=original,
        magnitude=_number(given, "attention_factor", magnitude),
        **factors,
    )


def _read_proportional(_: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    part = _number(given, "partial_rotary_factor", 1.0)
    if part > 1:
        raise ValueError(
            f"config.json: partial_rotary_factor must be at most 1, got {part!r}"
        )
    return dict(factor=_number(given, "factor", 1.0), part=part)


READERS = {
    "default": lambda _, __: {},
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
}
