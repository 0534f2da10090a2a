"""Sources, checks and tokenization of prompts."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

EXAMPLE = "The with statement is used to"

# Prompts are padded to a multiple, so that similar lengths share a compiled program.
LENGTH_STEP = 64


def read_texts(arguments: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts of the command line and the nonblank lines of a file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a prompt is blank or not UTF-8, or the file has no prompt.
    """
    for number, text in enumerate(arguments, 1):
        if not text.strip():
            raise ValueError(f"prompt {number} is empty")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"prompt {number} is not UTF-8")
    lines = read_lines(file) if file else []
    if file and not lines:
        raise ValueError(f"{name_of(file)} has no prompt: every line is blank")
    return [*arguments, *lines] or [EXAMPLE]


def read_lines(file: str) -> list[str]:
    """Return the nonblank lines of a file or of standard input."""
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} of {name_of(file)} is not UTF-8") from error
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]


def name_of(file: str) -> str:
    """Return a file's name for messages."""
    return "standard input" if file == "-" else file


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    vocabulary: int,
    context: int,
    has_special_tokens: bool,
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Args:
        tokenizer: the checkpoint's tokenizer.
        texts: the prompts.
        vocabulary: number of tokens of the model.
        context: maximum number of tokens.
        has_special_tokens: whether the prompts contain special tokens, as chats do.

    Raises:
        ValueError: if a prompt has no tokens, too many, or one outside the vocabulary.
    """
    encodings = tokenizer.encode_batch(texts, add_special_tokens=not has_special_tokens)
    prompts = [encoding.ids for encoding in encodings]
    for number, ids in enumerate(prompts, 1):
        if not ids:
            raise ValueError(f"prompt {number} has no token")
        if len(ids) > context:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, the context is {context}"
            )
        if max(ids) >= vocabulary:
            name = tokenizer.id_to_token(max(ids))
            raise ValueError(
                f"prompt {number} has token {max(ids)} ({name!r}), past the model's "
                f"vocabulary of {vocabulary}: tokenizer.json is another model's"
            )
    return prompts


def pad(prompts: Sequence[Sequence[int]], context: int) -> np.ndarray:
    """Return the prompts as i32[B, P], padded with -1."""
    longest = max(map(len, prompts))
    width = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, context)
    padded = np.full((len(prompts), width), -1, np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    return padded
