"""The config.json that a GGUF file's metadata amount to, for each architecture.

What the metadata do not say is known of the architecture: which layers have a window,
how far those are turned.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jkv.config.gguf_file import GGUFile, dequantize


class Kind(NamedTuple):
    """An architecture of GGUF's: what transformers calls it, and its own keys."""

    model_type: str
    class_name: str
    read: Callable[[GGUFile], dict[str, Any]] | None = None
    says: Mapping[str, Any] = {}  # what no file of the architecture says
    is_permuted: bool = False  # rows of queries and keys: neighbours are turned
    norm_offset: float = 0.0  # added to norms when the file was written


def make_config(file: GGUFile) -> dict[str, Any]:
    """Return what the config.json of a model's checkpoint would say."""
    kind = find_kind(file)
    heads, hidden = file.need("attention.head_count"), file.need("embedding_length")
    kv_heads = file.get("attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ValueError(f"{file.paths[0]}: layers of different heads are not served")
    head_dim = file.get("attention.key_length", hidden // heads)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    config = dict(
        model_type=kind.model_type,
        architectures=[kind.class_name],
        hidden_size=hidden,
        intermediate_size=file.need("feed_forward_length"),
        num_hidden_layers=count_layers(file),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        partial_rotary_factor=file.get("rope.dimension_count", head_dim) / head_dim,
        max_position_embeddings=file.need("context_length"),
        rms_norm_eps=file.need("attention.layer_norm_rms_epsilon"),
        rope_theta=file.get("rope.freq_base", 10_000.0),
        # Of the tokens there are; the metadata may count others.
        vocab_size=len(tokens) if tokens else file.need("vocab_size"),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias=any(
            ".ffn_gate" in name and name.endswith(".bias") for name in file.tensors
        ),
        torch_dtype="bfloat16",
    )
    scaling = _read_scaling(file)
    if scaling:
        config["rope_scaling"] = scaling
    read = kind.read(file) if kind.read else {}
    return config | dict(kind.says) | {k: v for k, v in read.items() if v is not None}


def find_kind(file: GGUFile) -> Kind:
    """Return the row of a file's architecture, or refuse it by name."""
    if file.architecture not in KINDS:
        raise ValueError(
            f"{file.paths[0]} holds a model of the architecture {file.architecture!r}; "
            f"of GGUF files {', '.join(KINDS)} are served: take the model's safetensors"
        )
    if file.architecture == "llama" and file.get("expert_count"):
        return MIXTRAL
    return KINDS[file.architecture]


def count_layers(file: GGUFile) -> int:
    """Return the layers of a model, without those that guess further tokens."""
    return int(file.need("block_count") - file.get("nextn_predict_layers", 0))


def _read_scaling(file: GGUFile) -> dict[str, Any] | None:
    """Return how positions are scaled, None if they are not."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        # What Llama 3 makes of its settings, worked out: a factor a pair of components.
        each = [float(factor) for factor in np.ravel(dequantize(factors))]
        length = file.need("context_length")
        return dict(
            rope_type="longrope",
            short_factor=each,
            long_factor=each,
            attention_factor=1.0,
            original_max_position_embeddings=length,
        )
    scaling = file.get("rope.scaling.type")
    if scaling in (None, "none"):
        return None
    names = {"original_context_length": "original_max_position_embeddings"}
    if scaling == "longrope":
        found = dict(rope_type=scaling)
        for length in ("short", "long"):
            factors = file.tensors[f"rope_factors_{length}.weight"]
            rounded = np.ravel(np.float32(dequantize(factors)))
            found[f"{length}_factor"] = [float(str(factor)) for factor in rounded]
    elif scaling in ("linear", "yarn"):
        found = dict(rope_type=scaling, factor=file.need("rope.scaling.factor"))
        names |= {f"yarn_beta_{end}": f"beta_{end}" for end in ("fast", "slow")}
        names["yarn_attn_factor"] = "attention_factor"
    else:
        raise ValueError(f"{file.paths[0]}: RoPE scaling {scaling!r} is not served")
    given = {other: file.get(f"rope.scaling.{name}") for name, other in names.items()}
    return found | {name: value for name, value in given.items() if value is not None}


def _read_gemma2(file: GGUFile) -> dict[str, Any]:
    return _read_gemma(file, every=2) | dict(
        attn_logit_softcapping=file.get("attn_logit_softcapping", 50.0),
        final_logit_softcapping=file.get("final_logit_softcapping", 30.0),
    )


def _read_gemma3(file: GGUFile) -> dict[str, Any]:
    ropes = _read_gemma(file, every=6)
    # Only layers without a window are turned as the file says.
    full = dict(rope_theta=file.get("rope.freq_base", 1e6))
    ropes["rope_scaling"] = dict(
        full_attention=full | (_read_scaling(file) or dict(rope_type="default")),
        sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
    )
    return ropes


def _read_gemma(file: GGUFile, every: int) -> dict[str, Any]:
    """Read windows of all layers but one of so many, and the scale of scores."""
    layers, heads = file.need("block_count"), file.need("attention.head_count")
    head_dim = file.need("attention.key_length")
    # The largest of each generation divides by what a head has of the hidden size.
    is_largest = layers == {2: 46, 6: 62}[every]
    full, windowed = "full_attention", "sliding_attention"
    return dict(
        sliding_window=file.need("attention.sliding_window"),
        layer_types=[windowed if (i + 1) % every else full for i in range(layers)],
        query_pre_attn_scalar=file.need("embedding_length") // heads
        if is_largest
        else head_dim,
    )


def _read_experts(file: GGUFile) -> dict[str, Any]:
    """Read experts by the names that most settings have; all layers have some."""
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
    return _read_ernie(file) | dict(
        moe_num_experts=file.need("expert_count"),
        moe_k=file.need("expert_used_count"),
        moe_intermediate_size=file.need("expert_feed_forward_length"),
        moe_num_shared_experts=file.get("expert_shared_count", 0),
        moe_layer_interval=file.get("interleave_moe_layer_step", 1),
        moe_layer_start_index=file.get("leading_dense_block_count", 0),
        moe_layer_end_index=max(
            i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in file.tensors
        ),
    )


def _read_granite(file: GGUFile) -> dict[str, Any]:
    names = dict(
        attention_multiplier="attention.scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )
    return {name: file.get(key, 1.0) for name, key in names.items()}


def _read_olmo2(file: GGUFile) -> dict[str, Any]:
    if file.get("attention.sliding_window"):
        raise ValueError(
            f"{file.paths[0]} has windows, as Olmo 3; of GGUF files of the "
            "architecture 'olmo2' those without are served: take the model's "
            "safetensors"
        )
    return {}


def _read_phi3(file: GGUFile) -> dict[str, Any]:
    return dict(
        sliding_window=file.get("attention.sliding_window") or None,
        original_max_position_embeddings=file.get(
            "rope.scaling.original_context_length"
        ),
    )


NO_WINDOW = dict(use_sliding_window=False)
MIXTRAL = Kind("mixtral", "MixtralForCausalLM", _read_experts, is_permuted=True)
KINDS = {
    "llama": Kind("llama", "LlamaForCausalLM", is_permuted=True),
    "qwen2": Kind("qwen2", "Qwen2ForCausalLM", says=NO_WINDOW),
    "qwen2moe": Kind("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe),
    "qwen3": Kind("qwen3", "Qwen3ForCausalLM", says=NO_WINDOW),
    "qwen3moe": Kind("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe),
    "gemma2": Kind("gemma2", "Gemma2ForCausalLM", _read_gemma2, norm_offset=1.0),
    "gemma3": Kind("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, norm_offset=1.0),
    "phi3": Kind("phi3", "Phi3ForCausalLM", _read_phi3),
    "olmo2": Kind("olmo2", "Olmo2ForCausalLM", _read_olmo2),
    "smollm3": Kind("smollm3", "SmolLM3ForCausalLM", says=NO_WINDOW, is_permuted=True),
    "granite": Kind("granite", "GraniteForCausalLM", _read_granite, is_permuted=True),
    "ernie4_5": Kind("ernie4_5", "Ernie4_5ForCausalLM", _read_ernie),
    "ernie4_5-moe": Kind("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _read_ernie_moe),
    "glm4moe": Kind("glm4_moe", "Glm4MoeForCausalLM", _read_glm4_moe),
}
