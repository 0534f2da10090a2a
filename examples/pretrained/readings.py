"""Readers of config.json keys of one architecture, a function for each.

They return fields of `DecoderConfig`; `architectures.py` lists their models.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .kept_by_layers import list_turned, list_windowed, read_windows
from .parts import Experts, Latent
from .rope import Rope
from .rope_settings import (
    pair_rope_parameters,
    read_rope,
    rope_parameters,
    yarn_magnitude,
)
from .settings import Settings, is_set


def read_olmo3(settings: Settings) -> dict[str, Any]:
    """Read ropes; the file's base and scaling apply to full attention layers only."""
    given = pair_rope_parameters(
        settings,
        full={"rope_theta": settings.number("rope_theta")},
        windowed={"rope_theta": settings.defaults["rope_theta"]},
    )
    ropes = [read_rope(settings, _head_dim(settings), each) for each in given]
    windowed = list_windowed(settings, settings.count("num_hidden_layers"))
    return dict(ropes=tuple(ropes[kind] for kind in windowed))


def read_cohere(settings: Settings) -> dict[str, Any]:
    """Read the logit scale, and norms of queries and keys with weights per head."""
    return dict(
        logit_scale=settings.number("logit_scale"),
        qk_norm="heads" if settings.flag("use_qk_norm") else None,
    )


def read_cohere2(settings: Settings) -> dict[str, Any]:
    """Read Command R's fields, and ropes: full attention layers have no RoPE."""
    rope, num_layers = (
        read_rope(settings, _head_dim(settings)),
        settings.count("num_hidden_layers"),
    )
    windows = read_windows(settings, num_layers)
    return read_cohere(settings) | dict(
        ropes=tuple(rope if window else None for window in windows)
    )


def read_seed_oss(settings: Settings) -> dict[str, Any]:
    return dict(
        has_qkv_bias=settings.flag("attention_bias"),
        has_output_bias=settings.flag("attention_out_bias"),
    )


def read_smollm3(settings: Settings) -> dict[str, Any]:
    """Read the layers with RoPE."""
    rope = read_rope(settings, _head_dim(settings))
    turned = list_turned(settings, settings.count("num_hidden_layers"))
    return dict(ropes=tuple(rope if is_turned else None for is_turned in turned))


def read_exaone4(settings: Settings) -> dict[str, Any]:
    """Read ropes; in models with sliding windows, full attention has no RoPE."""
    rope = read_rope(settings, _head_dim(settings))
    num_layers = settings.count("num_hidden_layers")
    if settings.get("sliding_window") is None:
        return dict(ropes=(rope,) * num_layers)
    windowed = list_windowed(settings, num_layers)
    return dict(ropes=tuple(rope if has_window else None for has_window in windowed))


def read_granite(settings: Settings) -> dict[str, Any]:
    return dict(
        scale=settings.number("attention_multiplier"),
        embedding_scale=settings.number("embedding_multiplier"),
        residual_scale=settings.number("residual_multiplier"),
        logit_scale=1 / settings.number("logits_scaling"),
    )


def read_mixtral(settings: Settings) -> dict[str, Any]:
    experts = Experts(
        count=settings.count("num_local_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("intermediate_size"),
        is_normalised=True,
    )
    return dict(experts=experts, expert_layers=_all_layers(settings))


def read_gpt_oss(settings: Settings) -> dict[str, Any]:
    fields = read_mixtral(settings)
    limits = settings.number("swiglu_alpha"), settings.number("swiglu_limit")
    return fields | dict(
        experts=dataclasses.replace(fields["experts"], has_biases=True),
        swiglu_limits=limits,
    )


def read_qwen3_moe(settings: Settings) -> dict[str, Any]:
    experts = Experts(
        count=settings.count(settings.first("num_local_experts", "num_experts")),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("moe_intermediate_size"),
        is_normalised=settings.flag("norm_topk_prob"),
    )
    step, dense = (
        settings.count("decoder_sparse_step"),
        settings.ints("mlp_only_layers"),
    )
    layers = range(settings.count("num_hidden_layers"))
    return dict(
        experts=experts,
        expert_layers=tuple(
            i not in (dense or ()) and (i + 1) % step == 0 for i in layers
        ),
    )


def read_deepseek(settings: Settings) -> dict[str, Any]:
    """Read latent attention, routed experts and shared ones, and MTP layers."""
    latent = read_latent(settings)
    rope = read_rope(settings, latent.turned_dim)
    num_layers = settings.count("num_hidden_layers")
    return dict(
        experts=read_routed(settings),
        expert_layers=list_expert_layers(settings, num_layers),
        latent=latent,
        scale=latent_scale(latent, rope, rope_parameters(settings)),
        num_kv_heads=1,
        head_dim=latent.rank + latent.turned_dim,
        num_guessing_layers=settings.count("num_nextn_predict_layers", 0, least=0),
    )


def list_expert_layers(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: listed ones, or all but the first."""
    kinds = settings.names("mlp_layer_types")
    if kinds is None:
        first = settings.count("first_k_dense_replace", least=0)
        return tuple(i >= first for i in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(
            f"config.json: mlp_layer_types must name {num_layers} layers, each dense "
            f"or sparse, got {kinds!r}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def read_routed(settings: Settings) -> Experts:
    """Read DeepSeek's experts; since V3 the router's scores are sigmoids."""
    method = settings.get("topk_method", "greedy")
    has_sigmoid = settings.get("model_type") != "deepseek_v2"
    known = ("noaux_tc",) if has_sigmoid else ("greedy", "group_limited_greedy")
    if method not in known or (not has_sigmoid and settings.flag("norm_topk_prob")):
        raise ValueError(
            f"config.json: topk_method {method!r} with norm_topk_prob "
            f"{settings.get('norm_topk_prob')!r} is not supported for this architecture"
        )
    inner, is_grouped = settings.count("moe_intermediate_size"), method != "greedy"
    return Experts(
        count=settings.count(settings.first("n_routed_experts", "num_experts")),
        per_token=settings.count("num_experts_per_tok"),
        inner=inner,
        shared_inner=inner * settings.count("n_shared_experts"),
        has_sigmoid=has_sigmoid,
        has_choice_bias=has_sigmoid,
        is_normalised=settings.flag("norm_topk_prob"),
        scale=settings.number("routed_scaling_factor"),
        groups=settings.count("n_group") if is_grouped else 1,
        groups_per_token=settings.count("topk_group") if is_grouped else 1,
    )


def read_latent(settings: Settings) -> Latent:
    """Read the sizes of latent attention."""
    return Latent(
        rank=settings.count("kv_lora_rank"),
        query_rank=settings.maybe_count("q_lora_rank"),
        plain_dim=settings.count("qk_nope_head_dim"),
        turned_dim=settings.count("qk_rope_head_dim"),
        value_dim=settings.count("v_head_dim"),
    )


def latent_scale(latent: Latent, rope: Rope, given: Mapping[str, Any]) -> float:
    """Return the scale of the scores, which yarn increases by `mscale_all_dim`."""
    scale = (latent.plain_dim + latent.turned_dim) ** -0.5
    if rope.scaling == "yarn" and is_set(given, "mscale_all_dim"):
        weight = Settings(given).number("mscale_all_dim")
        scale *= yarn_magnitude(rope.factor, weight) ** 2
    return scale


def _all_layers(settings: Settings) -> tuple[bool, ...]:
    return (True,) * settings.count("num_hidden_layers")


def _head_dim(settings: Settings) -> int:
    heads = settings.count("num_attention_heads")
    return settings.count("head_dim", settings.count("hidden_size") // heads)
