"""Argument parsers with one-line errors, raised before anything is loaded."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .exiting import BAD_VALUE

# Capacity relative to bfloat16, and the largest loss on two models, as in
# jkv/formats/table.py, which is not imported to keep --help fast.
FORMATS = "int8 (1.9 times the tokens, perplexity +0.4%% at most), fp8 (1.9, +0.8%%)"
VALUES = "int4 beside int8 (2.6 times the tokens, perplexity +1.0%%)"


class Parser(argparse.ArgumentParser):
    """Argument parser described by the first line of a script's docstring."""

    def __init__(self, doc: str | None, **options: Any):
        super().__init__(description=(doc or "").partition("\n")[0], **options)

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message and status 2."""
        # Turn "argument --steps: must be ..." into "--steps must be ...".
        message = re.sub(r"^argument (\S+): must", r"\1 must", message)
        self.exit(BAD_VALUE, f"{self.prog}: error: {message}\n")


def at_least(least: float, kind: type = int) -> Callable[[str], Any]:
    """Return a parser of numbers >= `least`; it rejects infinity and NaN."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value or math.isinf(value):
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    read.__name__ = kind.__name__  # for argparse: "invalid int value"
    return read


def add_stored_dtypes(parser: argparse.ArgumentParser) -> None:
    """Add the options for the dtypes of keys and values."""
    add = parser.add_argument
    add("--kv-dtype", help=f"dtype of the cache: {FORMATS}; the model's")
    add("--value-dtype", help=f"dtype of the values: {VALUES}; as --kv-dtype")


def text(given: str) -> str:
    """Parse a nonblank string that is valid UTF-8."""
    if not given.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    if any("\ud800" <= character <= "\udfff" for character in given):
        raise argparse.ArgumentTypeError("must be UTF-8")
    return given


def pattern(given: str) -> re.Pattern[str]:
    """Parse a regular expression."""
    try:
        return re.compile(given)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"must be a regular expression: {error}"
        ) from error


def new_file(*endings: str) -> Callable[[str], Path]:
    """Return a parser of file names in existing folders, with one of `endings`."""

    def read(given: str) -> Path:
        path = Path(given)
        if endings and path.suffix not in endings:
            names = " or ".join(endings)
            raise argparse.ArgumentTypeError(f"must end in {names}, got {given}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"must be in an existing folder, got {given}"
            )
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must be a file, {given} is a folder")
        return path

    return read
