"""Write GGUF files from tiny checkpoints, like llama.cpp's converter."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from gguf.quants import quantize

# Architecture names in transformers and in GGUF.
NAMES = {
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
}
HAVE_WINDOWS = ("gemma2", "gemma3_text", "phi3", "olmo2")
PERMUTED = ("llama", "smollm3", "granite")
EXPERT = re.compile(r"(model\.layers\.\d+)\.(.*)\.experts\.\d+\.(\w+)\.weight")
# Names that the converter gives Mixtral's merged expert tensors.
MERGED = {
    "block_sparse_moe": ("layers", "feed_forward"),
    "mlp": ("model.layers", "mlp"),
}
TOKENS = ["t", "0", *(f"t{number}" for number in range(126))]
VOCABULARY = {"model": "gpt2", "tokens": TOKENS, "merges": ["t 0"]}


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the configuration of a checkpoint, and its tensors in float32."""
    tensors: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    wide = {name: np.float32(array) for name, array in tensors.items()}
    return json.loads((folder / "config.json").read_text()), wide


def write(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: str = "F32",
    architecture: str | None = None,
    vocabulary: dict[str, Any] | None = None,
) -> Path:
    """Write a model's GGUF file, with matrices of one kind.

    Args:
        path: of the file.
        config: the contents of config.json.
        tensors: by the checkpoint's names, float32.
        kind: such as "Q8_0".
        architecture: overrides the config's.
        vocabulary: tokens, and other lists and flags of `tokenizer.ggml`.
    """
    name = NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture or name)
    _write_sizes(writer, config)
    for key, value in (vocabulary or VOCABULARY).items():
        add = writer.add_array if isinstance(value, list) else writer.add_key_value
        given = [value] if isinstance(value, list) else [value, _type_of(value)]
        add(f"tokenizer.ggml.{key}", *given)
    numbers = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
    past = config.get("num_nextn_predict_layers") or 0
    layers = config["num_hidden_layers"] + past
    names = gguf.get_tensor_name_map(numbers[name], layers)
    for stored, array in _merge_experts(tensors).items():
        known = stored.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(known, try_suffixes=(".weight", ".bias")) or stored
        array = _as_stored(name, stored, array, config)
        quantized = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        data = quantize(array, quantized)
        writer.add_tensor(target, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    past = config.get("num_nextn_predict_layers") or 0
    writer.add_block_count(config["num_hidden_layers"] + past)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta")))
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    part = rope.get("partial_rotary_factor")
    if part:
        writer.add_rope_dimension_count(int(head_dim * part))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        length = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)
        for end in ("short", "long"):
            factors = np.float32(rope[f"{end}_factor"])
            writer.add_tensor(f"rope_factors_{end}.weight", factors)
    if config["model_type"] in HAVE_WINDOWS and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _write_experts(writer, config)
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            getattr(writer, f"add_{key}")(config[key])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])


def _write_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = {
        "add_expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
        "add_expert_used_count": ("num_experts_per_tok", "moe_k"),
        "add_expert_feed_forward_length": ("moe_intermediate_size",),
        "add_expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
        "add_expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "add_expert_group_count": ("n_group",),
        "add_expert_group_used_count": ("topk_group",),
        "add_expert_weights_scale": ("routed_scaling_factor",),
        "add_leading_dense_block_count": (
            *("first_k_dense_replace", "moe_layer_start_index"),
        ),
        "add_interleave_moe_layer_step": ("moe_layer_interval",),
        "add_nextn_predict_layers": ("num_nextn_predict_layers",),
    }
    names["add_expert_count"] += ("moe_num_experts",)
    for add, keys in names.items():
        for key in keys:
            if config.get(key) is not None:
                getattr(writer, add)(config[key])
    if config["model_type"] == "glm4_moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _merge_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Merge the experts of each layer into one tensor, by the converter's names."""
    merged: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in sorted(tensors.items(), key=lambda each: _numbers(each[0])):
        if expert := EXPERT.fullmatch(name):
            prefix, part = MERGED[expert[2]]
            number = expert[1].removeprefix("model.layers.")
            whole = f"{prefix}.{number}.{part}.experts.{expert[3]}.weight"
            stacks.setdefault(whole, []).append(array)
        else:
            merged[name] = array
    return merged | {name: np.stack(arrays) for name, arrays in stacks.items()}


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\.(\d+)\.", name)]


def _as_stored(
    name: str, stored: str, array: np.ndarray, config: dict[str, Any]
) -> np.ndarray:
    """Return a tensor as the converter stores it."""
    if name.startswith("gemma") and stored.endswith("norm.weight"):
        return array + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if name in PERMUTED and f".{part}." in stored:
            halves = array.reshape(config[key], 2, -1, *array.shape[1:])
            return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _type_of(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: "BOOL", int: "UINT32", str: "STRING"}
    return gguf.GGUFValueType[kinds[type(value)]]
