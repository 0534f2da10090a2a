"""Which heads each layer of a model has, where its layers differ in them.

Layers with other heads keep other bytes a token, so that one pool cannot hold them as
they are. With a group for each kind of layer (`GroupedConfig`) every pool is exact.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jkv.config.families import find_family
from jkv.config.layer_states import Heads

# What an entry of per_layer_config may say that the cache depends on, by our names.
FIELDS = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "v_head_dim": "value_head_dim",
}

# And what it may say that the cache does not depend on.
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

# The same fields for layers with a window, by the model's authors.
OF_WINDOWED = {
    "swa_num_key_value_heads": "num_kv_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "value_head_dim",
}


def list_heads(
    model: Mapping[str, Any],  # the language model's settings, from a config.json
    usual: Heads,  # what they say of all layers
    # for each of these layers, by its number in the model, whether it has a window
    windowed: Mapping[int, bool],
) -> tuple[Heads, ...]:
    """Return the heads of each layer that keeps keys and values."""
    given = model.get("per_layer_config")
    if isinstance(given, Mapping):
        own = {int(layer): _read_entry(entry) for layer, entry in given.items()}
        return tuple(_change(usual, own.get(layer, {})) for layer in windowed)
    return tuple(
        _change(usual, _read_kind(model, usual, has_window))
        for has_window in windowed.values()
    )


def may_differ(model: Mapping[str, Any]) -> bool:
    """Return whether a model is of a kind whose layers differ in their heads."""
    family = find_family(model)
    return (
        isinstance(model.get("per_layer_config"), Mapping)
        or family.global_head_dim is not None
        or family.window_heads > 1
        or any(model.get(name) is not None for name in OF_WINDOWED)
    )


def refuse_different(layers: Sequence[Heads] | None, folder: object) -> None:
    """Refuse layers with different heads, if any, for the one pool of a folder."""
    if layers is None:
        return
    said = "; ".join(f"{n} have {heads}" for heads, n in Counter(layers).items())
    raise ValueError(
        f"{folder}: its layers differ in their heads: {said}. "
        f"GroupedConfig.from_model has a group for each kind; for one pool give "
        f"num_kv_heads and head_dim that are enough for all"
    )


def _change(usual: Heads, fields: dict[str, int]) -> Heads:
    """Return heads with other fields; values stay as wide as keys where they were."""
    if "head_dim" in fields and usual.value_head_dim == usual.head_dim:
        fields = {"value_head_dim": fields["head_dim"]} | fields
    return usual._replace(**fields)


def _read_entry(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields that a layer of per_layer_config has of its own."""
    unknown = sorted(entry.keys() - FIELDS.keys() - WITHOUT_KEYS)
    if unknown:
        raise ValueError(
            f"per_layer_config changes {', '.join(unknown)} of single layers, which "
            f"jkv cannot tell the cache of; give num_kv_heads and head_dim"
        )
    return {FIELDS[name]: entry[name] for name in entry.keys() & FIELDS.keys()}


def _read_kind(
    model: Mapping[str, Any], usual: Heads, has_window: bool
) -> dict[str, int]:
    """Return the fields that layers with or without a window have of their own."""
    family = find_family(model)
    if has_window:
        named = {ours: model.get(name) for name, ours in OF_WINDOWED.items()}
        fields = {"num_kv_heads": family.window_heads * usual.num_kv_heads}
        return fields | {name: n for name, n in named.items() if n is not None}
    if family.global_head_dim is None:
        return {}
    fields = {"head_dim": model.get("global_head_dim") or family.global_head_dim}
    heads = model.get("num_global_key_value_heads")
    if heads is not None and (family.gate is None or model.get(family.gate)):
        fields["num_kv_heads"] = heads
    return fields
