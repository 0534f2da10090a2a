"""What a Hugging Face config.json says about a model's keys and values.

Only the sizes of its cache are read. Whatever would make them wrong is refused by name,
unless the caller gives the number it is needed for.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jkv.config.layer_windows import list_windows
from jkv.config.text_part import find_text_part

# What transformers assumes when a config.json of this model type leaves a key out.
DEFAULTS: dict[str, dict[str, int]] = {
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4},
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128, "use_sliding_window": False},
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
}

# One size goes by several names.
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")

NUM_HEADS = ("num_attention_heads", "n_head", "n_heads")

NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")

HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")

CONTEXT_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

# Kinds of layers, as `layer_types` and its forerunners name them.
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}

WITHOUT_KEYS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp"}

# Keys of models whose layers differ in a way that one pool cannot mirror unasked.
MIXED_LAYERS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "full_attention_interval",
    "hybrid_override_pattern",
    "ssm_cfg",
)

MIXED_HEADS = ("global_head_dim", "num_global_key_value_heads", "block_configs")


class ModelSizes(NamedTuple):
    """The fields of a `CacheConfig` that a model decides, and what to know of them."""

    fields: dict[str, Any]
    notes: list[str]
    # The window of each layer that keeps keys and values, None for all tokens.
    layer_windows: tuple[int | None, ...]


def read_sizes(folder: str | Path, given: Mapping[str, Any]) -> ModelSizes:
    """Read the sizes of a model's cache from its config.json.

    Args:
      folder: a checkpoint's folder, or the file itself.
      given: fields of `CacheConfig` that are known already; what they stand for is not
        looked at.

    Returns:
      The fields, those given among them, notes on what the cache does not mirror, and
      the window of each layer.

    Raises:
      FileNotFoundError: without a config.json.
      ValueError: for a model whose cache has no such sizes, saying what to give.
    """
    path = Path(folder)
    path = path if path.is_file() else path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; give the folder of a checkpoint in the format of "
            f"Hugging Face"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no object of settings")
    try:
        return _sizes(raw, given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _sizes(raw: dict[str, Any], given: Mapping[str, Any]) -> ModelSizes:
    model, around, notes = find_text_part(raw)
    model = DEFAULTS.get(str(model.get("model_type")), {}) | model
    if model.get("is_encoder_decoder") or raw.get("is_encoder_decoder"):
        raise ValueError(
            "encoders with decoders keep a second cache, which jkv has not"
        )
    readers = {
        "num_layers": lambda: _num_layers(model, notes),
        "num_kv_heads": lambda: _num_kv_heads(model),
        "head_dim": lambda: _head_dim(model),
        "max_context_length": lambda: _read_count(
            model, CONTEXT_LENGTH, "max_context_length"
        ),
        "dtype": lambda: _dtype([model, *around], notes),
    }
    latent: dict[str, Any] = {}
    if given.keys().isdisjoint(("num_kv_heads", "head_dim", "value_head_dim")):
        latent = _latent_fields(model, notes)
    known = latent | dict(given)
    fields = latent | {
        name: known[name] if name in known else read() for name, read in readers.items()
    }
    return ModelSizes(fields, notes, list_windows(model, fields["num_layers"]))


def _num_layers(model: dict[str, Any], notes: list[str]) -> int:
    """Count the layers that have keys and values of their own."""
    kinds = model.get("layer_types") or model.get("layers_block_type")
    total = _read_count(model, NUM_LAYERS, "num_layers")
    if kinds is not None:
        unknown = set(kinds) - ATTENDING - WITHOUT_KEYS
        if unknown:
            raise ValueError(
                f"layers of unknown kind {sorted(unknown)}; give num_layers, how many "
                f"have keys and values"
            )
        total = sum(kind in ATTENDING for kind in kinds)
        if total < len(kinds):
            notes.append(f"{total} of {len(kinds)} layers attend, the others do not")
    else:
        _refuse(model, MIXED_LAYERS, "num_layers, how many layers have keys and values")
    shared = model.get("num_kv_shared_layers") or 0
    if shared:
        notes.append(f"the last {shared} layers use the keys and values of others")
    return total - int(shared)


def _num_kv_heads(model: dict[str, Any]) -> int:
    _refuse(model, MIXED_HEADS, "num_kv_heads and head_dim")
    # One head for all queries, by an older name.
    if model.get("multi_query") and not model.get("new_decoder_architecture"):
        return 1
    if all(model.get(name) is None for name in NUM_KV_HEADS):
        return _read_count(model, NUM_HEADS, "num_kv_heads")
    return _read_count(model, NUM_KV_HEADS, "num_kv_heads")


def _head_dim(model: dict[str, Any]) -> int:
    _refuse(model, MIXED_HEADS, "num_kv_heads and head_dim")
    if model.get("head_dim") is not None:
        return _read_count(model, ("head_dim",), "head_dim")
    hidden, heads = (
        _read_count(model, names, "head_dim") for names in (HIDDEN_SIZE, NUM_HEADS)
    )
    if hidden % heads:
        raise ValueError(
            f"a hidden size of {hidden} is no multiple of {heads} heads; give head_dim"
        )
    return hidden // heads


def _dtype(parts: list[dict[str, Any]], notes: list[str]) -> str:
    """Return the dtype's name, float32 if none is named, as transformers does."""
    for settings in parts:
        for key in ("dtype", "torch_dtype"):
            if isinstance(settings.get(key), str):
                name = str(settings[key]).removeprefix("torch.")
                if name not in ("float32", "float16", "bfloat16"):
                    raise ValueError(
                        f"its weights are {name}, which says nothing of keys and "
                        f"values; give dtype"
                    )
                return name
    notes.append("config.json names no dtype, float32 is assumed; give dtype")
    return "float32"


def _read_count(model: dict[str, Any], names: tuple[str, ...], field: str) -> int:
    """Return the first of several keys that is there, a positive int."""
    for name in names:
        value = model.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, no count; give {field}")
            return value
    raise ValueError(f"it has none of {', '.join(names)}; give {field}")


def _refuse(model: dict[str, Any], keys: tuple[str, ...], fields: str) -> None:
    """Refuse a model with one of these keys."""
    for key in keys:
        if model.get(key) is not None:
            raise ValueError(
                f"it has {key}, so its layers are not alike; give {fields}"
            )


def _latent_fields(model: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the layout of a model that caches one latent vector for all heads."""
    rank = model.get("kv_lora_rank")
    if rank is None:
        return {}
    width = int(rank) + int(model.get("qk_rope_head_dim") or 0)
    notes.append(f"latent attention: one vector of {width} a token, values its {rank}")
    return {
        "num_kv_heads": 1,
        "head_dim": width,
        "value_head_dim": int(rank),
        "values_in_keys": True,
    }
