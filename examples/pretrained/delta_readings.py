"""Readers of config.json for models with a gated delta rule.

They return fields of `DecoderConfig`, like the functions of `readings.py`.
"""

import dataclasses
from typing import Any

from jkv.config import FULL, STATE

from .kept_by_layers import list_kinds
from .parts import DeltaRule, Experts
from .readings import read_deepseek, read_qwen3_moe
from .rope_settings import DEFAULT_THETA, read_rope, rope_parameters
from .settings import Settings, is_number


def read_qwen3_next(settings: Settings) -> dict[str, Any]:
    """Read two kinds of layers, experts, and a shared expert."""
    delta_rule = dataclasses.replace(_read_delta_rule(settings), is_grouped=True)
    return _share_expert(settings, read_qwen3_moe(settings)) | dict(
        mixers=_read_mixers(settings), delta_rule=delta_rule
    )


def read_qwen3_5(settings: Settings) -> dict[str, Any]:
    """Read two kinds of layers; without images, a token has one position."""
    rope = read_rope(settings, settings.count("head_dim"), can_be_partial=True)
    return dict(
        mixers=_read_mixers(settings),
        delta_rule=_read_delta_rule(settings),
        ropes=(rope,) * settings.count("num_hidden_layers"),
    )


def read_qwen3_5_moe(settings: Settings) -> dict[str, Any]:
    """Read Qwen3.5 with experts in every layer."""
    experts = Experts(
        count=settings.count("num_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("moe_intermediate_size"),
        is_normalised=True,
    )
    layers = (True,) * settings.count("num_hidden_layers")
    fields = dict(experts=experts, expert_layers=layers)
    return read_qwen3_5(settings) | _share_expert(settings, fields)


def read_olmo_hybrid(settings: Settings) -> dict[str, Any]:
    """Read two kinds of layers; attention has RoPE unless its base is null."""
    heads, hidden = settings.count("num_attention_heads"), settings.count("hidden_size")
    key_heads = settings.count("linear_num_key_heads", heads)
    key_dim = settings.count("linear_key_head_dim", 3 * hidden // (4 * key_heads))
    allows_negative = settings.flag("linear_allow_neg_eigval", True)
    delta_rule = DeltaRule(
        num_key_heads=key_heads,
        num_heads=settings.count("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=settings.count("linear_value_head_dim", 2 * key_dim),
        width=settings.count("linear_conv_kernel_dim"),
        strength=2.0 if allows_negative else 1.0,
        norm_epsilon=1e-5,
    )
    theta = settings.raw.get("rope_theta", DEFAULT_THETA)
    has_rope = rope_parameters(settings).get("rope_theta", theta) is not None
    rope = read_rope(settings, hidden // heads) if has_rope else None
    return dict(
        mixers=_read_mixers(settings),
        delta_rule=delta_rule,
        ropes=(rope,) * settings.count("num_hidden_layers"),
    )


def read_kimi_linear(settings: Settings) -> dict[str, Any]:
    """Read latent attention without RoPE, and decays per channel."""
    num_layers = settings.count("num_hidden_layers")
    linear = Settings(settings.part("linear_attn_config", {}))
    heads, dim, width = (
        settings.count(beside) if linear.get(key) is None else linear.count(key)
        for key, beside in dict(
            num_heads="linear_num_heads",
            head_dim="linear_head_dim",
            short_conv_kernel_size="linear_conv_kernel_dim",
        ).items()
    )
    delta_rule = DeltaRule(
        num_key_heads=heads,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        width=width,
        gates=dim,
        forgets_by_channel=True,
        norm_epsilon=settings.number("rms_norm_eps"),
        gate="sigmoid",
    )
    _check_kimi_layers(linear, num_layers)
    fields = read_deepseek(settings)
    return fields | dict(
        mixers=_read_mixers(settings),
        delta_rule=delta_rule,
        ropes=(None,) * num_layers,
    )


def read_ling3(settings: Settings) -> dict[str, Any]:
    """Read latent attention and bounded decays; the row sets the gates per head."""
    heads = settings.count("num_attention_heads")
    # In transformers' files head_dim is latent attention's, beside linear_head_dim.
    dim = settings.count("linear_head_dim", settings.count("head_dim"))
    least = settings.get("kda_lower_bound")
    if not is_number(least) or least >= 0:
        raise ValueError(
            f"config.json: kda_lower_bound must be a number below 0, got {least!r}"
        )
    delta_rule = DeltaRule(
        num_key_heads=heads,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        width=settings.count("short_conv_kernel_size"),
        forgets_by_channel=True,
        least_decay=float(least) if settings.flag("kda_safe_gate") else None,
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        gate="sigmoid",
    )
    return read_deepseek(settings) | dict(
        mixers=_read_mixers(settings), delta_rule=delta_rule
    )


def _check_kimi_layers(linear: Settings, num_layers: int) -> None:
    """Raise ValueError unless each layer is listed once, numbered from 1."""
    full, states = linear.ints("full_attn_layers"), linear.ints("kda_layers")
    if full is None or states is None:
        return
    if sorted([*full, *states]) != list(range(1, num_layers + 1)):
        raise ValueError(
            f"config.json: linear_attn_config must name each of {num_layers} layers "
            f"once, got full_attn_layers {full} and kda_layers {states}"
        )


def _read_mixers(settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Return each layer's token mixer, attention or the delta rule."""
    num_layers = settings.count("num_hidden_layers")
    kinds = list_kinds(settings, num_layers)
    names = {FULL: ("attention",), STATE: ("delta_rule",)}
    if kinds is None or set(kinds) - {*names}:
        raise ValueError(
            f"config.json: layer_types must name {num_layers} layers, each {FULL} or "
            f"{STATE}, got {kinds!r}"
        )
    return tuple(names[kind] for kind in kinds)


def _read_delta_rule(settings: Settings) -> DeltaRule:
    """Read sizes by their names in Qwen's files."""
    return DeltaRule(
        num_key_heads=settings.count("linear_num_key_heads"),
        num_heads=settings.count("linear_num_value_heads"),
        key_dim=settings.count("linear_key_head_dim"),
        value_dim=settings.count("linear_value_head_dim"),
        width=settings.count("linear_conv_kernel_dim"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
    )


def _share_expert(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """Add a shared expert with a gate per token to the fields."""
    experts = dataclasses.replace(
        fields["experts"],
        shared_inner=settings.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return fields | dict(experts=experts)
