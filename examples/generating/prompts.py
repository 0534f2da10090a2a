"""From texts to tokens: sources of prompts, and their checks."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

EXAMPLE = "The with statement is used to"

# Prompts are padded to a multiple: similar lengths share a compiled program.
LENGTH_STEP = 64


def read_texts(arguments: Sequence[str], file: str | None) -> list[str]:
    """Return the texts of the command line, then the nonblank lines of a file.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when a text is blank or not UTF-8, or the file has none.
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
    """Return the lines of a file or of standard input that are not blank."""
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} of {name_of(file)} is not UTF-8") from error
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]


def name_of(file: str) -> str:
    """Name a file in a message."""
    return "standard input" if file == "-" else file


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    vocabulary: int,
    context: int,
    has_special_tokens: bool,
) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        tokenizer: the checkpoint's.
        texts: the prompts.
        vocabulary: tokens that the model knows.
        context: most tokens that the model takes.
        has_special_tokens: the texts bring their own, as chats do.

    Raises:
        ValueError: when a text has no token, too many, or one the model has not.
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
    """Return the prompts as i32[B, P], -1 after each one's end."""
    longest = max(map(len, prompts))
    width = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, context)
    padded = np.full((len(prompts), width), -1, np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    return padded
