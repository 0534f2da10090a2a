"""A row of the table of architectures."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The common properties of the checkpoints of a model type.

    defaults: its transformers class's values for keys that config.json leaves out.
    aliases: how its files call keys that others have by the name given first.
    choices: fields of `DecoderConfig` that are the same in all of its checkpoints.
    read: returns the fields that follow from keys of its own.
    tensors: names of tensors that differ from Llama's, by parameter. Two parameters
        with one name are parts of that tensor.
    prefix: how names of tensors begin, but for that of the head.
    fused_experts: of experts in one tensor, whether it is [experts, in, out] with
        matching "columns" alternating, or it is [experts, out, in] and one lies below
        the other in the "rows".
    ignored: how names of tensors begin that are not read: multi-token prediction
      layers.
    has_windows: whether layers may have the window that config.json speaks of.
    biases: of the projections: as config.json requests, those of queries, keys and
        values, or none.
    can_turn_partly: whether positions may turn a part of each head only.
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
