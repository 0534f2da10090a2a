"""Readers of config.json for the rows of `windowed_architectures.py`.

They return fields of `DecoderConfig`, like the functions of `readings.py`.
"""

import dataclasses
from typing import Any

from .kept_by_layers import list_windowed, read_windows
from .parts import Experts, OutputGate
from .readings import list_expert_layers, read_qwen3_moe
from .rope import Rope
from .rope_settings import list_rope_parameters, read_rope
from .settings import Settings, is_set

# Default RoPE settings.
MELLUM_ROPES = dict(
    full_attention=dict(rope_theta=500_000.0),
    sliding_attention=dict(rope_theta=10_000.0),
)
LAGUNA_ROPES = dict(
    full_attention=dict(rope_theta=500_000.0, partial_rotary_factor=0.5),
    sliding_attention=dict(rope_theta=10_000.0),
)


def read_mellum(settings: Settings) -> dict[str, Any]:
    """Read experts of the listed layers, and a rope for each kind of layer."""
    num_layers = settings.count("num_hidden_layers")
    return read_qwen3_moe(settings) | dict(
        expert_layers=list_expert_layers(settings, num_layers),
        ropes=_list_ropes(settings, MELLUM_ROPES),
    )


def read_laguna(settings: Settings) -> dict[str, Any]:
    """Read query heads per layer, their gate, and experts with sigmoid scores."""
    num_layers = settings.count("num_hidden_layers")
    if settings.flag("moe_apply_router_weight_on_input"):
        raise ValueError(
            "config.json: moe_apply_router_weight_on_input is not supported"
        )
    gating = settings.get("gating")
    if gating not in (True, "per-head", "per-element"):
        raise ValueError(
            "config.json: gating must be true, 'per-head' or 'per-element', got "
            f"{gating!r}"
        )
    gate = OutputGate(of_heads=gating != "per-element", function="softplus")
    cap = "moe_router_logit_softcapping"
    experts = Experts(
        count=settings.count("num_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=settings.count("moe_intermediate_size"),
        shared_inner=settings.count("shared_expert_intermediate_size"),
        has_sigmoid=True,
        has_choice_bias=True,
        score_cap=settings.number(cap) if is_set(settings, cap) else None,
        is_normalised=True,
        scale=settings.number("moe_routed_scaling_factor"),
    )
    return dict(
        query_heads=_read_query_heads(settings, num_layers),
        output_gate=gate,
        experts=experts,
        expert_layers=list_expert_layers(settings, num_layers),
        ropes=_list_ropes(settings, LAGUNA_ROPES),
    )


def read_cohere2_moe(settings: Settings) -> dict[str, Any]:
    """Read experts, the kind of norm, and layers without RoPE."""
    num_layers = settings.count("num_hidden_layers")
    expert_layers = list_expert_layers(settings, num_layers)
    rope = read_rope(settings, settings.count("head_dim"))
    turns_dense = settings.count("prefix_dense_sliding_window_pattern") == 1
    ropes = tuple(
        rope if window or (turns_dense and not has_experts) else None
        for window, has_experts in zip(
            read_windows(settings, num_layers), expert_layers, strict=True
        )
    )
    # With `rms_norm_eps` the norm does not subtract the mean.
    epsilon = settings.raw.get("rms_norm_eps")
    inner = "prefix_dense_intermediate_size"
    return dict(
        logit_scale=settings.number("logit_scale"),
        has_centred_norms=epsilon is None,
        norm_epsilon=settings.number(
            "layer_norm_eps" if epsilon is None else "rms_norm_eps"
        ),
        intermediate_size=settings.count(
            inner if is_set(settings, inner) else "intermediate_size"
        ),
        experts=_read_cohere_experts(settings),
        expert_layers=expert_layers,
        ropes=ropes,
    )


def read_muse_glimmer(settings: Settings) -> dict[str, Any]:
    """Read norms without weights, and layers without RoPE."""
    num_layers = settings.count("num_hidden_layers")
    dim = settings.count("head_dim")
    rope, given = read_rope(settings, dim), settings.get("layer_rope_theta")
    if given is None:
        turned = [(num_layers - 1 - layer) % 4 != 0 for layer in range(num_layers)]
    else:
        # Layers have one RoPE base, or no RoPE.
        is_list = isinstance(given, list) and len(given) == num_layers
        if not is_list or any(theta not in (0, rope.theta) for theta in given):
            raise ValueError(
                f"config.json: layer_rope_theta must have {num_layers} numbers, each 0 "
                f"or the rope_theta {rope.theta}, got {given!r}"
            )
        turned = [bool(theta) for theta in given]
    return dict(
        ropes=tuple(rope if is_turned else None for is_turned in turned),
        post_norm_epsilon=settings.number("post_norm_eps"),
        scale=settings.number("qk_scale_factor") * dim**-0.5,
        logit_scale=settings.number("output_multiplier"),
        logit_cap=settings.number("final_logit_softcapping"),
    )


def _read_cohere_experts(settings: Settings) -> Experts:
    """Read experts; the shared one's output is added to theirs or averaged with it."""
    choice = settings.get("expert_selection_fn")
    joining = settings.get("shared_expert_combination_strategy")
    if choice not in ("softmax", "sigmoid") or joining not in ("average", "sum"):
        raise ValueError(
            "config.json: expert_selection_fn must be 'softmax' or 'sigmoid', and "
            "shared_expert_combination_strategy 'average' or 'sum', got "
            f"{choice!r} and {joining!r}"
        )
    inner = settings.count("intermediate_size")
    shared_inner = inner * settings.count("num_shared_experts", least=0)
    is_sigmoid = choice == "sigmoid"
    experts = Experts(
        count=settings.count("num_experts"),
        per_token=settings.count("num_experts_per_tok"),
        inner=inner,
        shared_inner=shared_inner,
        has_sigmoid=is_sigmoid,
        # A softmax of the chosen experts' scores adds up to one.
        is_normalised=not is_sigmoid or settings.flag("norm_topk_prob"),
    )
    if shared_inner and joining == "average":
        return dataclasses.replace(experts, scale=0.5, shared_scale=0.5)
    return experts


def _read_query_heads(settings: Settings, num_layers: int) -> tuple[int, ...]:
    """Return the number of query heads per layer; empty if all layers are equal."""
    heads = settings.ints("num_attention_heads_per_layer")
    if heads is None:
        return ()
    usual, kv_heads = (
        settings.count(f"num_{name}_heads") for name in ("attention", "key_value")
    )
    if len(heads) != num_layers or any(n < 1 or n % kv_heads for n in heads):
        raise ValueError(
            f"config.json: num_attention_heads_per_layer must have {num_layers} "
            f"multiples of {kv_heads} key-value heads, got {heads}"
        )
    return () if set(heads) == {usual} else tuple(heads)


def _list_ropes(settings: Settings, usual: dict[str, Any]) -> tuple[Rope, ...]:
    """Return the rope of each layer, by its kind."""
    dim = settings.count("head_dim")
    # Indexed by "has a window": False is 0.
    full, windowed = (
        read_rope(settings, dim, given, can_be_partial=True)
        for given in list_rope_parameters(settings, usual)
    )
    num_layers = settings.count("num_hidden_layers")
    kinds = list_windowed(settings, num_layers)
    return tuple(windowed if has_window else full for has_window in kinds)
