"""The tokenizer that a GGUF file's metadata describe, as a tokenizer.json.

Two families: pieces of bytes, whose merges are in the file, and SentencePiece's pieces
with bytes as the last resort, whose merges follow from the vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jkv.config.gguf_file import GGUFile

# Of `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED = 3, 4
# Files name one token that ends a text; a chat's turns end by one of these.
TURN_ENDS = "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"
SPACE = "\u2581"  # stands for a space in SentencePiece's pieces
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# How text is cut before pieces of bytes are merged, by `tokenizer.ggml.pre`. The
# patterns are those of the models' own tokenizer.json.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_ENDINGS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN = rf"{_ENDINGS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN),
}
# These cut off every digit, then as GPT-2 does.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
AS_GPT2 = (None, "default", "gpt-2", "phi-2", "mpt", "olmo", *DIGITS_APART)


def make_tokenizer(file: GGUFile) -> Tokenizer:
    """Return the tokenizer of a file.

    Raises:
        ValueError: for a family that is not served.
    """
    said = _said(file)
    family = said.get("model")
    if family == "gpt2" and said.get("pre") not in (*SPLITS, *AS_GPT2):
        raise ValueError(
            f"{file.paths[0]} cuts texts as {said['pre']!r} (tokenizer.ggml.pre), "
            "which is not served: take the model's safetensors and tokenizer.json"
        )
    if family == "gpt2":
        tokenizer = _make_of_bytes(said)
    elif family == "llama" and file.architecture.startswith("gemma"):
        tokenizer = _make_gemmas(said)
    elif family == "llama":
        tokenizer = _make_of_pieces(said)
    else:
        raise ValueError(
            f"{file.paths[0]} has a tokenizer of the family {family!r}; served are "
            "'gpt2' (pieces of bytes) and 'llama' (SentencePiece)"
        )
    _add_tokens(tokenizer, said)
    _add_beginning(tokenizer, said)
    return tokenizer


def make_settings(file: GGUFile) -> dict[str, Any]:
    """Return what tokenizer_config.json would say: special tokens, the template."""
    said = _said(file)
    named = {
        name: said["tokens"][said[key]]
        for name, key in SPECIAL_TOKENS.items()
        if said.get(key) is not None
    }
    template = file.metadata.get("tokenizer.chat_template")
    return named | ({} if template is None else {"chat_template": template})


def find_ends(file: GGUFile) -> list[int]:
    """Return the tokens that end a text, or a turn of a chat, by which models stop."""
    said = _said(file)
    named = (said.get("eos_token_id"), said.get("eot_token_id"))
    turns = (said["tokens"].index(end) for end in TURN_ENDS if end in said["tokens"])
    return sorted({number for number in (*named, *turns) if number is not None})


def _said(file: GGUFile) -> dict[str, Any]:
    """Return what a file says of its tokenizer."""
    prefix = "tokenizer.ggml."
    said = {
        name.removeprefix(prefix): value
        for name, value in file.metadata.items()
        if name.startswith(prefix)
    }
    needed = ("model", "tokens", "merges" if said.get("model") == "gpt2" else "scores")
    missing = [f"{prefix}{name}" for name in needed if name not in said]
    if missing:
        raise ValueError(f"{file.paths[0]} lacks the metadata {', '.join(missing)}")
    return said


def _make_of_bytes(said: Mapping[str, Any]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(said["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in said["merges"]]
    pre = said.get("pre")
    # Llama 3 takes a whole word that is a token, whatever its merges would give.
    model = models.BPE(vocabulary, merges, ignore_merges=SPLITS.get(pre) == _LLAMA3)
    tokenizer = Tokenizer(model)
    if pre in SPLITS:
        cut = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    else:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(True)] if pre in DIGITS_APART else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_of_pieces(said: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = said["tokens"], said["scores"]
    merges = said.get("merges")
    merges = (
        _find_merges(tokens, scores)
        if merges is None
        else [tuple(merge.split(" ", 1)) for merge in merges]
    )
    has_prefix = bool(said.get("add_space_prefix", True))
    tokenizer = Tokenizer(_make_pieces(said, tokens, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="first" if has_prefix else "never", split=False
    )
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence([*_decode_pieces(), *strip])
    return tokenizer


def _make_gemmas(said: Mapping[str, Any]) -> Tokenizer:
    """Gemma's pieces are merged in the order of the vocabulary, not of its scores.

    Pieces of spaces alone stand in the file as spaces.
    """
    tokens = [
        SPACE * len(token) if " " in token and not token.strip() else token
        for token in said["tokens"]
    ]
    merges = _find_merges(tokens, range(0, -len(tokens), -1))
    tokenizer = Tokenizer(_make_pieces(said, tokens, merges))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(_decode_pieces())
    return tokenizer


def _make_pieces(
    said: Mapping[str, Any], tokens: list[str], merges: list[tuple[str, str]]
) -> models.BPE:
    unknown = said.get("unknown_token_id")
    return models.BPE(
        {token: number for number, token in enumerate(tokens)},
        merges,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    )


def _decode_pieces() -> list[decoders.Decoder]:
    return [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _find_merges(tokens: list[str], scores: Any) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the best tokens first."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in halves if {*pair} <= vocabulary.keys()]
        found += [(score, len(left), (left, right)) for left, right in pairs]
    found.sort(key=lambda each: each[:2], reverse=True)
    return [pair for *_, pair in found]


def _add_tokens(tokenizer: Tokenizer, said: Mapping[str, Any]) -> None:
    """Add what is never cut: tokens of the model's own, and those users defined."""
    kinds = said.get("token_type") or [0] * len(said["tokens"])
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    is_of_bytes, known = said["model"] == "gpt2", tokenizer.get_vocab(False)
    control, defined = (
        [
            AddedToken(token, normalized=False)
            for token, each in zip(said["tokens"], kinds, strict=True)
            if each == kind and token in known
        ]
        for kind in (CONTROL, USER_DEFINED)
    )
    # What has other characters than bytes are written in is no token of the model's.
    control = [t for t in control if not (is_of_bytes and {*t.content} - alphabet)]
    # All at once: each call looks for all of them anew.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_beginning(tokenizer: Tokenizer, said: Mapping[str, Any]) -> None:
    """Begin every text with the token that the file asks for."""
    number = said.get("bos_token_id")
    is_asked = said.get("add_bos_token", said["model"] == "llama")
    if number is None or not is_asked:
        return
    token = said["tokens"][number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, number)],
    )
