"""Results as lines of JSON that survive an interrupt: none is lost, none comes twice.

A line counts once its newline is on the disk. What a killed process left half-written
is cut off when the next one begins; what a full disk did not take is cut off at once.
"""

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


def digest(text: str) -> str:
    """Return a name for what a line asks for."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ResultLines:
    """A file of results, each with the number and the digest of the line it answers.

    Attributes:
        done: the numbers of the lines that have their results.
    """

    def __init__(self, path: Path, asked: list[str]):
        """Open a file, new or left by an earlier run over the same lines.

        Raises:
            OSError: when it cannot be read or written.
            ValueError: when it has the results of other lines.
        """
        self._asked = asked
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self.done, self._size = self._read(path)
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
        line = f"{json.dumps(named, ensure_ascii=False)}\n".encode()
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
        self.done.add(number)

    def __enter__(self) -> "ResultLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def _read(self, path: Path) -> tuple[set[int], int]:
        """Return the numbers of what is done, and where the last whole line ends."""
        done: set[int] = set()
        size = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                result = json.loads(line)
                number, asked = result["line"], result["asked"]
                is_ours = asked == digest(self._asked[number])
            except (ValueError, LookupError, TypeError):
                is_ours = False
            if not is_ours:
                raise ValueError(
                    f"{path} has results of other prompts; give another file"
                )
            done.add(number)
            size += len(line)
        return done, size
