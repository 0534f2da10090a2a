"""Results as lines of JSON that survive an interrupt: none is lost, none comes twice.

A line counts once its newline is on the disk. The half-written line of a killed process
is cut off when the next one begins; that of a full disk at once. Only the beginning of
a result is ever cut off.
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

# Levels kept free of Python's nesting limit: a result nests them deeper.
MARGIN = 50


def digest(text: str) -> str:
    """Return a hash of a line's request."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ResultLines:
    """A file of results, each with the number and the digest of the line it answers.

    Attributes:
        done: the numbers of the lines that have their results.
        failed: the number of them with an error as result.
    """

    def __init__(self, path: Path, asked: list[str]):
        """Open a file, new or left by an earlier run over the same lines.

        Raises:
            OSError: when it cannot be read or written.
            ValueError: when it has something else, or the results of other lines.
        """
        self._asked = asked
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
        """Add the result of a line.

        Raises:
            OSError: when the disk does not take it; the file is as it was before.
        """
        named = {"line": number, "asked": digest(self._asked[number]), **result}
        text = f"{json.dumps(named, ensure_ascii=False)}\n"
        # Half a surrogate pair, as an id may have, is written as JSON escapes it.
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
        """Count the finished lines; return where the last whole line ends."""
        *whole, rest = path.read_bytes().split(b"\n")
        for line in whole:
            try:
                result = json.loads(line)
                number, asked = result["line"], result["asked"]
                is_ours = asked == digest(self._asked[number])
            except (ValueError, LookupError, TypeError, RecursionError):
                is_ours = False
            if not is_ours:
                raise ValueError(
                    f"{path} has results of other prompts; give another file"
                )
            self._count(number, result)
        if rest and not self._is_beginning(rest):
            raise ValueError(f"{path} ends with what is no result; give another file")
        return sum(len(line) + 1 for line in whole)

    def _is_beginning(self, rest: bytes) -> bool:
        """True if a line without an end is how a result begins."""
        pattern = rb'\{"line": (\d{1,18}), "asked": "(\w*)(.*)'
        found = re.fullmatch(pattern, rest, re.DOTALL)
        if found is None:  # then it ends before the digest
            return b'{"line": 0, "asked": "'.startswith(re.sub(rb"\d+", b"0", rest))
        number, asked, after = int(found[1]), found[2].decode(), found[3]
        is_whole = number < len(self._asked) and asked == digest(self._asked[number])
        return is_whole or not after


def read_line(line: str) -> dict[str, Any]:
    """Return the object that a line is.

    Raises:
        ValueError: when it is none, is nested too deeply, or its text is not Unicode.
    """
    body = parse(line)
    if not isinstance(body, dict):
        raise ValueError("the line must be an object")
    check_texts({name: value for name, value in body.items() if name != "id"})
    return body


def name_of(line: str) -> dict[str, Any]:
    """Return the id of a line, if it has one, as a part of its result."""
    try:
        body = parse(line)
    except ValueError:
        return {}
    return {"id": body["id"]} if isinstance(body, dict) and "id" in body else {}


def parse(line: str) -> Any:
    """Return the JSON of a line, if a result could hold it, too.

    Raises:
        ValueError: when it is not JSON, or nested too deeply.
    """
    try:
        body = json.loads(line)
        json.dumps(functools.reduce(lambda inner, _: [inner], range(MARGIN), body))
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    return body
