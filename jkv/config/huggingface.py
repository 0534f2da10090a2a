"""Cache sizes of a model from its Hugging Face config.json.

Settings that would make the sizes wrong are rejected by name, unless the caller passes
the affected field.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jkv.config import layer_kinds
from jkv.config.counts import count_windows, read_count
from jkv.config.families import find_family, find_text_part
from jkv.config.gguf_file import describe_model, find_file, read_file
from jkv.config.layers import Heads, Kept

logger = logging.getLogger("jkv.config")

# Default of max_sequences for a model's cache.
DEFAULT_SEQUENCES = 256

# Alternative names of sizes.
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

NUM_HEADS = ("num_attention_heads", "n_head", "n_heads")

NUM_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)

HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")

HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")

CONTEXT_LENGTH = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
# Training context of Bloom, Falcon and the first Mamba models, which name none.
USUAL_CONTEXT = 2048

# Keys of models with several kinds of layers, which one pool cannot represent.
MIXED_LAYERS = (
    "attn_layer_indices",
    "attn_layer_period",
    "block_configs",
    "ssm_cfg",
    "full_attention_interval",
    "hybrid_override_pattern",
)

GLOBAL_HEADS = ("global_head_dim", "num_global_key_value_heads")

# Keys that list the kind of each layer.
LISTS_OF_LAYERS = ("attn_type_list", "layer_types", "layers_block_type")

MIXED_HEADS = ("global_head_dim", "num_global_key_value_heads", "block_configs")

# Keys of lists of layers, of a number of layers and of nested settings.
TYPES = {
    **dict.fromkeys(LISTS_OF_LAYERS, list),
    "attn_layer_indices": list,
    "full_attn_idxs": list,
    "hybrid_layer_pattern": list,
    "linear_attn_config": dict,
    "max_window_layers": int,
    "no_rope_layers": list,
}

# The fields that determine the bytes of a token in a layer.
HEADS = ("num_kv_heads", "head_dim", "value_head_dim")


class ModelSizes(NamedTuple):
    """Fields of a `CacheConfig` from a model, with notes and per-layer settings."""

    fields: dict[str, Any]
    notes: list[str]
    # Sliding window of each attention layer, None for full attention.
    layer_windows: tuple[int | None, ...]
    # Heads of each attention layer if they differ; `fields` then has none.
    layer_heads: tuple[Heads, ...] | None
    # Cached data of each layer, with `with_states` and recurrent-state layers.
    layers: tuple[Kept, ...] | None = None


def read_sizes(
    folder: str | Path, given: Mapping[str, Any], *, with_states: bool = False
) -> ModelSizes:
    """Read the sizes of a model's cache from its config.json.

    The path is a checkpoint's folder, its config.json or a GGUF file. Settings are not
    read for fields in `given`; a given `num_layers` counts attention layers and
    excludes states. With `with_states`, a model without attention has no fields for
    heads.
    """
    path = find_file(folder)
    raw = describe_model(read_file(path)) if path else _read_json(path := Path(folder))
    try:
        return _sizes(raw, given, with_states)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_fields(folder: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `CacheConfig` with all layers in one pool."""
    sizes = read_sizes(folder, given)
    fields, notes = sizes.fields, sizes.notes
    if not fields["num_layers"]:
        raise ValueError(
            f"{folder}: none of its layers has keys and values; use "
            f"GroupedConfig.from_model for its states"
        )
    layer_kinds.refuse_different(sizes.layer_heads, folder)
    windows = count_windows(sizes.layer_windows)
    if windows and given.get("sliding_window") is None:
        notes.append(
            f"a sliding window of {windows.length} tokens is ignored: all tokens are "
            f"kept ({windows.num_layers} of {fields['num_layers']} layers have it); "
            f"use GroupedConfig.from_model to release tokens left of it"
        )
    for note in notes:
        logger.info("%s: %s", folder, note)
    return {"max_sequences": DEFAULT_SEQUENCES} | fields | dict(given)


def _read_json(path: Path) -> dict[str, Any]:
    path = path if path.is_file() else path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; pass the folder of a Hugging Face checkpoint, or a "
            f"GGUF file"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _sizes(
    raw: dict[str, Any], given: Mapping[str, Any], with_states: bool
) -> ModelSizes:
    model, around, notes = find_text_part(raw)
    model = find_family(model).usual | model
    if model.get("is_encoder_decoder") or raw.get("is_encoder_decoder"):
        raise ValueError(
            "encoder-decoder models need a second cache, which jkv does not support"
        )
    for name, kind in TYPES.items():
        if not isinstance(model.get(name), kind | None):
            raise ValueError(
                f"{name} must be of type {kind.__name__}, got {model[name]!r}"
            )
    totals = [*(model.get(name) for name in NUM_LAYERS), given.get("num_layers")]
    total = next((number for number in totals if isinstance(number, int)), 0)
    kinds = layer_kinds.name_layers(model, total)
    layers = None
    if with_states and not given.get("num_layers"):
        layers = _list_kept(model, kinds)
    num_layers = given.get("num_layers") or _num_layers(model, kinds, notes)
    windows = layer_kinds.list_windows(model, kinds, num_layers)
    heads: tuple[Heads, ...] | None = None
    if not num_layers:
        fields: dict[str, Any] = {}
    elif given.keys().isdisjoint(HEADS) and model.get("kv_lora_rank") is not None:
        _refuse(model, ("per_layer_config",), "num_kv_heads and head_dim")
        fields = _latent_fields(model, notes)
    else:
        heads = _read_heads(model, kinds, windows, given)
        fields = heads[0].as_fields() if len(set(heads)) == 1 else {}
    fields |= dict(
        num_layers=num_layers,
        max_context_length=given.get("max_context_length") or _context(model, notes),
        dtype=given.get("dtype") or _dtype([model, *around], notes),
    )
    different = heads if "num_kv_heads" not in fields else None
    return ModelSizes(
        fields=fields,
        notes=notes,
        layer_windows=windows,
        layer_heads=different,
        layers=layers,
    )


def _list_kept(
    model: dict[str, Any], kinds: list[str] | None
) -> tuple[Kept, ...] | None:
    """Return the cached data of each layer, None without recurrent-state layers."""
    if kinds is None or layer_kinds.WITH_STATE.isdisjoint(kinds):
        return None
    attends = [kind in layer_kinds.ATTENDING for kind in kinds]
    return tuple(map(Kept, attends, layer_kinds.list_states(model, kinds)))


def _num_layers(
    model: dict[str, Any], kinds: list[str] | None, notes: list[str]
) -> int:
    """Count the layers with keys and values of their own."""
    total = len(kinds) if kinds else _read_count(model, NUM_LAYERS, "num_layers")
    if model.get("use_cla"):
        raise ValueError(
            "layers share keys and values (use_cla); give num_layers, the number of "
            "layers with their own"
        )
    is_listed = any(model.get(name) for name in LISTS_OF_LAYERS)
    if not is_listed and (kinds is None or layer_kinds.WITH_STATE.isdisjoint(kinds)):
        _refuse(model, MIXED_LAYERS, "num_layers, how many layers have keys and values")
    if kinds is not None:
        if unknown := set(kinds) - layer_kinds.KNOWN:
            raise ValueError(
                f"layers of unknown kind {sorted(unknown)}; give num_layers, the "
                f"number of attention layers"
            )
        total = sum(kind in layer_kinds.ATTENDING for kind in kinds)
        if total < len(kinds):
            notes.append(f"{total} of {len(kinds)} layers have keys and values")
    if not model.get("num_kv_shared_layers"):
        return total
    shared = _read_count(model, ("num_kv_shared_layers",), "num_layers")
    notes.append(f"the last {shared} layers use the keys and values of others")
    return total - shared


def _read_heads(
    model: dict[str, Any],
    kinds: list[str] | None,
    windows: tuple[int | None, ...],
    given: Mapping[str, Any],
) -> tuple[Heads, ...]:
    """Return the heads of each attention layer, at least of one."""
    heads = given.get("num_kv_heads") or _num_kv_heads(model)
    dim = given.get("head_dim") or _head_dim(model)
    of_values = dim
    if model.get("v_head_dim") and "head_dim" not in given:
        of_values = _read_count(model, ("v_head_dim",), "value_head_dim")
    usual = Heads(heads, dim, given.get("value_head_dim") or of_values)
    if {"num_kv_heads", "head_dim"} <= given.keys() or not layer_kinds.may_differ(
        model
    ):
        return (usual,)
    if kinds:
        attending = [i for i, each in enumerate(kinds) if each in layer_kinds.ATTENDING]
        windowed = {
            layer: kinds[layer] in layer_kinds.WITH_WINDOW
            for layer in attending[: len(windows)]
        }
    else:
        windowed = {layer: False for layer in range(len(windows))}
    fixed = {name: given[name] for name in HEADS if name in given}
    own = tuple(
        each._replace(**fixed)
        for each in layer_kinds.list_heads(model, usual, windowed)
    )
    return own or (usual,)


def _num_kv_heads(model: dict[str, Any]) -> int:
    _refuse_mixed_heads(model)
    # An older key of multi-query attention.
    if model.get("multi_query") and not model.get("new_decoder_architecture"):
        return 1
    if all(model.get(name) is None for name in NUM_KV_HEADS):
        return _read_count(model, NUM_HEADS, "num_kv_heads")
    return _read_count(model, NUM_KV_HEADS, "num_kv_heads")


def _head_dim(model: dict[str, Any]) -> int:
    _refuse_mixed_heads(model)
    if any(model.get(name) is not None for name in HEAD_DIM):
        return _read_count(model, HEAD_DIM, "head_dim")
    hidden, heads = (
        _read_count(model, names, "head_dim") for names in (HIDDEN_SIZE, NUM_HEADS)
    )
    if hidden % heads:
        raise ValueError(
            f"a hidden size of {hidden} is not a multiple of {heads} heads; give "
            f"head_dim"
        )
    return hidden // heads


def _dtype(parts: list[dict[str, Any]], notes: list[str]) -> str:
    """Return the dtype's name, by default float32 as in transformers."""
    for settings in parts:
        for key in ("dtype", "torch_dtype"):
            if isinstance(settings.get(key), str):
                name = str(settings[key]).removeprefix("torch.")
                if name not in ("float32", "float16", "bfloat16"):
                    raise ValueError(
                        f"its weights are {name}, which does not determine the dtype "
                        f"of keys and values; give dtype"
                    )
                return name
    notes.append("config.json names no dtype, float32 is assumed; give dtype")
    return "float32"


def _context(model: dict[str, Any], notes: list[str]) -> int:
    """Return the longest context; models without learned positions may name none."""
    if any(model.get(name) is not None for name in CONTEXT_LENGTH):
        return _read_count(model, CONTEXT_LENGTH, "max_context_length")
    notes.append(
        f"config.json names no context length, {USUAL_CONTEXT:,} is assumed; give "
        f"max_context_length"
    )
    return USUAL_CONTEXT


def _read_count(model: dict[str, Any], names: tuple[str, ...], field: str) -> int:
    """Return the first key that is set, which must be a positive int."""
    for name in names:
        if model.get(name) is not None:
            return read_count(name, model[name], field)
    raise ValueError(f"it has none of {', '.join(names)}; give {field}")


def _refuse_mixed_heads(model: dict[str, Any]) -> None:
    """Reject keys of differing heads, for model types without an entry for them."""
    known = GLOBAL_HEADS if find_family(model).global_head_dim else ()
    keys = tuple(key for key in MIXED_HEADS if key not in known)
    _refuse(model, keys, "num_kv_heads and head_dim")


def _refuse(model: dict[str, Any], keys: tuple[str, ...], fields: str) -> None:
    for key in keys:
        if model.get(key) is not None:
            raise ValueError(
                f"{key} makes the layers differ in their heads or kind; give {fields}"
            )


def _latent_fields(model: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the fields of multi-head latent attention, one vector for all heads."""
    given = "num_kv_heads and head_dim"
    width = rank = _read_count(model, ("kv_lora_rank",), given)
    if model.get("qk_rope_head_dim"):
        width += _read_count(model, ("qk_rope_head_dim",), given)
    notes.append(f"latent attention: one vector of {width} a token, values its {rank}")
    return {
        "num_kv_heads": 1,
        "head_dim": width,
        "value_head_dim": rank,
        "values_in_keys": True,
    }
