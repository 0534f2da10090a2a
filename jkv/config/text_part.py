"""The part of a config.json that describes the language model.

Models that also see or hear keep it apart. What is written there is only what differs
from the class that reads it: a part that says "llama" and nothing else means the sizes
that transformers gives a Llama.
"""

from typing import Any, NamedTuple

from jkv.config.families import SIZES, find_family

# Where the language model's settings lie, as the models' authors name it.
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


class TextPart(NamedTuple):
    """The settings of a language model, and those of what it is a part of."""

    model: dict[str, Any]
    around: list[dict[str, Any]]  # the parts that hold it, innermost first
    notes: list[str]


def find_text_part(raw: dict[str, Any]) -> TextPart:
    """Return the language model's settings; of a plain model, all there are."""
    model, name = raw, ""
    around: list[dict[str, Any]] = []
    while inner := next((p for p in PARTS if isinstance(model.get(p), dict)), None):
        around.insert(0, model)
        model, name = model[inner], inner
    if not around:
        return TextPart(model, around, [])
    defaults = find_family(model).sizes
    # Heads that are not named are as many as the queries', if those are.
    has_heads = "num_attention_heads" in model
    filled = {
        size: value
        for size, value in zip(SIZES, defaults, strict=False)
        if size not in model and not (has_heads and size == "num_key_value_heads")
    }
    notes = [f"the cache is that of the language model, {name} in config.json"]
    if filled:
        said = ", ".join(f"{size} {value}" for size, value in filled.items())
        notes.append(f"{name} leaves out {said}: taken from transformers")
    return TextPart(filled | model, around, notes)
