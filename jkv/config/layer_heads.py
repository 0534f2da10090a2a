"""Which heads each layer of a model has, where its layers differ in them.

Layers with other heads keep other bytes a token, so that one pool cannot hold them as
they are. With a group for each kind of layer (`GroupedConfig`) every pool is exact.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

# Model types whose layers without a window have this head dim, and fewer kv heads if
# config.json says so; and those that say so only where the second key is set.
GLOBAL_HEAD_DIM = {"gemma4_text": 512, "gemma4_unified_text": 512}

GATES = {"gemma4_text": "attention_k_eq_v"}

# Model types whose layers with a window have twice the kv heads of the others.
TWICE_IN_WINDOWS = {"mimo_v2_flash"}


class Heads(NamedTuple):
    """What a token takes in one layer."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    def as_fields(self) -> dict[str, int]:
        """Return them as fields; values as wide as keys go without saying."""
        fields = self._asdict()
        if self.value_head_dim == self.head_dim:
            del fields["value_head_dim"]
        return fields

    def __str__(self) -> str:
        values = f", values of {self.value_head_dim}"
        beside = values if self.value_head_dim != self.head_dim else ""
        return f"{self.num_kv_heads} kv heads of {self.head_dim}{beside}"


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
    kind = model.get("model_type")
    return (
        isinstance(model.get("per_layer_config"), Mapping)
        or kind in GLOBAL_HEAD_DIM
        or kind in TWICE_IN_WINDOWS
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
    kind = str(model.get("model_type"))
    if has_window:
        fields = {"num_kv_heads": 2 * usual.num_kv_heads}
        fields = fields if kind in TWICE_IN_WINDOWS else {}
        named = {ours: model.get(name) for name, ours in OF_WINDOWED.items()}
        return fields | {name: n for name, n in named.items() if n is not None}
    if kind not in GLOBAL_HEAD_DIM:
        return {}
    dim = model.get("global_head_dim") or GLOBAL_HEAD_DIM[kind]
    fields = {"head_dim": dim}
    heads = model.get("num_global_key_value_heads")
    if heads is not None and model.get(GATES.get(kind, ""), kind not in GATES):
        fields["num_kv_heads"] = heads
    return fields
