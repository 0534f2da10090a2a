"""Conversion of GGUF metadata into config.json, by architecture.

Settings without metadata, such as the layers with sliding windows and their RoPE,
follow from the architecture.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jkv.config import GGUFile, describe_model

from .stored import read_tensor


class Kind(NamedTuple):
    """A GGUF architecture: its transformers class and its own settings."""

    class_name: str
    read: Callable[[GGUFile], dict[str, Any]] | None = None
    extra: Mapping[str, Any] = {}  # settings that the metadata lack
    is_permuted: bool = False  # True if RoPE rotates adjacent components
    norm_offset: float = 0.0  # added to norm weights in the file


def make_config(file: GGUFile) -> dict[str, Any]:
    """Return the config.json of the equivalent checkpoint."""
    sizes, kind = describe_model(file), KINDS[file.model_type]
    head_dim = sizes["head_dim"]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    config = sizes | dict(
        architectures=[kind.class_name],
        intermediate_size=file.need("feed_forward_length"),
        partial_rotary_factor=file.get("rope.dimension_count", head_dim) / head_dim,
        rms_norm_eps=file.need("attention.layer_norm_rms_epsilon"),
        rope_theta=file.get("rope.freq_base", 10_000.0),
        # The number of stored tokens; the metadata may differ.
        vocab_size=len(tokens) if tokens else file.need("vocab_size"),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias=any(
            ".ffn_gate" in name and name.endswith(".bias") for name in file.tensors
        ),
    )
    scaling = _read_scaling(file)
    if scaling:
        config["rope_scaling"] = scaling
    read = kind.read(file) if kind.read else {}
    return config | dict(kind.extra) | {k: v for k, v in read.items() if v is not None}


def _read_scaling(file: GGUFile) -> dict[str, Any] | None:
    """Return the settings of RoPE scaling, or None.

    A factor without a type, or under the older key, means linear scaling. A factor of 0
    means 1, as in llama.cpp.
    """
    scaling = file.get("rope.scaling.type", "linear")
    older = file.get("rope.scale_linear", 0.0)
    factor = file.get("rope.scaling.factor", older) or 1.0
    if (name := "rope_freqs.weight") in file.tensors:
        # Llama 3's scaling, precomputed as one factor per pair of components.
        over = factor if scaling == "linear" else 1.0
        each = [over * float(one) for one in np.ravel(read_tensor(file, name))]
        length = file.need("context_length")
        return dict(
            rope_type="longrope",
            short_factor=each,
            long_factor=each,
            attention_factor=1.0,
            original_max_position_embeddings=length,
        )
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return None
    names = {"original_context_length": "original_max_position_embeddings"}
    if scaling == "longrope":
        found = dict(rope_type=scaling)
        names["attn_factor"] = "attention_factor"
        for length in ("short", "long"):
            factors = read_tensor(file, f"rope_factors_{length}.weight")
            rounded = np.ravel(np.float32(factors))
            found[f"{length}_factor"] = [float(str(factor)) for factor in rounded]
    elif scaling in ("linear", "yarn"):
        found = dict(rope_type=scaling, factor=factor)
        names |= {f"yarn_beta_{end}": f"beta_{end}" for end in ("fast", "slow")}
        if scaling == "yarn":
            found["original_max_position_embeddings"] = file.need("context_length")
            if (more := _read_yarn_factor(file)) != 1.0:
                found["attention_factor"] = more * (0.1 * math.log(factor) + 1.0)
    else:
        raise ValueError(
            f"{file.paths[0]}: rope.scaling.type {scaling!r} is not supported; "
            "supported are none, linear, yarn and longrope"
        )
    given = {other: file.get(f"rope.scaling.{name}") for name, other in names.items()}
    return found | {name: value for name, value in given.items() if value is not None}


def _read_yarn_factor(file: GGUFile) -> float:
    """Return the multiplier of YaRN's attention factor, 0.1 ln(factor) + 1."""
    keys = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
    return math.prod(float(file.get(key, 1.0)) for key in keys)


def _read_gemma2(file: GGUFile) -> dict[str, Any]:
    return _read_gemma(file, every=2) | dict(
        attn_logit_softcapping=file.get("attn_logit_softcapping", 50.0),
        final_logit_softcapping=file.get("final_logit_softcapping", 30.0),
    )


def _read_gemma3(file: GGUFile) -> dict[str, Any]:
    ropes = _read_gemma(file, every=6)
    # The file's RoPE settings apply to full-attention layers only.
    full = dict(rope_theta=file.get("rope.freq_base", 1e6))
    ropes["rope_scaling"] = dict(
        full_attention=full | (_read_scaling(file) or dict(rope_type="default")),
        sliding_attention=dict(
            rope_type="default", rope_theta=file.get("rope.freq_base_swa", 10_000.0)
        ),
    )
    return ropes


def _read_gemma(file: GGUFile, every: int) -> dict[str, Any]:
    """Read the layer types (full attention in each `every`-th layer) and the scale."""
    layers, heads = file.need("block_count"), file.need("attention.head_count")
    head_dim = file.need("attention.key_length")
    # The largest model of each generation scales by hidden size / heads.
    is_largest = layers == {2: 46, 6: 62}[every]
    pattern = file.get("attention.sliding_window_pattern", every)
    if not isinstance(pattern, list):
        pattern = [bool((i + 1) % pattern) for i in range(layers)]
    if every == 6 and not file.get("attention.sliding_window"):
        pattern = [False] * layers  # without the key, Gemma 3 has no windows
    full, windowed = "full_attention", "sliding_attention"
    return dict(
        layer_types=[windowed if each else full for each in pattern],
        query_pre_attn_scalar=file.need("embedding_length") // heads
        if is_largest
        else head_dim,
    )


def _read_experts(file: GGUFile) -> dict[str, Any]:
    """Read expert settings under their most common names."""
    return dict(
        num_local_experts=file.need("expert_count"),
        num_experts_per_tok=file.need("expert_used_count"),
        moe_intermediate_size=file.get("expert_feed_forward_length"),
    )


def _read_qwen2_moe(file: GGUFile) -> dict[str, Any]:
    shared = file.need("expert_shared_feed_forward_length")
    return _read_experts(file) | dict(
        **NO_WINDOW, norm_topk_prob=False, shared_expert_intermediate_size=shared
    )


def _read_qwen3_moe(file: GGUFile) -> dict[str, Any]:
    return _read_experts(file) | dict(**NO_WINDOW, norm_topk_prob=True)


def _read_glm4_moe(file: GGUFile) -> dict[str, Any]:
    return dict(
        n_routed_experts=file.need("expert_count"),
        num_experts_per_tok=file.need("expert_used_count"),
        moe_intermediate_size=file.need("expert_feed_forward_length"),
        n_shared_experts=file.need("expert_shared_count"),
        first_k_dense_replace=file.need("leading_dense_block_count"),
        routed_scaling_factor=file.get("expert_weights_scale", 1.0),
        norm_topk_prob=file.get("expert_weights_norm", True),
        n_group=file.get("expert_group_count", 1),
        topk_group=file.get("expert_group_used_count", 1),
        use_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _read_ernie(file: GGUFile) -> dict[str, Any]:
    return dict(use_bias="blk.0.attn_q.bias" in file.tensors)


def _read_ernie_moe(file: GGUFile) -> dict[str, Any]:
    layers = range(file.need("block_count"))
    routed = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in file.tensors]
    if not routed:
        raise ValueError(
            f"{file.paths[0]} lacks the tensor blk.N.ffn_gate_inp.weight in all layers"
        )
    return _read_ernie(file) | dict(
        moe_num_experts=file.need("expert_count"),
        moe_k=file.need("expert_used_count"),
        moe_intermediate_size=file.need("expert_feed_forward_length"),
        moe_num_shared_experts=file.get("expert_shared_count", 0),
        moe_layer_interval=file.get("interleave_moe_layer_step", 1),
        moe_layer_start_index=file.get("leading_dense_block_count", 0),
        moe_layer_end_index=routed[-1],
    )


def _read_granite(file: GGUFile) -> dict[str, Any]:
    names = dict(
        attention_multiplier="attention.scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )
    return {name: file.get(key, 1.0) for name, key in names.items()}


def _read_phi3(file: GGUFile) -> dict[str, Any]:
    length = file.get("rope.scaling.original_context_length")
    return dict(original_max_position_embeddings=length)


NO_WINDOW = dict(use_sliding_window=False)
# By jkv's model types.
KINDS = {
    "llama": Kind("LlamaForCausalLM", is_permuted=True),
    "mixtral": Kind("MixtralForCausalLM", _read_experts, is_permuted=True),
    "qwen2": Kind("Qwen2ForCausalLM", extra=NO_WINDOW),
    "qwen2_moe": Kind("Qwen2MoeForCausalLM", _read_qwen2_moe),
    "qwen3": Kind("Qwen3ForCausalLM", extra=NO_WINDOW),
    "qwen3_moe": Kind("Qwen3MoeForCausalLM", _read_qwen3_moe),
    "gemma2": Kind("Gemma2ForCausalLM", _read_gemma2, norm_offset=1.0),
    "gemma3_text": Kind("Gemma3ForCausalLM", _read_gemma3, norm_offset=1.0),
    "phi3": Kind("Phi3ForCausalLM", _read_phi3),
    "olmo2": Kind("Olmo2ForCausalLM"),
    "smollm3": Kind("SmolLM3ForCausalLM", extra=NO_WINDOW, is_permuted=True),
    "granite": Kind("GraniteForCausalLM", _read_granite, is_permuted=True),
    "ernie4_5": Kind("Ernie4_5ForCausalLM", _read_ernie),
    "ernie4_5_moe": Kind("Ernie4_5_MoeForCausalLM", _read_ernie_moe),
    "glm4_moe": Kind("Glm4MoeForCausalLM", _read_glm4_moe),
}
