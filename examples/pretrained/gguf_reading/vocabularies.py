"""The tokenizer that a GGUF file's metadata describe, as a tokenizer.json.

Two families: pieces of bytes, with merges in the file, and SentencePiece's pieces with
bytes as the last resort, with merges that follow from the vocabulary. Keys missing from
a file have llama.cpp's defaults (`src/llama-vocab.cpp` there).
"""

import logging
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

from jkv.config import GGUFile

logger = logging.getLogger("pretrained")

# Of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Texts of tokens that end a text or a turn, regardless of their type in the file.
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_utterance>"),
    *(
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "[e~[",
)
# Keys of ends, and possible texts of these in a file without the key.
END_KEYS = {
    **dict.fromkeys(("eos_token_id", "eot_token_id", "eom_token_id"), ()),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": (
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    "fim_sep_token_id": ("<|file_sep|>",),
}
# Texts that end nothing where all of the others are there.
NO_ENDS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|return|>", "<|calls|>")),
    ("<|end|>", ("<|flush|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    ("</s>", ("<|tool_response>",)),
)
# Visible tokens between the parts of an answer, as gpt-oss writes them.
SHOWN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
SPACE = "\u2581"  # stands for a space in SentencePiece's pieces
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# How text is cut before pieces of bytes are merged, by `tokenizer.ggml.pre`. The
# patterns come from the models' own tokenizer.json.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_ENDINGS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN = rf"{_ENDINGS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# These take a whole word that is a token, regardless of its merges, and begin with the
# token that begins texts.
AS_LLAMA3 = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano"),
)
SPLITS = {
    **dict.fromkeys((*AS_LLAMA3, "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), _QWEN),
    **dict.fromkeys(("megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN),
}
# These cut off every digit, then as GPT-2 does.
DIGITS_APART = (
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    *("minerva-7b", "mellum2"),
)
AS_GPT2 = (
    *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("gigachat", "a.x-4.0", "mellum", "exaone4", *DIGITS_APART),
)
# One after the other, where a file does not say how, or says it by this name.
DEFAULT = "default"
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def make_tokenizer(file: GGUFile) -> Tokenizer:
    """Return the tokenizer of a file.

    Raises:
        ValueError: for a family that is not served.
    """
    said = _said(file)
    family = said.get("model")
    if family == "gpt2" and said.get("pre") is None:
        logger.warning(
            "%s does not say how texts are cut (tokenizer.ggml.pre): they are cut by "
            "llama.cpp's default, which may not be the model's; convert it anew",
            file.paths[0],
        )
    if family == "gpt2" and said.get("pre") not in (*SPLITS, *AS_GPT2, DEFAULT, None):
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
    """Return tokenizer_config.json's contents: special tokens, the template."""
    said = _said(file)
    named = {
        name: said["tokens"][said[key]]
        for name, key in SPECIAL_TOKENS.items()
        if said.get(key) is not None
    }
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(key).removeprefix(".") or "default": template
        for name, template in file.metadata.items()
        if name == key or name.startswith(f"{key}.")
    }
    if templates:
        named["chat_template"] = [
            {"name": name, "template": each} for name, each in templates.items()
        ]
    return named


def find_ends(file: GGUFile) -> list[int]:
    """Return the tokens that end a text, or a turn of a chat, by which models stop."""
    return sorted(_find_ends(_said(file)))


def _find_ends(said: Mapping[str, Any]) -> set[int]:
    tokens = said["tokens"]
    numbers = {token: number for number, token in enumerate(tokens)}
    found = {numbers[text] for text in ENDS if text in numbers}
    for key, texts in END_KEYS.items():
        if said.get(key) is not None:
            found.add(said[key])
        else:
            found |= {numbers[text] for text in texts if text in numbers}
    for text, others in NO_ENDS:
        if {text, *others} <= numbers.keys():
            found.discard(numbers[text])
    return found


def _find_kinds(said: Mapping[str, Any]) -> list[int]:
    """Return the actual types of all tokens, which a file may have wrong."""
    tokens = said["tokens"]
    kinds = list(said.get("token_type") or [NORMAL] * len(tokens))
    numbers = {token: number for number, token in enumerate(tokens)}
    for number in _find_ends(said):
        kinds[number] = CONTROL
    shown = [text for text in SHOWN if text in numbers]
    if any({text, *others} <= numbers.keys() for text, others in NO_ENDS[:4]):
        shown.append("<|end|>")
    for text in shown:
        kinds[numbers[text]] = USER_DEFINED
    if {"</s>", "<|tool_response>"} <= numbers.keys():
        kinds[numbers["</s>"]] = NORMAL
    return kinds


def _said(file: GGUFile) -> dict[str, Any]:
    """Return a file's tokenizer metadata, with the defaults of its family."""
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
    said["tokens"] = [
        token or f"[EMPTY_{number}]" for number, token in enumerate(said["tokens"])
    ]
    _check_different(file, said["tokens"])
    is_of_pieces = said["model"] == "llama"
    usual: dict[str, Any] = {
        "add_bos_token": is_of_pieces or said.get("pre") in AS_LLAMA3,
        "add_eos_token": False,
        "name": str(file.metadata.get("general.name", "")).lower(),
    }
    if is_of_pieces:
        usual |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return usual | said


def _check_different(file: GGUFile, tokens: list[str]) -> None:
    """Reject a vocabulary with two equal tokens: they would be ambiguous."""
    numbers: dict[str, int] = {}
    for number, token in enumerate(tokens):
        first = numbers.setdefault(token, number)
        if first != number:
            raise ValueError(
                f"{file.paths[0]}: tokenizer.ggml.tokens has {token!r} as {first} and "
                f"as {number}; convert the model anew"
            )


def _make_of_bytes(said: Mapping[str, Any]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(said["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in said["merges"]]
    pre = said.get("pre")
    model = models.BPE(vocabulary, merges, ignore_merges=pre in AS_LLAMA3)
    tokenizer = Tokenizer(model)
    splits = _DEFAULT_SPLITS if pre in (DEFAULT, None) else (SPLITS.get(pre),)
    if splits != (None,):
        cuts = [
            pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splits
        ]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
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
    """Return all pairs of tokens that make a token, the best tokens first."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in halves if {*pair} <= vocabulary.keys()]
        found += [(score, len(left), (left, right)) for left, right in pairs]
    found.sort(key=lambda each: each[:2], reverse=True)
    return [pair for *_, pair in found]


def _add_tokens(tokenizer: Tokenizer, said: Mapping[str, Any]) -> None:
    """Add the tokens that are never cut: the model's own, and user-defined ones."""
    kinds, known = _find_kinds(said), tokenizer.get_vocab(False)
    # Phi 3 takes the white space behind most of them.
    is_phi3 = any(name in said["name"] for name in ("phi-3", "phi3"))
    keep_behind = ("<unk>", "<s>", "<|endoftext|>") if is_phi3 else said["tokens"]
    control, defined = (
        [
            AddedToken(token, normalized=False, rstrip=token not in keep_behind)
            for token, each in zip(said["tokens"], kinds, strict=True)
            if each in taken and token in known
        ]
        for taken in ((CONTROL, UNKNOWN), (USER_DEFINED,))
    )
    # All at once: each call looks for all of them anew.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_beginning(tokenizer: Tokenizer, said: Mapping[str, Any]) -> None:
    """Begin and end every text with the tokens that the file asks for."""
    added = {
        end: (said["tokens"][said[f"{end}_token_id"]], said[f"{end}_token_id"])
        for end in ("bos", "eos")
        if said[f"add_{end}_token"] and said.get(f"{end}_token_id") is not None
    }
    if not added:
        return

    def write(name: str, number: int) -> str:
        before, behind = (
            [f"{added[end][0]}:{number}"] if end in added else []
            for end in ("bos", "eos")
        )
        return " ".join([*before, f"${name}:{number}", *behind])

    tokenizer.post_processor = processors.TemplateProcessing(
        single=write("A", 0),
        pair=f"{write('A', 0)} {write('B', 1)}",
        special_tokens=[*dict.fromkeys(added.values())],
    )
