"""Heads, sliding windows and states of each layer, from a config.json.

Layers with different heads differ in bytes per token, so they need a pool each: a group
of a `GroupedConfig`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jkv.config.counts import read_count
from jkv.config.families import (
    BOTH,
    BOTH_WINDOWED,
    FAMILIES,
    FULL,
    STATE,
    WINDOWED,
    Family,
    find_family,
)
from jkv.config.layers import Heads, LayerState

# Kinds of layers, as named by `layer_types` and its predecessors.
WITH_WINDOW = {WINDOWED, "chunked_attention", BOTH_WINDOWED}
ATTENDING = {FULL, *WITH_WINDOW, "attention", BOTH}
WITH_STATE = {STATE, "mamba", "mamba2", "conv", "recurrent", BOTH, BOTH_WINDOWED}
KNOWN = ATTENDING | WITH_STATE | {"mlp", "moe"}  # with layers that cache nothing

# EXAONE's letters for kinds of layers.
LETTERS = {"L": WINDOWED, "G": FULL}

# Entries of per_layer_config that affect the cache, by our names.
FIELDS = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "v_head_dim": "value_head_dim",
}

# Entries of per_layer_config that do not affect the cache.
WITHOUT_KEYS = {
    "attention_bias",
    "hidden_act",
    "hidden_activation",
    "intermediate_size",
    "mlp_bias",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_theta",
}

# The same fields for windowed layers, in configurations of the models' authors.
OF_WINDOWED = {
    "swa_num_key_value_heads": "num_kv_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "value_head_dim",
}


def name_layers(model: dict[str, Any], num_layers: int) -> list[str] | None:
    """Return the kind of each layer as in `layer_types`, None if unknown."""
    family, layers = find_family(model), range(num_layers)
    kinds = model.get("layer_types") or model.get("layers_block_type")
    if isinstance(kinds, list):
        names = [kind if isinstance(kind, str) else repr(kind) for kind in kinds]
        kinds = [family.own_kinds.get(name, name) for name in names]
    else:
        kinds = family.kinds and family.kinds(model, layers)
    if kinds is None:
        kinds = _name_by_keys(model, layers, family)
    return [*kinds[:-1], FULL] if kinds and family.last_is_full else kinds


def _name_by_keys(
    model: dict[str, Any], layers: range, family: Family
) -> list[str] | None:
    """Return the kinds of layers from keys of the models' authors, or by period."""
    if isinstance(attending := model.get("full_attn_idxs"), list):
        return [FULL if layer in attending else "conv" for layer in layers]
    if isinstance(types := model.get("attn_type_list"), list):
        # MiniMax: 1 is softmax attention, 0 is lightning attention.
        return [FULL if attends == 1 else STATE for attends in types]
    if isinstance(pattern := model.get("hybrid_layer_pattern"), list):
        return [WINDOWED if has_window else FULL for has_window in pattern]
    keys = "sliding_window_pattern", "global_attn_every_n_layers"
    every = next((model[key] for key in keys if model.get(key)), family.full_every)
    if isinstance(every, str):
        return _read_letters(every, layers)
    if not isinstance(every, int):
        return None
    kinds = [WINDOWED if (layer + 1) % every else FULL for layer in layers]
    return [FULL, *kinds[1:]] if kinds and family.first_is_full else kinds


def _read_letters(pattern: str, layers: range) -> list[str]:
    """Name layers by EXAONE's repeated letters; the last one has full attention."""
    if set(pattern) - {*LETTERS}:
        raise ValueError(
            f"config.json: 'sliding_window_pattern' must be an int >= 0, or letters L "
            f"(windowed) and G (full attention), got {pattern!r:.60}"
        )
    named = [LETTERS[pattern[layer % len(pattern)]] for layer in layers]
    return [*named[:-1], *(FULL for _ in layers[-1:])]


def is_switched_off(model: Mapping[str, Any]) -> bool:
    """True if a key switches a model's windows off.

    Of the architectures with windows only Qwen's and SmolLM3 use the key; transformers
    ignores it elsewhere.
    """
    family = find_family(model)
    has_windows = family.window or family.full_every or family.kinds
    if has_windows and "use_sliding_window" not in family.more:
        return False
    return not model.get("use_sliding_window", True)


def list_windows(
    model: dict[str, Any],  # the language model's settings, from a config.json
    # of all layers, as returned by `name_layers`
    kinds: Sequence[str] | None,
    num_layers: int,  # number of attention layers, the first ones of the model
) -> tuple[int | None, ...]:
    """Return the window of each attention layer, None for full attention."""
    if is_switched_off(model):
        return (None,) * num_layers
    length = _read_window(model, "sliding_window")
    length = length or _read_window(model, "attention_chunk_size")
    if find_family(model).counts_past:
        past = _read_window(model, "sliding_window_size")
        length = past + 1 if past else length
    if length is None:
        return (None,) * num_layers
    if kinds is None:
        first = model.get("max_window_layers") or 0
        windowed = [layer >= first for layer in range(num_layers)]
    else:
        kept = (kind for kind in kinds if kind in ATTENDING)
        windowed = [kind in WITH_WINDOW for kind in kept]
        windowed += [False] * (num_layers - len(windowed))
    return tuple(length if each else None for each in windowed[:num_layers])


def list_states(
    model: dict[str, Any],  # likewise
    kinds: Sequence[str] | None,
) -> tuple[LayerState | None, ...]:
    """Return the state of each layer of a model, None without one."""
    if kinds is None or WITH_STATE.isdisjoint(kinds):
        return (None,) * len(kinds or ())
    read = find_family(model).state
    if read is None:
        known = sorted(name for name, family in FAMILIES.items() if family.state)
        raise ValueError(
            f"layers of model type {str(model.get('model_type'))!r} have a state, and "
            f"jkv supports only {', '.join(known)}; give num_layers, the number of "
            f"attention layers, to ignore states"
        )
    state = read(model)
    return tuple(state if kind in WITH_STATE else None for kind in kinds)


def list_heads(
    model: Mapping[str, Any],  # the language model's settings, from a config.json
    usual: Heads,  # defaults for all layers
    # True for windowed layers, by the index of each attention layer
    windowed: Mapping[int, bool],
) -> tuple[Heads, ...]:
    """Return the heads of each attention layer."""
    given = model.get("per_layer_config")
    if isinstance(given, Mapping):
        fields = dict(_read_entry(layer, entry) for layer, entry in given.items())
        return tuple(_change(usual, fields.get(layer, {})) for layer in windowed)
    if given is not None:
        raise ValueError(f"per_layer_config must be an object, got {given!r}")
    return tuple(
        _change(usual, _read_kind(model, usual, has_window))
        for has_window in windowed.values()
    )


def may_differ(model: Mapping[str, Any]) -> bool:
    """True if the layers of the model type may differ in their heads."""
    family = find_family(model)
    return (
        model.get("per_layer_config") is not None
        or family.global_head_dim is not None
        or family.window_heads > 1
        or any(model.get(name) is not None for name in OF_WINDOWED)
    )


def refuse_different(layers: Sequence[Heads] | None, folder: object) -> None:
    """Reject layers with different heads, if any, for a configuration of one pool."""
    if layers is None:
        return
    layers_by_heads = "; ".join(
        f"{n} have {heads}" for heads, n in Counter(layers).items()
    )
    raise ValueError(
        f"{folder}: its layers differ in their heads: {layers_by_heads}. Use "
        f"GroupedConfig.from_model; or, for one pool, give num_kv_heads and head_dim "
        f"large enough for all"
    )


def _change(usual: Heads, fields: dict[str, int]) -> Heads:
    """Replace fields; the value head dim follows the head dim if they were equal."""
    if "head_dim" in fields and usual.value_head_dim == usual.head_dim:
        fields = {"value_head_dim": fields["head_dim"]} | fields
    return usual._replace(**fields)


def _read_entry(layer: str | int, entry: Any) -> tuple[int, dict[str, int]]:
    """Return a layer's index, and its overridden fields in per_layer_config."""
    if not str(layer).isdecimal() or not isinstance(entry, Mapping):
        raise ValueError(
            f"per_layer_config must hold an object by a layer's index, got {entry!r} "
            f"for {layer!r}"
        )
    unknown = sorted(entry.keys() - FIELDS.keys() - WITHOUT_KEYS)
    if unknown:
        raise ValueError(
            f"per_layer_config changes {', '.join(unknown)} of single layers, whose "
            f"effect on the cache is unknown; give num_kv_heads and head_dim"
        )
    names = entry.keys() & FIELDS.keys()
    return int(layer), {FIELDS[name]: _read_count(entry, name) for name in names}


def _read_count(model: Mapping[str, Any], name: str) -> int:
    return read_count(name, model[name], "num_kv_heads and head_dim")


def _read_window(model: Mapping[str, Any], name: str) -> int | None:
    """Return the length of a window, or None if it is off: null, false, 0 or -1."""
    length = model.get(name)
    if length in (None, False, -1):
        return None
    return read_count(name, length, "null, 0 or -1 in config.json for full attention")


def _read_kind(
    model: Mapping[str, Any], usual: Heads, has_window: bool
) -> dict[str, int]:
    """Return the overridden fields of layers with or without a window."""
    family = find_family(model)
    if has_window:
        named = {n: ours for n, ours in OF_WINDOWED.items() if model.get(n) is not None}
        fields = {"num_kv_heads": family.window_heads * usual.num_kv_heads}
        return fields | {ours: _read_count(model, name) for name, ours in named.items()}
    if family.global_head_dim is None:
        return {}
    fields = {"head_dim": family.global_head_dim}
    if model.get("global_head_dim") is not None:
        fields["head_dim"] = _read_count(model, "global_head_dim")
    name = "num_global_key_value_heads"
    is_used = family.gate is None or model.get(family.gate)
    if is_used and model.get(name) is not None:
        fields["num_kv_heads"] = _read_count(model, name)
    return fields
