"""What a Llama-like checkpoint's config.json says, checked.

One frozen, hashable object holds every static setting of the model, so that it can be
closed over by jit. Whatever the forward pass would compute wrongly is refused here, by
name, instead of giving fluent nonsense later.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .rope import Rope, read_rope

# Each architecture and the defaults its config class in transformers has for keys that
# a config.json may leave out (old Llama and Mistral checkpoints do).
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {"max_window_layers": 28, "max_position_embeddings": 32_768},
    "qwen3": {
        "head_dim": 128,
        "max_window_layers": 28,
        "max_position_embeddings": 32_768,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shapes and switches of a model.

    vocab_size, hidden_size, intermediate_size: ints, `V`, `E` and `F` below.
    num_layers, num_heads, num_kv_heads, head_dim: ints, `L`, `H`, `K`, `D`.
    max_context_length: int, positions that the model was trained for.
    norm_epsilon: float, added to the mean square in RMSNorm.
    rope: how positions turn queries and keys.
    windows: per layer, how many tokens a token sees, itself counted; None is all.
    tied: the output projection is the embedding.
    has_qkv_bias, has_output_bias: biases of the attention's projections.
    has_qk_norm: each head's queries and keys are normed before they are turned.
    stop_tokens: ids after which a generation ends; empty when none is named.
    dtype_name: the type the checkpoint says its weights have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_length: int
    norm_epsilon: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    stop_tokens: tuple[int, ...] = ()
    dtype_name: str = "float32"


def read_config(folder: str | Path) -> LlamaConfig:
    """Read the config.json (and generation_config.json) of a checkpoint folder.

    Raises:
        FileNotFoundError: when there is no config.json.
        ValueError: when it asks for something that this model does not compute.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a checkpoint is a folder with config.json, "
            "*.safetensors and tokenizer.json"
        )
    raw = read_json(path)
    config = parse_config(raw)

    # Chat models name further stop tokens beside their config.
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        stop = _token_ids(read_json(generation).get("eos_token_id"))
        config = dataclasses.replace(config, stop_tokens=stop or config.stop_tokens)
    return config


def parse_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Turn the contents of a config.json into a ``LlamaConfig``.

    Raises:
        ValueError: when it asks for something that this model does not compute.
    """
    model_type = _supported_model_type(raw)
    settings = {**ARCHITECTURES[model_type], **raw}

    def count(key: str, default: int | None = None) -> int:
        value = settings.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key!r} must be an int >= 1, got {value!r}")
        return value

    def flag(key: str) -> bool:
        value = settings.get(key)
        if value not in (None, True, False):
            raise ValueError(f"config.json: {key!r} must be true or false: {value!r}")
        return bool(value)

    num_heads, hidden_size = count("num_attention_heads"), count("hidden_size")
    num_kv_heads = count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: {num_heads} query heads cannot share {num_kv_heads} "
            "key-value heads evenly"
        )
    head_dim = count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even, got {head_dim}")
    num_layers = count("num_hidden_layers")
    has_bias = model_type != "mistral" and flag("attention_bias")
    return LlamaConfig(
        vocab_size=count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_length=count("max_position_embeddings"),
        norm_epsilon=_read_epsilon(settings),
        rope=read_rope(settings),
        windows=_windows(model_type, settings, num_layers),
        tied=flag("tie_word_embeddings"),
        has_qkv_bias=model_type == "qwen2" or has_bias,
        has_output_bias=model_type != "qwen2" and has_bias,
        has_qk_norm=model_type == "qwen3",
        stop_tokens=_token_ids(settings.get("eos_token_id")),
        dtype_name=_read_dtype(settings),
    )


def _read_epsilon(settings: Mapping[str, Any]) -> float:
    value = settings.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(
            f"config.json: 'rms_norm_eps' must be a number above 0, got {value!r}"
        )
    return float(value)


def _read_dtype(settings: Mapping[str, Any]) -> str:
    """Return the name of the weights' type; float32 when none is named."""
    value = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    if not isinstance(value, str):
        raise ValueError(f"config.json: 'dtype' must be a name, got {value!r}")
    return value


def _supported_model_type(raw: Mapping[str, Any]) -> str:
    """Return the model type, or refuse what this model does not compute."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(
            f"config.json names the architecture {model_type!r}; supported are "
            + ", ".join(ARCHITECTURES)
        )
    names = raw.get("architectures") or ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: 'architectures' must be names, got {names!r}")
    for name in names:
        if not name.endswith("ForCausalLM"):
            raise ValueError(
                f"config.json says the checkpoint is a {name}, which does not predict "
                "tokens; a ...ForCausalLM checkpoint is needed"
            )
    if raw.get("quantization_config"):
        raise ValueError(
            "config.json has a 'quantization_config': quantised checkpoints are not "
            "supported; use the float16, bfloat16 or float32 original"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(
            f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only silu"
        )
    if raw.get("mlp_bias"):
        raise ValueError("config.json: mlp_bias is not supported")
    return str(model_type)


def _windows(
    model_type: str, settings: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where it sees everything."""
    window = settings.get("sliding_window")
    if model_type.startswith("qwen"):
        # transformers' default, for a config.json that only switches windows on.
        window = settings.get("sliding_window", 4096)
        is_used = settings.get("use_sliding_window")
        if is_used not in (None, True, False):
            raise ValueError(
                f"config.json: 'use_sliding_window' must be true or false: {is_used!r}"
            )
        window = window if is_used else None
    if model_type == "llama" or window is None:
        return (None,) * num_layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"config.json: sliding_window must be an int >= 1 or null, got {window!r}"
        )

    # Mistral's windows are everywhere, Qwen's from layer max_window_layers on, unless
    # the newer `layer_types` says it layer by layer.
    kinds = settings.get("layer_types")
    if kinds is None:
        first = 0 if model_type == "mistral" else settings["max_window_layers"]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(
                f"config.json: 'max_window_layers' must be an int >= 0, got {first!r}"
            )
        return tuple(None if i < first else window for i in range(num_layers))
    by_kind = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list):
        raise ValueError(f"config.json: 'layer_types' must be a list, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - set(by_kind))
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"config.json: layer_types must name {num_layers} layers, each "
            f"full_attention or sliding_attention; got {len(kinds)}, unknown {unknown}"
        )
    if model_type == "mistral" and "full_attention" in kinds:
        raise ValueError("config.json: a Mistral with mixed layer_types is unsupported")
    return tuple(by_kind[kind] for kind in kinds)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return token ids given as null, an int, or a list of ints."""
    ids = () if value is None else value if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(
                f"config.json: 'eos_token_id' must be ids >= 0, got {value!r}"
            )
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of settings.

    Raises:
        ValueError: when it holds no JSON object.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return contents
