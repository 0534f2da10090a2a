"""Readers of config.json for the Gemma family.

They return fields of `DecoderConfig`; `gemma_architectures.py` lists their models.
"""

from collections.abc import Sequence
from typing import Any

from .kept_by_layers import list_windowed, read_layer_heads
from .parts import Experts, LayerInputs
from .rope_settings import list_rope_parameters, pair_rope_parameters, read_rope
from .settings import Settings

# Gemma 4's default RoPE settings.
ROPES = dict(
    full_attention=dict(
        rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6
    ),
    sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
)


def read_gemma1(settings: Settings) -> dict[str, Any]:
    """Read the first Gemma, with embeddings scaled by the root of the hidden size.

    Its released files name the exact GELU, but it was trained with the approximation.
    """
    fields: dict[str, Any] = dict(embedding_scale=settings.count("hidden_size") ** 0.5)
    if settings.get("hidden_act") == "gelu":
        fields["activation"] = "gelu_pytorch_tanh"
    return fields


def read_gemma(settings: Settings) -> dict[str, Any]:
    """Read the common fields of Gemma 2 and 3."""
    return dict(
        scale=settings.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=settings.maybe_number("attn_logit_softcapping"),
        logit_cap=settings.maybe_number("final_logit_softcapping"),
        embedding_scale=settings.count("hidden_size") ** 0.5,
    )


def read_gemma3(settings: Settings) -> dict[str, Any]:
    """Read Gemma's fields, and two ropes: of full attention and of sliding windows."""
    if settings.flag("use_bidirectional_attention"):
        raise ValueError(
            "config.json: use_bidirectional_attention must be false, bidirectional "
            "attention is not supported"
        )
    dim, num_layers = settings.count("head_dim"), settings.count("num_hidden_layers")
    given = pair_rope_parameters(
        settings,
        full={"rope_theta": settings.number("rope_theta")},
        windowed={"rope_theta": settings.number("rope_local_base_freq")},
    )
    # Indexed by "has a window": False is 0.
    ropes = [read_rope(settings, dim, parameters) for parameters in given]
    # Its files have both soft caps of Gemma 2; its class ignores attention's.
    return read_gemma(settings) | dict(
        soft_cap=None,
        ropes=tuple(ropes[kind] for kind in list_windowed(settings, num_layers)),
    )


def read_gemma4(settings: Settings) -> dict[str, Any]:
    """Read layers of two shapes, shared keys, and per-layer embeddings."""
    bidirectional = settings.get("use_bidirectional_attention")
    if bidirectional is not False and bidirectional not in (None, "vision"):
        raise ValueError(
            "config.json: use_bidirectional_attention must be null, false or 'vision', "
            f"got {bidirectional!r}: other bidirectional attention is not supported"
        )
    num_layers = settings.count("num_hidden_layers")
    windowed = list_windowed(settings, num_layers)
    heads = read_layer_heads(settings, windowed)
    key_layers = _share_keys(settings, windowed)
    shares = [layer != i for i, layer in enumerate(key_layers)]
    inner = settings.count("intermediate_size")
    wide = 2 if settings.flag("use_double_wide_mlp") else 1
    of_keys = settings.flag("attention_k_eq_v")
    return dict(
        layer_heads=heads,
        key_layers=key_layers if any(shares) else (),
        # Image tokens have bidirectional attention in windowed layers, or nowhere.
        span_layers=tuple(bidirectional == "vision" and each for each in windowed),
        values_of_keys=tuple(of_keys and not each for each in windowed),
        inner_sizes=tuple(inner * (wide if each else 1) for each in shares),
        ropes=_list_ropes(settings, windowed, heads),
        embedding_scale=settings.count("hidden_size") ** 0.5,
        logit_cap=settings.maybe_number("final_logit_softcapping"),
        layer_inputs=_read_inputs(settings),
    ) | _read_experts(settings, inner, num_layers)


def _share_keys(settings: Settings, windowed: Sequence[bool]) -> tuple[int, ...]:
    """Return the index of the layer with each layer's keys.

    The last `num_kv_shared_layers` use the keys of the last earlier layer of their
    kind.
    """
    first = len(windowed) - settings.count("num_kv_shared_layers", 0, least=0)
    producers = {
        has_window: i for i, has_window in enumerate(windowed[: max(first, 0)])
    }
    missing = set(windowed) - producers.keys()
    if missing:
        raise ValueError(
            "config.json: num_kv_shared_layers leaves a kind of layer_types without a "
            "layer that keeps keys and values"
        )
    return tuple(
        i if i < first else producers[has_window]
        for i, has_window in enumerate(windowed)
    )


def _list_ropes(
    settings: Settings,
    windowed: Sequence[bool],
    heads: Sequence[tuple[int, int]],
) -> tuple[Any, ...]:
    """Return the rope of each layer, by its kind and head dim."""
    kinds = list_rope_parameters(settings, ROPES)
    # Indexed by "has a window": False is 0.
    return tuple(
        read_rope(settings, dim, kinds[has_window])
        for has_window, (_, dim) in zip(windowed, heads, strict=True)
    )


def _read_inputs(settings: Settings) -> LayerInputs | None:
    dim = settings.count("hidden_size_per_layer_input", 0, least=0)
    if not dim:
        return None
    return LayerInputs(vocab_size=settings.count("vocab_size_per_layer_input"), dim=dim)


def _read_experts(settings: Settings, inner: int, num_layers: int) -> dict[str, Any]:
    """Read experts beside the MLP, in all layers or in none."""
    if not settings.flag("enable_moe_block"):
        return {}
    if settings.flag("use_double_wide_mlp"):
        raise ValueError(
            "config.json: use_double_wide_mlp beside experts (enable_moe_block) is not "
            "supported"
        )
    experts = Experts(
        count=settings.count("num_experts"),
        per_token=settings.count("top_k_experts"),
        inner=settings.count("moe_intermediate_size"),
        shared_inner=inner,
        is_normalised=True,
        has_own_norms=True,
    )
    return dict(experts=experts, expert_layers=(True,) * num_layers)
