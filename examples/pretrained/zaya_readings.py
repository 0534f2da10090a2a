"""Reader of ZAYA's config.json, like the functions of `readings.py`."""

from typing import Any

from jkv.config import BOTH, BOTH_WINDOWED

from .kept_by_layers import list_kinds
from .parts import ConvolvedHeads, Experts
from .rope_settings import list_rope_parameters, read_rope
from .settings import Settings

# Default RoPE settings by kind of layer.
ROPES = dict(
    hybrid=dict(rope_theta=5e6, partial_rotary_factor=0.5),
    hybrid_sliding=dict(rope_theta=10_000.0, partial_rotary_factor=0.5),
)
KINDS = (BOTH, BOTH_WINDOWED)  # in the same order


def read_zaya(settings: Settings) -> dict[str, Any]:
    """Read convolved queries and keys, ropes by kind, and experts in all layers."""
    num_layers = settings.count("num_hidden_layers")
    kinds = list_kinds(settings, num_layers)
    if kinds is None or set(kinds) - {*KINDS}:
        raise ValueError(
            f"config.json: layer_types must name {num_layers} layers, each "
            f"{' or '.join(ROPES)}, got {settings.get('layer_types')!r}"
        )
    if settings.count("num_experts_per_tok") != 1:
        raise ValueError(
            "config.json: num_experts_per_tok must be 1 for this architecture, got "
            f"{settings.get('num_experts_per_tok')}"
        )
    widths = settings.count("cca_time0"), settings.count("cca_time1")
    kv_heads, dim = settings.count("num_key_value_heads"), settings.count("head_dim")
    if widths == (1, 1):
        raise ValueError(
            "config.json: cca_time0 and cca_time1 must not both be 1, as values "
            "include the previous token's"
        )
    given = list_rope_parameters(settings, ROPES)
    ropes = {
        kind: read_rope(settings, dim, parameters, can_be_partial=True)
        for kind, parameters in zip(KINDS, given, strict=True)
    }
    window = settings.count("sliding_window") if BOTH_WINDOWED in kinds else None
    return dict(
        mixers=(("attention", "convolved_heads"),) * num_layers,
        convolved_heads=ConvolvedHeads(widths=widths),
        windows=tuple(window if kind == BOTH_WINDOWED else None for kind in kinds),
        ropes=tuple(map(ropes.__getitem__, kinds)),
        num_kv_heads=kv_heads,
        experts=Experts(
            count=settings.count("num_experts"),
            per_token=1,
            inner=settings.count("moe_intermediate_size"),
            router_inner=settings.count("router_hidden_size"),
            has_choice_bias=True,
        ),
        expert_layers=(True,) * num_layers,
        has_head_bias=settings.flag("lm_head_bias"),
    )
