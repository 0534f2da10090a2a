"""Validation of the types of a GGUF file's metadata.

A file declares the type of each value itself. A number in place of an array, or zero
heads, would cause an error far from the file.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """The required type of a value, in words and as a predicate."""

    words: str
    allows: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _list_of(words: str, allows: Callable[[Any], bool]) -> Kind:
    return Kind(
        f"a list of {words}",
        lambda value: isinstance(value, list) and all(map(allows, value)),
    )


SIZE = Kind("an int of 1 or more", lambda value: _is_int(value) and value >= 1)
COUNT = Kind("an int of 0 or more", lambda value: _is_int(value) and value >= 0)
NUMBER = Kind("a number", _is_number)
FROM_ZERO = Kind(
    "a number of 0 or more", lambda value: _is_number(value) and value >= 0
)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = _list_of("texts", TEXT.allows)
HEADS = Kind(
    "an int of 1 or more, or a list of such for each layer",
    lambda value: (
        SIZE.allows(value)
        or (isinstance(value, list) and bool(value) and all(map(COUNT.allows, value)))
    ),
)
WINDOW = Kind(
    "an int of 0 or more, or a list of such for each layer",
    lambda value: (
        COUNT.allows(value)
        or (isinstance(value, list) and all(map(COUNT.allows, value)))
    ),
)
PATTERN = Kind(
    "an int of 1 or more, or a list with true or false for each layer",
    lambda value: (
        SIZE.allows(value)
        or (isinstance(value, list) and bool(value) and all(map(FLAG.allows, value)))
    ),
)
SHARED = {
    "general.architecture": TEXT,
    "tokenizer.chat_template": TEXT,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.merges": TEXTS,
    "tokenizer.ggml.scores": _list_of("numbers", _is_number),
    "tokenizer.ggml.token_type": _list_of("ints", _is_int),
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_eos_token": FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
}
TOKEN_IDS = (
    *("bos", "eos", "eot", "eom", "unknown", "padding"),
    *("fim_pad", "fim_rep", "fim_sep"),
)
OF_ARCHITECTURES = {
    "block_count": SIZE,
    "context_length": SIZE,
    "embedding_length": SIZE,
    "feed_forward_length": SIZE,
    "vocab_size": SIZE,
    "nextn_predict_layers": COUNT,
    "leading_dense_block_count": COUNT,
    "interleave_moe_layer_step": COUNT,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": SIZE,
    "attention.value_length": SIZE,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": PATTERN,
    "attention.layer_norm_rms_epsilon": POSITIVE,
    "attention.scale": NUMBER,
    "attn_logit_softcapping": NUMBER,
    "final_logit_softcapping": NUMBER,
    "rope.dimension_count": SIZE,
    "rope.freq_base": POSITIVE,
    "rope.freq_base_swa": POSITIVE,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": FROM_ZERO,
    "rope.scaling.attn_factor": NUMBER,
    "rope.scaling.yarn_attn_factor": NUMBER,
    "rope.scaling.yarn_beta_fast": NUMBER,
    "rope.scaling.yarn_beta_slow": NUMBER,
    "rope.scale_linear": FROM_ZERO,
    "rope.scaling.original_context_length": COUNT,
    "expert_count": COUNT,
    "expert_used_count": COUNT,
    "expert_group_count": COUNT,
    "expert_group_used_count": COUNT,
    "expert_shared_count": COUNT,
    "expert_feed_forward_length": COUNT,
    "expert_shared_feed_forward_length": COUNT,
    "expert_weights_norm": FLAG,
    "expert_weights_scale": NUMBER,
    "embedding_scale": NUMBER,
    "residual_scale": NUMBER,
    "logit_scale": NUMBER,
}


def check_metadata(path: Any, metadata: Mapping[str, Any]) -> None:
    """Check the types and ranges of the metadata that jkv reads.

    Raises:
      ValueError: naming the file, the key and its required type.
    """
    architecture = metadata.get("general.architecture")
    kinds = SHARED | {
        f"{architecture}.{key}": kind for key, kind in OF_ARCHITECTURES.items()
    }
    for key, kind in kinds.items():
        if key in metadata:
            _check(path, key, metadata[key], kind)
    tokens = metadata.get("tokenizer.ggml.tokens")
    for name in TOKEN_IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            _check(path, key, metadata[key], COUNT)
            if tokens is not None and metadata[key] >= len(tokens):
                raise ValueError(
                    f"{path}: {key} must be below {len(tokens)}, the number of tokens, "
                    f"got {metadata[key]}"
                )
    for name in ("scores", "token_type"):
        key = f"tokenizer.ggml.{name}"
        if tokens is not None and len(metadata.get(key, tokens)) != len(tokens):
            raise ValueError(
                f"{path}: {key} must have {len(tokens)} entries, one for each token, "
                f"got {len(metadata[key])}"
            )


def _check(path: Any, key: str, value: Any, kind: Kind) -> None:
    if not kind.allows(value):
        raise ValueError(f"{path}: {key} must be {kind.words}, got {value!r:.60}")
