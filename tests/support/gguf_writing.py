"""GGUF files written from tiny checkpoints, as llama.cpp's converter would."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from gguf.quants import quantize

# What transformers calls an architecture, and GGUF.
NAMES = {"gemma3_text": "gemma3"}
TOKENS = ["t", "0", *(f"t{number}" for number in range(126))]
VOCABULARY = {"model": "gpt2", "tokens": TOKENS, "merges": ["t 0"]}


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The settings of a checkpoint, and its tensors in float32."""
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
    """Write a model's file, matrices as of one kind.

    Args:
        path: of the file.
        config: as config.json has it.
        tensors: by the checkpoint's names, float32.
        kind: such as "Q8_0".
        architecture: another one than the config's.
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
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(numbers[name], layers)
    for stored, array in tensors.items():
        target = names.get_name(stored, try_suffixes=(".weight", ".bias")) or stored
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
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta")))
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            getattr(writer, f"add_{key}")(config[key])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])


def _as_stored(
    name: str, stored: str, array: np.ndarray, config: dict[str, Any]
) -> np.ndarray:
    """A tensor as the converter stores it."""
    if name.startswith("gemma") and stored.endswith("norm.weight"):
        return array + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if name == "llama" and f".{part}." in stored:
            halves = array.reshape(config[key], 2, -1, *array.shape[1:])
            return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _type_of(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: "BOOL", int: "UINT32", str: "STRING"}
    return gguf.GGUFValueType[kinds[type(value)]]
