"""Readers of config.json for Mistral's models since Ministral 3.

They return fields of `DecoderConfig`; `mistral_architectures.py` lists their models.
"""

import math
from typing import Any

from .parts import Experts
from .readings import latent_scale, list_expert_layers, read_latent
from .rope_settings import read_rope, rope_parameters
from .settings import Settings, is_int, is_number, is_set


def read_ministral3(settings: Settings) -> dict[str, Any]:
    return dict(query_growth=_read_growth(settings))


def read_mistral4(settings: Settings) -> dict[str, Any]:
    """Read DeepSeek's latent attention, and experts with softmax scores."""
    latent = read_latent(settings)
    given = dict(rope_parameters(settings))
    # The file's factor is relative to a whole query; the rope gets the rotated part.
    turned, whole = latent.turned_dim, latent.plain_dim + latent.turned_dim
    part = given.pop("partial_rotary_factor", turned / whole)
    if not is_number(part) or not math.isclose(part * whole, turned):
        raise ValueError(
            f"config.json: partial_rotary_factor {part!r} of {whole} components is "
            f"not qk_rope_head_dim, {turned}"
        )
    if settings.count("n_group", 1) > 1:
        raise ValueError(
            "config.json: groups of experts (n_group above 1) are not supported for "
            "this architecture"
        )
    rope, num_layers = (
        read_rope(settings, turned, given),
        settings.count("num_hidden_layers"),
    )
    inner = settings.count("moe_intermediate_size")
    return dict(
        experts=Experts(
            count=settings.count(
                settings.first("n_routed_experts", "num_local_experts")
            ),
            per_token=settings.count("num_experts_per_tok"),
            inner=inner,
            shared_inner=inner * settings.count("n_shared_experts"),
            is_normalised=settings.flag("norm_topk_prob"),
            scale=settings.number("routed_scaling_factor"),
        ),
        expert_layers=list_expert_layers(settings, num_layers),
        latent=latent,
        scale=latent_scale(latent, rope, given),
        num_kv_heads=1,
        head_dim=latent.rank + latent.turned_dim,
        ropes=(rope,) * num_layers,
        query_growth=_read_growth(settings),
    )


def _read_growth(settings: Settings) -> tuple[float, int] | None:
    """Return the strength of query scaling, and its interval in positions."""
    given = rope_parameters(settings)
    strength, span = (
        given.get(name)
        for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if not is_set(given, "llama_4_scaling_beta"):
        return None
    if not is_number(strength) or not is_int(span) or span < 1:
        raise ValueError(
            "config.json: llama_4_scaling_beta must be a number and "
            "original_max_position_embeddings, after so many positions queries grow, "
            f"an int above 0, got {strength!r} and {span!r}"
        )
    return float(strength), span
