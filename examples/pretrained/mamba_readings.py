"""Readers of config.json for models with Mamba 2 layers or short convolutions.

A function for each architecture returns fields of `DecoderConfig`, like the functions
of `readings.py`. Sizes of Mamba 2 layers have Bamba's names; `mamba_architectures.py`
lists other names of files as aliases.
"""

import math
from collections.abc import Sequence
from typing import Any

from jkv.config import BOTH, FULL, WINDOWED

from .kept_by_layers import list_kinds
from .parts import Convolution, Experts, OutputGate, StateSpace
from .readings import read_granite
from .rope import Rope
from .rope_settings import list_rope_parameters, read_rope
from .settings import Settings, is_number

ATTENTION, MAMBA, CONVOLUTION = ("attention",), ("mamba2",), ("short_convolution",)

# Token mixers of a layer, by its kind in config.json.
MIXERS = {
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "conv": CONVOLUTION,
    BOTH: (*ATTENTION, *MAMBA),
    "mlp": (),
    "moe": (),
}


# LFM3's default RoPE settings.
LFM3_ROPES = {
    WINDOWED: dict(rope_theta=10_000.0),
    FULL: dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.5),
}


def read_bamba(settings: Settings) -> dict[str, Any]:
    """Read the attention layers, and the sizes of Mamba 2 layers."""
    return dict(
        mixers=_read_mixers(settings),
        state_space=_read_state_space(settings, _find_inner(settings)),
    )


def read_falcon_h1(settings: Settings) -> dict[str, Any]:
    """Read layers with attention beside Mamba 2, and the multipliers of all parts."""
    norm = "before" if settings.flag("mamba_norm_before_gate") else "after"
    if "mamba_d_ssm" in settings.raw and settings.raw["mamba_d_ssm"] is None:
        inner = _find_inner(settings)
    else:
        inner = settings.count("mamba_d_ssm", 1024)
    state_space = _read_state_space(
        settings,
        inner,
        norm=norm if settings.flag("mamba_rms_norm") else None,
        has_output_bias=settings.flag("projectors_bias"),
        scales=_read_numbers(settings, "ssm_multipliers", 5),
        input_scale=settings.number("ssm_in_multiplier"),
        output_scale=settings.number("ssm_out_multiplier"),
    )
    # Scores are linear in the keys, and RoPE keeps the keys' length.
    head_dim = settings.count(
        "head_dim",
        settings.count("hidden_size") // settings.count("num_attention_heads"),
    )
    return dict(
        mixers=_read_mixers(settings),
        state_space=state_space,
        scale=settings.number("key_multiplier") * head_dim**-0.5,
        attention_scales=(
            settings.number("attention_in_multiplier"),
            settings.number("attention_out_multiplier"),
        ),
        mlp_scales=_read_numbers(settings, "mlp_multipliers", 2),
        embedding_scale=settings.number("embedding_multiplier"),
        logit_scale=settings.number("lm_head_multiplier"),
    )


def read_granite_hybrid(settings: Settings) -> dict[str, Any]:
    """Read Granite's multipliers, Mamba 2 layers, and experts beside a shared MLP."""
    num_layers = settings.count("num_hidden_layers")
    shared = settings.count("shared_intermediate_size")
    kind = settings.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise ValueError(
            f"config.json: position_embedding_type {kind!r} is not supported, only "
            "'rope', 'nope' and null"
        )
    head_dim = settings.count("hidden_size") // settings.count("num_attention_heads")
    rope = read_rope(settings, head_dim) if kind == "rope" else None
    fields = read_granite(settings) | dict(
        mixers=_read_mixers(settings),
        state_space=_read_state_space(settings, _find_inner(settings)),
        ropes=(rope,) * num_layers,
    )
    if not settings.count("num_local_experts", least=0):
        return fields | dict(intermediate_size=shared)
    experts = Experts(
        count=settings.count("num_local_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("intermediate_size"),
        shared_inner=shared,
        is_normalised=True,
    )
    return fields | dict(experts=experts, expert_layers=(True,) * num_layers)


def read_mamba2(settings: Settings) -> dict[str, Any]:
    """Read a model with Mamba 2 layers only."""
    num_layers = settings.count("num_hidden_layers")
    inner = settings.count("mamba_n_heads", 128) * settings.count("mamba_d_head", 64)
    return dict(
        mixers=_read_mixers(settings),
        fed_layers=(False,) * num_layers,
        ropes=(None,) * num_layers,
        state_space=_read_state_space(settings, inner),
    )


def read_nemotron_h(settings: Settings) -> dict[str, Any]:
    """Read layers of attention, Mamba 2, MLP or experts; none has RoPE."""
    kinds = list_kinds(settings) or []
    num_layers = len(kinds)
    inner = settings.count("mamba_n_heads") * settings.count("mamba_d_head")
    has_bias = settings.flag("use_bias")
    fields = dict(
        num_layers=num_layers,
        windows=(None,) * num_layers,
        mixers=_name_mixers(kinds),
        fed_layers=tuple(kind in ("mlp", "moe") for kind in kinds),
        ropes=(None,) * num_layers,
        state_space=_read_state_space(
            settings,
            inner,
            "mamba_hidden_act",
            step_limits=(settings.number("time_step_min"), math.inf),
            has_bias=has_bias,
            has_output_bias=has_bias,
        ),
    )
    if "moe" not in kinds:
        return fields
    experts = Experts(
        count=settings.count("n_routed_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("moe_intermediate_size"),
        shared_inner=settings.count("moe_shared_expert_intermediate_size"),
        latent=settings.maybe_count("moe_latent_size"),
        has_sigmoid=True,
        has_choice_bias=True,
        is_normalised=settings.flag("norm_topk_prob"),
        scale=settings.number("routed_scaling_factor"),
        groups=settings.count("n_group"),
        groups_per_token=settings.count("topk_group"),
    )
    return fields | dict(
        experts=experts, expert_layers=tuple(kind == "moe" for kind in kinds)
    )


def read_lfm2(settings: Settings) -> dict[str, Any]:
    """Read the attention layers, the convolutions, and the MLP's hidden units."""
    tied = "tie_embedding" if "tie_embedding" in settings.raw else "tie_word_embeddings"
    return dict(
        mixers=_read_mixers(settings),
        convolution=_read_convolution(settings),
        intermediate_size=_adjust_inner(settings),
        tied=settings.flag(tied),
    )


def read_lfm2_moe(settings: Settings) -> dict[str, Any]:
    """Read LFM2 with experts in all but the first layers."""
    if not settings.flag("use_expert_bias"):
        raise ValueError(
            "config.json: use_expert_bias must be true for this architecture"
        )
    num_layers = settings.count("num_hidden_layers")
    first = settings.count("num_dense_layers", least=0)
    experts = Experts(
        count=settings.count("num_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("moe_intermediate_size"),
        has_sigmoid=True,
        has_choice_bias=True,
        is_normalised=settings.flag("norm_topk_prob"),
        epsilon=1e-6,
        scale=settings.number("routed_scaling_factor"),
    )
    return read_lfm2(settings) | dict(
        experts=experts, expert_layers=tuple(i >= first for i in range(num_layers))
    )


def read_lfm3(settings: Settings) -> dict[str, Any]:
    """Read convolutions, and full and sliding window attention with a rope each."""
    kinds = list_kinds(settings, settings.count("num_hidden_layers")) or []
    ropes = _read_lfm3_ropes(settings, kinds)
    window = settings.count("sliding_window") if WINDOWED in kinds else None
    is_gated, is_double = map(
        settings.flag, ("use_attention_gate", "use_sandwich_norm")
    )
    return dict(
        mixers=_name_mixers([FULL if kind == WINDOWED else kind for kind in kinds]),
        convolution=_read_convolution(settings),
        windows=tuple(window if kind == WINDOWED else None for kind in kinds),
        ropes=tuple(map(ropes.get, kinds)),
        norms="both" if is_double else "before",
        output_gate=OutputGate(of_heads=True) if is_gated else None,
    )


def _read_lfm3_ropes(settings: Settings, kinds: Sequence[str]) -> dict[str, Rope]:
    """Return the rope of each kind of attention layer."""
    usual = {kind: rope for kind, rope in LFM3_ROPES.items() if kind in kinds}
    given = list_rope_parameters(settings, usual)
    dim = settings.count("head_dim")
    return {
        kind: read_rope(settings, dim, parameters)
        for kind, parameters in zip(usual, given, strict=True)
    }


def _read_convolution(settings: Settings) -> Convolution:
    """Read the sizes of LFM's short convolutions."""
    return Convolution(
        width=settings.count("conv_L_cache"), has_bias=settings.flag("conv_bias")
    )


def _read_mixers(settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Return each layer's token mixers; attention if the file lists no layers."""
    num_layers = settings.count("num_hidden_layers")
    return _name_mixers(list_kinds(settings, num_layers) or ["attention"] * num_layers)


def _name_mixers(kinds: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    if set(kinds) - MIXERS.keys():
        raise ValueError(
            f"config.json: the kinds of {len(kinds)} layers must be some of "
            f"{', '.join(MIXERS)}, got {kinds!r}"
        )
    return tuple(MIXERS[kind] for kind in kinds)


def _read_state_space(
    settings: Settings, inner: int, activation: str = "hidden_act", **fields: Any
) -> StateSpace:
    """Read the sizes of Mamba 2 layers with `inner` channels of values."""
    function = settings.get(activation, "silu")
    if function not in ("silu", "swish"):
        raise ValueError(
            f"config.json: {activation} {function!r} behind Mamba 2's convolution is "
            "not supported, only 'silu'"
        )
    heads = settings.count("mamba_n_heads", 128)
    dim = settings.get("mamba_d_head", "auto")
    dim = inner // heads if dim == "auto" else settings.count("mamba_d_head")
    if heads * dim != inner:
        sizes = ", ".join(map(settings.name, ("mamba_n_heads", "mamba_d_head")))
        raise ValueError(
            f"config.json: {inner} channels of Mamba 2 (mamba_d_ssm, or mamba_expand * "
            f"hidden_size) cannot be {heads} heads of {dim} ({sizes})"
        )
    has_bias = settings.flag("mamba_proj_bias")
    usual = dict(
        num_heads=heads,
        head_dim=dim,
        num_groups=settings.count("mamba_n_groups"),
        state_dim=settings.count("mamba_d_state"),
        width=settings.count("mamba_d_conv"),
        step_limits=_read_limits(settings),
        has_bias=has_bias,
        has_taps_bias=settings.flag("mamba_conv_bias"),
        has_output_bias=has_bias,
    )
    return StateSpace(**usual | fields)


def _find_inner(settings: Settings) -> int:
    """Return the number of value channels."""
    return settings.count("mamba_expand", 2) * settings.count("hidden_size")


def _read_limits(settings: Settings) -> tuple[float, float]:
    """Return the minimum and maximum step; transformers writes infinity as a dict."""
    given = settings.get("time_step_limit", [0.0, math.inf])
    is_list = isinstance(given, list)
    limits = [
        limit.get("__float__") if isinstance(limit, dict) else limit
        for limit in (given if is_list else ())
    ]
    try:
        least, most = map(float, limits)
    except (TypeError, ValueError):
        raise ValueError(
            f"config.json: time_step_limit must be two numbers, got {given!r}"
        ) from None
    return least, most


def _read_numbers(settings: Settings, key: str, count: int) -> tuple[float, ...]:
    """Return a list of `count` numbers above 0."""
    values = settings.get(key)
    is_list = isinstance(values, Sequence) and len(values) == count
    if not is_list or not all(is_number(value) and value > 0 for value in values):
        raise ValueError(
            f"config.json: {key!r} must be {count} numbers above 0, got {values!r}"
        )
    return tuple(map(float, values))


def _adjust_inner(settings: Settings) -> int:
    """Return the MLP's hidden units, which LFM2 rounds up to a multiple."""
    has_old_name = settings.get("block_ff_dim") is not None
    inner = settings.count("block_ff_dim" if has_old_name else "intermediate_size")
    if not settings.flag("block_auto_adjust_ff_dim"):
        return inner
    factor = settings.maybe_number("block_ffn_dim_multiplier")
    inner = 2 * inner // 3
    if factor is None:
        return inner
    multiple = settings.count("block_multiple_of")
    return -(-int(factor * inner) // multiple) * multiple
