r"""Patterns of ECMA-262, as JSON Schema has them, written as Python's `re` reads them.

What differs is spelled out: classes of characters, `.`, escapes, braces that count
nothing. What ECMA-262 does not have is refused by name, such as `\Z` or a possessive
`a++`, although Python would read it (https://tc39.es/ecma262/#sec-patterns, with the
letters that are escaped without need in annex B as long as they are no letters).
"""

import functools
import re
import sys
import unicodedata

from jkv.grammar.automaton import Automaton
from jkv.grammar.bounds import Bounds
from jkv.grammar.characters import Ranges, complement, unite
from jkv.grammar.errors import Unsupported
from jkv.grammar.regexes import compile_regex

_DIGIT = ((0x30, 0x39),)
_WORD = unite(*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SPACES = unite(
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
    (0xFEFF, 0xFEFF),
)
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACES}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\(\?(?:[:=!]|<[=!]|(<[A-Za-z_$][\w$]*>))")
_CODE = re.compile(
    r"u\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|c([A-Za-z])"
)
_LOW_HALF = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"\{(?:(?:General_Category|gc)=)?([A-Za-z_]+)\}")
_LONG_NAMES = {
    "Letter": "L",
    "Lowercase_Letter": "Ll",
    "Uppercase_Letter": "Lu",
    "Mark": "M",
    "Number": "N",
    "Decimal_Number": "Nd",
    "Punctuation": "P",
    "Symbol": "S",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Other": "C",
    "Control": "Cc",
}


def find_pattern(pattern: str, bounds: Bounds) -> Automaton:
    """Return the texts in which a pattern of a schema is found."""
    written = _Translator(pattern).translate()
    return compile_regex(written, bounds, is_search=True, shown=pattern)


class _Translator:
    """A pattern, and the place up to which it was read."""

    def __init__(self, pattern: str) -> None:
        self._text, self._place = pattern, 0

    def translate(self) -> str:
        """Return the pattern in Python's syntax."""
        found, can_repeat = [], False
        while self._place < len(self._text):
            character = self._text[self._place]
            piece, can_repeat = self._read_piece(character, can_repeat)
            found.append(piece)
        return "".join(found)

    def _read_piece(self, character: str, can_repeat: bool) -> tuple[str, bool]:
        """Return the next piece, and whether a count may stand behind it."""
        count = _COUNT.match(self._text, self._place)
        if character in "*+?" or count:
            if not can_repeat:
                raise self._refuse("a count behind nothing")
            piece = count[0] if count else character
            self._place += len(piece)
            if self._text.startswith("?", self._place):
                self._place += 1  # of the same texts
            return piece, False
        if character == "(":
            return self._read_group(), False
        self._place += 1
        match character:
            case "\\" if self._text[self._place : self._place + 1] in ("b", "B"):
                self._place += 1
                return rf"(?a:\{self._text[self._place - 1]})", False
            case "\\":
                return _written(self._read_escaped()), True
            case "[":
                return _written(self._read_class()), True
            case ".":
                return _written(complement(_LINE_ENDS)), True
            case "^" | "$" | "|":
                return character, False
            case ")":
                return character, True
        return re.escape(character), True

    def _read_group(self) -> str:
        if not self._text.startswith("(?", self._place):
            self._place += 1
            return "(?:"
        group = _GROUP.match(self._text, self._place)
        if group is None:
            raise self._refuse(f"{self._text[self._place : self._place + 4]!r}")
        self._place += len(group[0])
        return "(?:" if group[1] else group[0]

    def _read_escaped(self) -> Ranges:
        """Return the characters that are meant behind a backslash."""
        text, place = self._text, self._place
        letter = text[place : place + 1]
        if code := _CODE.match(text, place):
            self._place += len(code[0])
            return self._read_code(code)
        self._place += 1
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else complement(ranges)
        if letter in ("p", "P"):
            ranges = self._read_property()
            return ranges if letter == "p" else complement(ranges)
        if letter in _CONTROLS:
            return _single(_CONTROLS[letter])
        if letter == "0" and not text[place + 1 : place + 2].isdigit():
            return _single(0)
        if letter == "" or letter.isalnum():
            raise self._refuse(f"'\\{letter}'")
        return _single(ord(letter))

    def _read_code(self, code: re.Match[str]) -> Ranges:
        long, short, byte, control = code.groups()
        if control:
            return _single(ord(control) % 32)
        number = int(long or short or byte, 16)
        if short and 0xD800 <= number < 0xDC00:
            low = _LOW_HALF.match(self._text, self._place)
            if low:
                self._place += len(low[0])
                number = 0x10000 + (number - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if number > sys.maxunicode:
            raise self._refuse(repr(code[0]))
        return _single(number)

    def _read_property(self) -> Ranges:
        found = _PROPERTY.match(self._text, self._place)
        name = _LONG_NAMES.get(found[1], found[1]) if found else ""
        if found is None or not _category(name):
            raise self._refuse("a property of characters")
        self._place += len(found[0])
        return _category(name)

    def _read_class(self) -> Ranges:
        """Return the characters of a class, behind its bracket."""
        is_negated = self._text.startswith("^", self._place)
        self._place += is_negated
        members: list[Ranges | str] = []  # "-" for one that may be of a range
        while not self._text.startswith("]", self._place):
            if self._place >= len(self._text):
                raise self._refuse("'[' without an end")
            character = self._text[self._place]
            self._place += 1
            if character == "\\" and self._text.startswith("b", self._place):
                self._place += 1
                members.append(_single(0x08))
            elif character == "\\":
                members.append(self._read_escaped())
            else:
                members.append("-" if character == "-" else _single(ord(character)))
        self._place += 1
        ranges = self._join(members)
        return complement(ranges) if is_negated else ranges

    def _join(self, members: list["Ranges | str"]) -> Ranges:
        found: list[tuple[int, int]] = []
        while members:
            first = _set_of(members.pop(0))
            if len(members) > 1 and members[0] == "-":
                last = _set_of(members[1])
                if _is_single(first) and _is_single(last):
                    del members[:2]
                    if last[0][0] < first[0][0]:
                        raise self._refuse("a range that runs down")
                    first = ((first[0][0], last[0][0]),)
            found += first
        return unite(*found)

    def _refuse(self, what: str) -> Unsupported:
        return Unsupported(f"{what} in the pattern {self._text!r} (of ECMA-262)")


def _set_of(member: Ranges | str) -> Ranges:
    return _single(ord(member)) if isinstance(member, str) else member


def _single(code: int) -> Ranges:
    return ((code, code),)


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _written(ranges: Ranges) -> str:
    """Return a set of characters in Python's syntax."""
    if not ranges:
        return "(?!)"
    if _is_single(ranges):
        return re.escape(chr(ranges[0][0]))
    return f"[{''.join(f'{_name(a)}-{_name(b)}' for a, b in ranges)}]"


def _name(code: int) -> str:
    return f"\\U{code:08x}"


@functools.cache
def _category(name: str) -> Ranges:
    """Return the characters of a general category, or of one of its first letters."""
    if name not in _LONG_NAMES.values() and len(name) != 2:
        return ()
    return unite(
        *(
            (code, code)
            for code in range(sys.maxunicode + 1)
            if unicodedata.category(chr(code)).startswith(name)
        )
    )
