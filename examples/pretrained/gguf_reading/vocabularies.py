"""Conversion of a GGUF file's vocabulary into tokenizer.json.

Two families are supported: byte-level BPE, with merges in the file, and SentencePiece
with byte fallback, whose merges are derived from the vocabulary. Missing keys have
llama.cpp's defaults (`src/llama-vocab.cpp` there).
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

# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# End tokens of a sequence or turn, whatever type the file gives them.
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
# Metadata keys of further end tokens, and the tokens to look for without the key.
END_KEYS = {
    **dict.fromkeys(("eos_token_id", "eot_token_id", "eom_token_id"), ()),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": (
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    "fim_sep_token_id": ("<|file_sep|>",),
}
# Tokens that are not end tokens if all of the others exist.
NO_ENDS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|return|>", "<|calls|>")),
    ("<|end|>", ("<|flush|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    ("</s>", ("<|tool_response>",)),
)
# Visible tokens between the parts of an answer, as in gpt-oss.
SHOWN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
SPACE = "\u2581"  # a space in SentencePiece
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Splits before byte-level BPE, by `tokenizer.ggml.pre`. The patterns are from the
# models' own tokenizer.json.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_ENDINGS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN = rf"{_ENDINGS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# Ignore merges for words in the vocabulary, and add a BOS token.
AS_LLAMA3 = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano"),
)
SPLITS = {
    **dict.fromkeys((*AS_LLAMA3, "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), _QWEN),
    **dict.fromkeys(("megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN),
}
# Split digits before GPT-2's pattern.
DIGITS_APART = (
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    *("minerva-7b", "mellum2"),
)
AS_GPT2 = (
    *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("gigachat", "a.x-4.0", "mellum", "exaone4", *DIGITS_APART),
)
# Applied in turn if the file names this pre-tokenizer or none.
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
        ValueError: if the tokenizer is not supported.
    """
    settings = _read_settings(file)
    family = settings.get("model")
    if family == "gpt2" and settings.get("pre") is None:
        logger.warning(
            "%s does not say how texts are cut (tokenizer.ggml.pre): they are cut by "
            "llama.cpp's default, which may not be the model's; convert it anew",
            file.paths[0],
        )
    if family == "gpt2" and settings.get("pre") not in (
        *SPLITS,
        *AS_GPT2,
        DEFAULT,
        None,
    ):
        raise ValueError(
            f"{file.paths[0]} has the pre-tokenizer {settings['pre']!r} "
            "(tokenizer.ggml.pre), which is not supported; use the model's "
            "safetensors and tokenizer.json"
        )
    is_gemma = file.architecture.startswith("gemma")
    makers = dict(
        gpt2=_make_of_bytes, llama=_make_gemmas if is_gemma else _make_of_pieces
    )
    if family not in makers:
        raise ValueError(
            f"{file.paths[0]} has a tokenizer of type {family!r} "
            "(tokenizer.ggml.model); supported are 'gpt2' (pieces of bytes) and "
            "'llama' (SentencePiece)"
        )
    make = makers[family]
    if make is not _make_gemmas:  # which ignores merges
        settings["merges"] = _split_merges(file, settings)
    tokenizer = make(settings)
    _add_tokens(tokenizer, settings)
    _add_beginning(tokenizer, settings)
    return tokenizer


def make_settings(file: GGUFile) -> dict[str, Any]:
    """Return tokenizer_config.json's contents: special tokens and chat template."""
    settings = _read_settings(file)
    named = {
        name: settings["tokens"][settings[key]]
        for name, key in SPECIAL_TOKENS.items()
        if settings.get(key) is not None
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
    """Return the ids of the tokens that end a sequence or a turn."""
    return sorted(_find_ends(_read_settings(file)))


def _find_ends(settings: Mapping[str, Any]) -> set[int]:
    tokens = settings["tokens"]
    numbers = {token: number for number, token in enumerate(tokens)}
    found = {numbers[text] for text in ENDS if text in numbers}
    for key, texts in END_KEYS.items():
        if settings.get(key) is not None:
            found.add(settings[key])
        else:
            found |= {numbers[text] for text in texts if text in numbers}
    for text, others in NO_ENDS:
        if {text, *others} <= numbers.keys():
            found.discard(numbers[text])
    return found


def _find_kinds(settings: Mapping[str, Any]) -> list[int]:
    """Return the corrected types of all tokens, as files may have wrong ones."""
    tokens = settings["tokens"]
    kinds = list(settings.get("token_type") or [NORMAL] * len(tokens))
    numbers = {token: number for number, token in enumerate(tokens)}
    for number in _find_ends(settings):
        kinds[number] = CONTROL
    shown = [text for text in SHOWN if text in numbers]
    if any({text, *others} <= numbers.keys() for text, others in NO_ENDS[:4]):
        shown.append("<|end|>")
    for text in shown:
        kinds[numbers[text]] = USER_DEFINED
    if {"</s>", "<|tool_response>"} <= numbers.keys():
        kinds[numbers["</s>"]] = NORMAL
    return kinds


def _read_settings(file: GGUFile) -> dict[str, Any]:
    """Return the tokenizer's metadata with the defaults of its family."""
    prefix = "tokenizer.ggml."
    settings = {
        name.removeprefix(prefix): value
        for name, value in file.metadata.items()
        if name.startswith(prefix)
    }
    needed = (
        "model",
        "tokens",
        "merges" if settings.get("model") == "gpt2" else "scores",
    )
    missing = [f"{prefix}{name}" for name in needed if name not in settings]
    if missing:
        raise ValueError(f"{file.paths[0]} lacks the metadata {', '.join(missing)}")
    settings["tokens"] = [
        token or f"[EMPTY_{number}]" for number, token in enumerate(settings["tokens"])
    ]
    _check_different(file, settings["tokens"])
    is_of_pieces = settings["model"] == "llama"
    usual: dict[str, Any] = {
        "add_bos_token": is_of_pieces or settings.get("pre") in AS_LLAMA3,
        "add_eos_token": False,
        "name": str(file.metadata.get("general.name", "")).lower(),
    }
    if is_of_pieces:
        usual |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return usual | settings


def _check_different(file: GGUFile, tokens: list[str]) -> None:
    """Raise a ValueError if two tokens are equal."""
    numbers: dict[str, int] = {}
    for number, token in enumerate(tokens):
        first = numbers.setdefault(token, number)
        if first != number:
            raise ValueError(
                f"{file.paths[0]}: tokenizer.ggml.tokens has {token!r} as {first} and "
                f"as {number}; convert the model anew"
            )


def _split_merges(
    file: GGUFile, settings: Mapping[str, Any]
) -> list[tuple[str, str]] | None:
    """Return pairs of tokens whose join is a token, or None if the file has none."""
    if settings.get("merges") is None:
        return None
    known, pairs = {*settings["tokens"]}, []
    for merge in settings["merges"]:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise ValueError(
                f"{file.paths[0]}: tokenizer.ggml.merges must be two of "
                "tokenizer.ggml.tokens, with a space between them, that together are "
                f"a third one, got {merge!r}"
            )
        pairs.append((left, right))
    return pairs


def _make_of_bytes(settings: Mapping[str, Any]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(settings["tokens"])}
    merges, pre = settings["merges"], settings.get("pre")
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


def _make_of_pieces(settings: Mapping[str, Any]) -> Tokenizer:
    tokens, merges = settings["tokens"], settings["merges"]
    if merges is None:
        merges = _find_merges(tokens, settings["scores"])
    has_prefix = bool(settings.get("add_space_prefix", True))
    tokenizer = Tokenizer(_make_pieces(settings, tokens, merges))
    # Each segment between special tokens gets its own prefix, even before a space.
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence([*_decode_pieces(), *strip])
    return tokenizer


def _make_gemmas(settings: Mapping[str, Any]) -> Tokenizer:
    """Return Gemma's tokenizer, whose merges follow vocabulary order instead of scores.

    The file stores pieces of spaces as plain spaces.
    """
    tokens = [
        SPACE * len(token) if " " in token and not token.strip() else token
        for token in settings["tokens"]
    ]
    merges = _find_merges(tokens, range(0, -len(tokens), -1))
    tokenizer = Tokenizer(_make_pieces(settings, tokens, merges))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(_decode_pieces())
    return tokenizer


def _make_pieces(
    settings: Mapping[str, Any], tokens: list[str], merges: list[tuple[str, str]]
) -> models.BPE:
    unknown = settings.get("unknown_token_id")
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
    """Return all pairs of tokens that form a token, by descending score."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in halves if {*pair} <= vocabulary.keys()]
        found += [(score, len(left), (left, right)) for left, right in pairs]
    found.sort(key=lambda each: each[:2], reverse=True)
    return [pair for *_, pair in found]


def _add_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens that are never split: special and user-defined ones."""
    kinds, known = _find_kinds(settings), tokenizer.get_vocab(False)
    # In Phi 3, most of them strip the white space that follows.
    is_phi3 = any(name in settings["name"] for name in ("phi-3", "phi3"))
    keep_behind = ("<unk>", "<s>", "<|endoftext|>") if is_phi3 else settings["tokens"]
    control, defined = (
        [
            AddedToken(token, normalized=False, rstrip=token not in keep_behind)
            for token, each in zip(settings["tokens"], kinds, strict=True)
            if each in taken and token in known
        ]
        for taken in ((CONTROL, UNKNOWN), (USER_DEFINED,))
    )
    # One call for all tokens, since each call rebuilds the matcher.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_beginning(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add BOS and EOS tokens to encoded text if the file requests them."""
    added = {
        end: (
            settings["tokens"][settings[f"{end}_token_id"]],
            settings[f"{end}_token_id"],
        )
        for end in ("bos", "eos")
        if settings[f"add_{end}_token"] and settings.get(f"{end}_token_id") is not None
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
