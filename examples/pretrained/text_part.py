"""The text part of a checkpoint of a model that also sees.

Gemma 3 from 4B on, Gemma 4, PaliGemma, Qwen3.5, and Mistral's since Small 3.1 are such
models.
Their config.json holds the language model's settings as ``text_config``, and their
tensors have longer names, in one of two forms. A text without pictures has the logits
of the language model alone, so the rest is left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# Model types with a text part, and the model type of that part where it names none.
TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# Settings of the text that stand beside its part; these count where they are given.
BESIDE = (
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)

# How names of the text's tensors begin, and how they do in a checkpoint of texts alone.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.decoder.": "model.",  # of DiffusionGemma
}

OTHER_PARTS = (
    "audio_tower.",
    "decoder.self_conditioning.",
    "embed_audio.",
    "embed_vision.",
    "encoder.",
    "multi_modal_projector.",
    "vision_tower.",
    "visual.",
)


def find_text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model; of a plain one all that there are.

    Raises:
        ValueError: when the checkpoint does something else than continue texts.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return raw
    part = raw.get("text_config")
    if not isinstance(part, Mapping):
        raise ValueError(
            f"config.json is that of a {kind!r} without a text_config, whose settings "
            "are needed"
        )
    names = raw.get("architectures") or ()
    for name in [names] if isinstance(names, str) else names:
        if not str(name).endswith(("ForConditionalGeneration", "ForCausalLM")):
            raise ValueError(
                f"config.json says the checkpoint is a {name}, which does not predict "
                "tokens; a ...ForConditionalGeneration checkpoint is needed"
            )
    beside = {key: raw[key] for key in BESIDE if raw.get(key) is not None}
    return {"model_type": TEXT_PARTS[kind]} | dict(part) | beside


def name_tensors(stored: Iterable[str]) -> dict[str, str]:
    """Return the stored names of tensors, by the names of a plain model.

    Tensors of the parts that see are left out. A plain model keeps all of its names; in
    one that was saved without its head they do not begin with "model.".
    """
    names = list(stored)
    if "embed_tokens.weight" in names:
        own = {name: name for name in names if name.startswith("lm_head.")}
        return own | {f"model.{name}": name for name in names if name not in own}
    if not any(name.startswith(tuple(PREFIXES)) for name in names):
        return {name: name for name in names}
    return {
        _shorten(name): name
        for name in names
        if not name.removeprefix("model.").startswith(OTHER_PARTS)
    }


def _shorten(name: str) -> str:
    for prefix, short in PREFIXES.items():
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name
