"""Readers of config.json for the rows of `expert_architectures.py`.

They return fields of `DecoderConfig`, like the functions of `readings.py`.
"""

import dataclasses
from typing import Any

from .parts import Experts
from .readings import list_expert_layers, read_mixtral, read_qwen3_moe, read_routed
from .rope import Rope
from .rope_settings import read_rope, rope_parameters
from .settings import Settings, is_int, is_number, is_set


def read_glm4_moe(settings: Settings) -> dict[str, Any]:
    """Read experts like DeepSeek-V3's; attention has keys of each head."""
    num_layers = settings.count("num_hidden_layers")
    return dict(
        qk_norm="head" if settings.flag("use_qk_norm") else None,
        experts=read_routed(settings),
        expert_layers=list_expert_layers(settings, num_layers),
        num_guessing_layers=settings.count("num_nextn_predict_layers", 0, least=0),
    )


def read_hunyuan(settings: Settings) -> dict[str, Any]:
    """Read a RoPE base that is scaled once, for sequences of any length.

    Files name it "dynamic" and have an `alpha`; without `alpha`, "dynamic" depends on
    the length as usual.
    """
    _refuse(settings, use_cla=False, use_qk_norm=True)
    given = dict(rope_parameters(settings))
    dim = settings.count("hidden_size") // settings.count("num_attention_heads")
    dim = settings.count("head_dim", dim)
    if given.get("rope_type", given.get("type")) == "dynamic" and is_set(
        given, "alpha"
    ):
        scaling = Settings(given)
        alpha = scaling.number("alpha")
        theta = scaling.number("rope_theta", settings.get("rope_theta", 10_000.0))
        if dim <= 2:
            raise ValueError(f"config.json: alpha needs a head_dim above 2, got {dim}")
        given = {"rope_theta": theta * alpha ** (dim / (dim - 2))}
    rope = read_rope(settings, dim, given)
    return dict(ropes=(rope,) * settings.count("num_hidden_layers"))


def read_hunyuan_moe(settings: Settings) -> dict[str, Any]:
    """Read experts of all layers and a shared one; their sizes may be lists."""
    _refuse(settings, moe_layer_num_skipped=0, use_mixed_mlp_moe=True)
    inner = settings.count("intermediate_size")
    num_shared = _read_alike(settings, "num_shared_expert", 1)
    if (own := _read_alike(settings, "moe_intermediate_size", inner)) != inner:
        raise ValueError(
            f"config.json: experts of {own} units beside an intermediate_size of "
            f"{inner} are not supported for this architecture"
        )
    experts = Experts(
        count=_read_alike(settings, "num_experts", 1),
        per_token=_read_alike(settings, "moe_topk", 1),
        inner=inner,
        shared_inner=inner * num_shared,
        is_normalised=True,
    )
    layers = (True,) * settings.count("num_hidden_layers")
    return read_hunyuan(settings) | dict(experts=experts, expert_layers=layers)


def read_ernie_moe(settings: Settings) -> dict[str, Any]:
    """Read experts with a learnt selection bias on softmaxes, and their layers."""
    num_layers = settings.count("num_hidden_layers")
    inner = settings.count("moe_intermediate_size")
    last = settings.get("moe_layer_end_index")
    last = num_layers - 1 if last == -1 else settings.count("moe_layer_end_index")
    first = settings.count("moe_layer_start_index", least=0)
    every = settings.count("moe_layer_interval")
    experts = Experts(
        count=settings.count("num_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=inner,
        shared_inner=inner * settings.count("moe_num_shared_experts", least=0),
        has_choice_bias=True,
        is_normalised=True,
        least_sum=settings.number("moe_norm_min"),
    )
    return dict(
        experts=experts,
        expert_layers=tuple(
            first <= layer <= last and (layer + 1) % every == 0
            for layer in range(num_layers)
        ),
        has_head_bias=settings.flag("attention_bias"),
    )


def read_qwen2_moe(settings: Settings) -> dict[str, Any]:
    """Read experts, a gated shared expert, and biases of the projections."""
    fields = read_qwen3_moe(settings)
    experts = dataclasses.replace(
        fields["experts"],
        shared_inner=settings.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return fields | dict(experts=experts, has_qkv_bias=settings.flag("qkv_bias"))


def read_minimax_m2(settings: Settings) -> dict[str, Any]:
    """Read experts with sigmoid scores, the rotated part of heads, and MTP layers."""
    _refuse(
        settings,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        sliding_window=None,
        use_qk_norm=True,
        use_routing_bias=True,
    )
    if set(settings.ints("attn_type_list") or [1]) != {1}:
        raise ValueError(
            "config.json: layers with lightning attention (0 in attn_type_list) are "
            "not supported for this architecture"
        )
    fields, dim = read_mixtral(settings), settings.count("head_dim")
    given = dict(rope_parameters(settings))
    if settings.get("partial_rotary_factor") is None:
        given.setdefault(
            "partial_rotary_factor", settings.count("rotary_dim", dim) / dim
        )
    rope = read_rope(settings, dim, given, can_be_partial=True)
    return fields | dict(
        experts=dataclasses.replace(
            fields["experts"], has_sigmoid=True, has_choice_bias=True
        ),
        ropes=(rope,) * settings.count("num_hidden_layers"),
        num_guessing_layers=settings.count("num_mtp_modules", 0, least=0),
    )


def read_phimoe(settings: Settings) -> dict[str, Any]:
    """Read SparseMixer's experts, and longrope with magnitudes from the file."""
    _refuse(settings, num_experts_per_tok=2)
    fields = read_mixtral(settings)
    experts = dataclasses.replace(
        fields["experts"],
        is_normalised=False,
        jitter=settings.number("router_jitter_noise"),
    )
    dim = settings.count("hidden_size") // settings.count("num_attention_heads")
    rope = _read_phimoe_rope(settings, settings.count("head_dim", dim))
    return fields | dict(
        experts=experts,
        ropes=(rope,) * settings.count("num_hidden_layers"),
        has_head_bias=settings.flag("lm_head_bias"),
    )


def _read_phimoe_rope(settings: Settings, dim: int) -> Rope:
    given, rope = rope_parameters(settings), read_rope(settings, dim)
    if rope.scaling == "default":
        return rope
    magnitudes = [given.get(name) for name in ("short_mscale", "long_mscale")]
    if rope.scaling != "longrope" or not all(
        is_number(each) and each > 0 for each in magnitudes
    ):
        raise ValueError(
            "config.json: of RoPE scalings this architecture has longrope, with a "
            f"short_mscale and a long_mscale; got {dict(given)!r}"
        )
    short, long = map(float, magnitudes)
    return dataclasses.replace(rope, magnitude=short, long_magnitude=long)


def _read_alike(settings: Settings, key: str, default: int) -> int:
    """Return a count that may be listed per layer; all entries must be equal."""
    value = settings.get(key, default)
    values = value if isinstance(value, list) else [value]
    if not all(map(is_int, values)) or len(set(values)) != 1 or values[0] < 1:
        raise ValueError(
            f"config.json: {key!r} must be an int >= 1, the same for all layers, got "
            f"{value!r}"
        )
    return int(values[0])


def _refuse(settings: Settings, **known: Any) -> None:
    """Raise ValueError for values other than the supported ones; null is ignored."""
    for key, value in known.items():
        given = settings.get(key)
        if given is not None and given != value:
            raise ValueError(
                f"config.json: {key} {given!r} is not supported for this architecture, "
                f"only {value!r}"
            )
