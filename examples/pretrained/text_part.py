"""Text part of multimodal checkpoints.

Gemma 3 from 4B on, Gemma 4, PaliGemma, Qwen3.5, Muse Glimmer, and Mistral's since Small
3.1 are such models.
Their config.json holds the language model's settings as ``text_config``, and their
tensor names have prefixes of two forms. Without images the logits are those of the
language model, so the other parts are not loaded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .settings import Settings

# Multimodal model types, and the default model type of their text part.
TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "paligemma": "gemma",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# Settings beside the text part, which override its own.
BESIDE = (
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)

# Prefixes of the text part's tensors, and their replacements.
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
    "vision_adapter.",
    "vision_projection.",
    "vision_tower.",
    "visual.",
)


def find_text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's settings; for a text-only model, all settings.

    Raises:
        ValueError: if the checkpoint is not a causal language model.
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
    for name in Settings(raw).names("architectures") or ():
        if not name.endswith(("ForConditionalGeneration", "ForCausalLM")):
            raise ValueError(
                f"config.json: architectures names a {name}, which does not predict "
                "tokens; a ...ForConditionalGeneration checkpoint is needed"
            )
    beside = {key: raw[key] for key in BESIDE if raw.get(key) is not None}
    return {"model_type": TEXT_PARTS[kind]} | dict(part) | beside


def name_tensors(stored: Iterable[str]) -> dict[str, str]:
    """Return the stored names of tensors, by their names in a text-only model.

    Tensors of other modalities are omitted. Names of a text-only model are unchanged,
    except in a checkpoint without a head, where "model." is prepended.
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
