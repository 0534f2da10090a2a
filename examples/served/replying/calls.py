"""Parser of tool calls in streamed text, as in `jkv.grammar.from_tools`.

A call is `{"name": ..., "arguments": {...}}` between two tags. The result does not
depend on how the text is split into pieces.
"""

import json
import re
import uuid
from typing import NamedTuple

# A call up to its arguments, whose first character is not consumed.
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_HEAD = re.compile(_NAME.pattern + r'\s*,\s*"arguments"\s*:\s*(?=\S)')


class CallPart(NamedTuple):
    """A new part of a call."""

    index: int  # of the call in its completion
    arguments: str  # new characters
    name: str | None = None  # in the first part of a call
    id: str | None = None  # likewise


class Reported(NamedTuple):
    """The parsed parts of a piece of text."""

    content: str
    calls: list[CallPart]


class CallReader:
    """Incremental parser of one completion; each state is a method."""

    def __init__(self, begin: str, end: str, *, has_answer: bool = False) -> None:
        """Start in free text.

        Args:
            begin: the tag before a call; white space before it is dropped.
            end: the tag after a call; white space after it is dropped.
            has_answer: whether a completion that does not start with a call follows a
                schema; it has no calls, but may contain the tag.
        """
        self._begin = begin
        self._tail = re.compile(rf"\s*\}}\n?{re.escape(end)}")
        self._left = ""  # not parsed yet
        self._read = self._read_first if has_answer else self._read_free
        self._is_behind_call = False
        self._content = ""
        self._parts: list[CallPart] = []
        self._num_begun = self._num_done = 0

    @property
    def has_called(self) -> bool:
        """True if there are calls and all of them are complete."""
        return 0 < self._num_begun == self._num_done

    def advance(self, text: str, *, is_last: bool) -> Reported:
        """Parse a piece of text; the last piece leaves no text unparsed."""
        self._left += text
        while self._read():
            pass
        if is_last and self._read in (self._read_free, self._read_first):
            self._report(self._left.lstrip() if self._is_behind_call else self._left)
            self._left = ""
        if is_last and self._read == self._read_head:
            self._report_cut_head()
        reported = Reported(self._content, self._parts)
        self._content, self._parts = "", []
        return reported

    def _read_first(self) -> bool:
        if self._left.startswith(self._begin):
            self._read = self._read_free
        elif not self._begin.startswith(self._left):
            self._read = self._read_answer
        return self._read != self._read_first

    def _read_answer(self) -> bool:
        self._report(self._left)
        self._left = ""
        return False

    def _read_free(self) -> bool:
        free, tag, rest = self._left.partition(self._begin)
        if not tag:
            # The end may be white space and the start of a tag.
            free, rest = _hold_back(self._left, self._begin)
        if self._is_behind_call:
            free = free.lstrip()
            if not free and not tag:
                self._left = rest.lstrip()
                return False
        self._report(free.rstrip() if tag else free)
        self._left = rest
        if tag:
            self._read = self._read_head
        return bool(tag)

    def _read_head(self) -> bool:
        found = _HEAD.match(self._left)
        if found is None:
            return False
        self._left = self._left[found.end() :]
        self._begin_call(json.loads(found[1]))
        self._value = _ObjectEnd()
        self._read = self._read_arguments
        return True

    def _report_cut_head(self) -> None:
        """Report a call truncated before its arguments: its name, else its text."""
        found = _NAME.match(self._left)
        if found is None:
            self._report(self._begin + self._left)
        else:
            self._begin_call(json.loads(found[1]))
        self._left = ""

    def _begin_call(self, name: str) -> None:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._parts.append(CallPart(self._num_begun, "", name, call_id))
        self._num_begun += 1

    def _read_arguments(self) -> bool:
        length = self._value.find(self._left)
        new, self._left = self._left[:length], self._left[length:]
        if new:
            self._parts.append(CallPart(self._num_begun - 1, new))
        if self._value.depth:
            return False
        self._read = self._read_tail
        return True

    def _read_tail(self) -> bool:
        found = self._tail.match(self._left)
        if found is None:
            return False
        self._left, self._is_behind_call = self._left[found.end() :], True
        self._num_done += 1
        self._read = self._read_free
        return True

    def _report(self, content: str) -> None:
        self._content += content
        self._is_behind_call &= not content


class _ObjectEnd:
    """Incremental search for the end of a JSON object."""

    def __init__(self) -> None:
        self.depth = 0  # open brackets; 0 at the end
        self._is_text = self._is_escaped = False

    def find(self, piece: str) -> int:
        """Return the number of characters of a piece that belong to the object."""
        for place, character in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = character == "\\"
                self._is_text = character != '"'
            elif character == '"':
                self._is_text = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if not self.depth:
                    return place + 1
        return len(piece)


def _hold_back(text: str, tag: str) -> tuple[str, str]:
    """Split off trailing white space and the start of a tag."""
    most = min(len(text), len(tag) - 1)
    length = next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)
    free = text[: len(text) - length].rstrip()
    return free, text[len(free) :]
