"""Definition of a row in the table of architectures."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties of a model type, shared by all of its checkpoints.

    defaults: defaults of its transformers class for keys missing from config.json.
    aliases: its own names of config.json keys, by the common name.
    choices: fields of `DecoderConfig` with one value in all of its checkpoints.
    read: returns the fields that depend on keys of its own.
    tensors: tensor names that differ from Llama's, by parameter. Parameters with the
        same name are parts of one tensor.
    prefix: prefix of tensor names, except the head's.
    fused_experts: layout of expert matrices in one tensor: "columns" is
        [experts, in, out] with alternating columns of each, "rows" is
        [experts, out, in] with the rows of one after the other.
    ignored: name prefixes of tensors that are not read, such as multi-token prediction
        layers.
    has_windows: True if layers may have the sliding window of config.json.
    biases: biases of the projections: as "configured" by config.json, of queries, keys
        and values ("qkv"), or "none".
    can_turn_partly: True if RoPE may rotate a part of each head only.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Settings], dict[str, Any]] = lambda _: {}
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    fused_experts: Literal["columns", "rows"] = "columns"
    ignored: tuple[str, ...] = ()
    has_windows: bool = False
    biases: Literal["configured", "qkv", "none"] = "configured"
    can_turn_partly: bool = False
