"""Readers of published drafters for speculative decoding.

    model, params = pretrained.load("target")
    config = model.cache_config(4096, max_sequences=8)
    drafter = load_drafter("drafter", model, params, config)
    cache = jkv.init(jkv.with_drafter(config, drafter))

`load_drafter` returns one of `jkv.drafters`. `assistant.py` reads Gemma 4's assistants,
`eagle3.py` EAGLE-3 heads (in the formats of speculators and SGLang), `multi_token.py`
the MTP layer in a target's own checkpoint, and `block.py` DFlash and DSpark drafters.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jkv

from ..config import read_config
from ..gguf_reading import find_folder
from ..model import Decoder
from ..settings import Settings, read_json
from .assistant import read_assistant
from .block import read_block
from .eagle3 import read_eagle3
from .multi_token import read_multi_token
from .sizes import Target

__all__ = ["load_drafter"]

BLOCKS = "dflash", "dspark", "muse_glimmer_assistant"


def load_drafter(
    folder: str | Path | None,
    model: Decoder,
    params: dict[str, Any],
    config: jkv.CacheConfig | jkv.GroupedConfig,
    *,
    target: str | Path | None = None,
    num_tokens: int | None = None,
) -> jkv.Drafter:
    """Read a drafter for a target.

    Args:
        folder: checkpoint of a drafter, or of a small model with the target's
            vocabulary; None for the MTP layer in the target's own checkpoint.
        model: the target model.
        params: its parameters; the drafter shares embeddings and output projection.
        config: configuration of the target's cache.
        target: the target's checkpoint, required for an MTP layer.
        num_tokens: draft tokens per step; None: the checkpoint's number, or a default.

    Raises:
        ValueError: for an unsupported checkpoint, or a drafter of another target.
    """
    given = Target(model, params, config)
    if folder is None:
        if target is None:
            raise ValueError("pass the folder of a drafter or of the target")
        return read_multi_token(Path(target), given, num_tokens)
    path = find_folder(folder)
    raw = read_json(path / "config.json")
    if reader := _find_reader(raw):
        return reader(path, raw, given, num_tokens)
    drafting = Decoder(read_config(path))
    given.check_vocab_size(drafting.config.vocab_size)
    from ..checkpoint import read_params

    own = drafting.cache_config(
        config.max_context_length,
        max_sequences=config.max_sequences,
        block_size=config.block_size,
        dtype=given.dtype,
    )
    return jkv.DraftModel(
        model=drafting,
        params=read_params(path, drafting.config),
        config=own,
        num_tokens=num_tokens or 4,
    )


def _find_reader(raw: Mapping[str, Any]) -> Callable[..., jkv.Drafter] | None:
    """Return the reader of a drafter's checkpoint; None for a model of its own.

    Raises:
        ValueError: for an unknown kind of drafter in speculators' format.
    """
    of_speculators = raw.get("speculators_model_type")
    kind = raw.get("model_type") if of_speculators is None else of_speculators
    names = " ".join(Settings(raw).names("architectures") or ())
    if kind == "gemma4_assistant":
        return read_assistant
    if kind == "eagle3" or "Eagle3" in names:
        return read_eagle3
    if "target_layer_ids" in raw or "dflash_config" in raw or kind in BLOCKS:
        return read_block
    if of_speculators is not None:
        raise ValueError(
            f"config.json: speculators_model_type {kind!r} is not supported; supported "
            "are eagle3, dflash and dspark"
        )
    return None
