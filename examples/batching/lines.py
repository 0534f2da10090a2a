"""Crash-safe file of results as JSON Lines.

A result counts once its newline is on disk. An incomplete last line, left by a killed
process, is removed at the next start; after a failed write it is removed at once. No
complete result is ever removed.
"""

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any

from served.asking.fields import check_texts

# Levels of Python's nesting limit to keep free, since results nest requests.
MARGIN = 50


def digest(text: str) -> str:
    """Return a hash of a line."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ResultLines:
    """File of results, each with the number and digest of its line.

    Attributes:
        done: numbers of the lines with results.
        failed: numbers of the lines with an error as result.
    """

    def __init__(self, path: Path, prompts: list[str]):
        """Open a new file, or one of an earlier run with the same lines.

        Raises:
            OSError: if the file cannot be read or written.
            ValueError: if the file has other contents, or results of other lines.
        """
        self._prompts = prompts
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._size = self._read(path)
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, number: int, result: dict[str, Any]) -> None:
        """Append the result of a line.

        Raises:
            OSError: if the disk is full or fails; the file is unchanged.
        """
        named = {"line": number, "digest": digest(self._prompts[number]), **result}
        text = f"{json.dumps(named, ensure_ascii=False)}\n"
        # Lone surrogates, which an id may contain, are written as JSON escapes.
        line = text.encode(errors="backslashreplace")
        written = 0
        try:
            while written < len(line):
                offset = self._size + written
                written += os.pwrite(self._file, line[written:], offset)
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self._count(number, result)

    def __enter__(self) -> "ResultLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def _count(self, number: int, result: dict[str, Any]) -> None:
        self.done.add(number)
        if result.get("error") is not None:
            self.failed.add(number)

    def _read(self, path: Path) -> int:
        """Read the results; return the length of the complete lines in bytes."""
        *whole, rest = path.read_bytes().split(b"\n")
        for line in whole:
            try:
                result = json.loads(line)
                number, hashed = result["line"], result["digest"]
                is_ours = hashed == digest(self._prompts[number])
            except (ValueError, LookupError, TypeError, RecursionError):
                is_ours = False
            if not is_ours:
                raise ValueError(
                    f"{path} has results of other prompts; pass another file"
                )
            self._count(number, result)
        if rest and not self._is_beginning(rest):
            raise ValueError(f"{path} ends with an invalid result; pass another file")
        return sum(len(line) + 1 for line in whole)

    def _is_beginning(self, rest: bytes) -> bool:
        """True if an incomplete line is the beginning of a result."""
        pattern = rb'\{"line": (\d{1,18}), "digest": "(\w*)(.*)'
        found = re.fullmatch(pattern, rest, re.DOTALL)
        if found is None:  # cut before the digest
            return b'{"line": 0, "digest": "'.startswith(re.sub(rb"\d+", b"0", rest))
        number, hashed, after = int(found[1]), found[2].decode(), found[3]
        is_whole = number < len(self._prompts) and hashed == digest(
            self._prompts[number]
        )
        return is_whole or not after


def read_line(line: str) -> dict[str, Any]:
    """Parse a line that must be a JSON object.

    Raises:
        ValueError: if it is not an object, nested too deeply, or not valid Unicode.
    """
    body = parse(line)
    if not isinstance(body, dict):
        raise ValueError("the line must be an object")
    check_texts({name: value for name, value in body.items() if name != "id"})
    return body


def name_of(line: str) -> dict[str, Any]:
    """Return a line's id as a field of its result; empty if it has none."""
    try:
        body = parse(line)
    except ValueError:
        return {}
    return {"id": body["id"]} if isinstance(body, dict) and "id" in body else {}


def parse(line: str) -> Any:
    """Parse a line as JSON that a result can contain.

    Raises:
        ValueError: if it is not JSON, or nested too deeply.
    """
    try:
        body = json.loads(line)
        json.dumps(functools.reduce(lambda inner, _: [inner], range(MARGIN), body))
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    return body
