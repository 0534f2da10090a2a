r"""Translate ECMA-262 patterns, as JSON Schema uses them, to Python's `re`.

Differences are spelled out: character classes, `.`, escapes, literal braces. Syntax
that only Python supports is refused, such as `\Z` or a possessive `a++`
(https://tc39.es/ecma262/#sec-patterns; of annex B, the needless escapes of
punctuation).
"""

import functools
import re
import sys
import unicodedata

from jkv.grammar.automaton import Automaton
from jkv.grammar.bounds import Bounds
from jkv.grammar.characters import Ranges, complement, select, unite
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
_DASH = ((0x2D, 0x2D),)  # distinguished by identity: an unescaped dash may form a range
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACES}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_ESCAPE = (
    r"\\(?:u\{(?P<long>[0-9A-Fa-f]{1,8})\}"
    r"|u(?P<high>[Dd][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[Dd][C-Fc-f][0-9A-Fa-f]{2})"
    r"|u(?P<short>[0-9A-Fa-f]{4})|x(?P<byte>[0-9A-Fa-f]{2})|c(?P<control>[A-Za-z])"
    r"|(?P<kind>[dwsDWS])"
    r"|(?P<has>[pP])(?:\{(?:(?:General_Category|gc)=)?(?P<property>[A-Za-z_]+)\})?"
    r"|(?P<zero>0(?![0-9]))|(?P<letter>.?))"
)
_MEMBER = re.compile(rf"{_ESCAPE}|(?P<plain>.)", re.DOTALL)
_TOKEN = re.compile(
    r"(?P<count>(?P<times>[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??)"
    r"|(?P<group>\((?!\?)|\(\?(?:[:=!]|<[=!]|(?P<name><[A-Za-z_$][\w$]*>)))"
    r"|(?P<set>\[(?P<negated>\^?)(?P<members>(?:\\.|[^\]\\])*)(?P<end>\]?))"
    rf"|(?P<edge>\\[bB])|(?P<escape>{_ESCAPE})|(?P<wrong>\(\?.{{0,2}})|(?P<sign>.)",
    re.DOTALL,
)
_LONG_NAMES = dict(
    each.split(":")
    for each in "Letter:L Lowercase_Letter:Ll Uppercase_Letter:Lu Mark:M Number:N "
    "Decimal_Number:Nd Punctuation:P Symbol:S Separator:Z Space_Separator:Zs Other:C "
    "Control:Cc".split()
)


def find_pattern(pattern: str, bounds: Bounds) -> Automaton:
    """Return the strings in which a pattern of a schema matches."""
    try:
        written = _translate(pattern)
    except Unsupported as error:
        message = f"{error} in the pattern {pattern!r} (of ECMA-262)"
        raise Unsupported(message) from error
    return compile_regex(written, bounds, is_search=True, shown=pattern)


def _translate(pattern: str) -> str:
    """Return the pattern in Python's syntax."""
    found, can_repeat = [], False
    for token in _TOKEN.finditer(pattern):
        piece, kind = token[0], token.lastgroup
        match kind:
            case "count" if not can_repeat:
                raise Unsupported("a quantifier with nothing to repeat")
            case "count":
                # drops `?`: greediness does not change the language
                piece = token["times"]
            case "group":
                piece = "(?:" if token["name"] or piece == "(" else piece
            case "set":
                piece = _written(_read_set(token))
            case "edge":
                piece = f"(?a:{piece})"
            case "escape":
                piece = _written(_read_escape(token))
            case "wrong":
                raise Unsupported(repr(piece))
            case _ if piece == ".":
                piece = _written(complement(_LINE_ENDS))
            case _ if piece not in "^$|)":
                piece = re.escape(piece)
        found.append(piece)
        can_repeat = kind not in ("count", "group", "edge") and piece not in "^$|"
    return "".join(found)


def _read_escape(token: re.Match[str]) -> Ranges:
    """Return the characters of an escape sequence."""
    if token["zero"]:
        return _single(0)
    if token["control"]:
        return _single(ord(token["control"]) % 32)
    if token["high"]:
        high, low = int(token["high"], 16), int(token["low"], 16)
        return _single(0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00)
    if code := token["long"] or token["short"] or token["byte"]:
        if int(code, 16) > sys.maxunicode:
            raise Unsupported(repr(token[0][1:]))
        return _single(int(code, 16))
    if kind := token["kind"] or token["has"]:
        name = token["property"] or ""
        ranges = _CLASSES.get(kind.lower()) or _category(_LONG_NAMES.get(name, name))
        if not ranges:
            raise Unsupported("an unknown character property")
        return ranges if kind.islower() else complement(ranges)
    letter = token["letter"]
    if letter in _CONTROLS:
        return _single(_CONTROLS[letter])
    if letter == "" or letter.isalnum():
        raise Unsupported(f"'\\{letter}'")
    return _single(ord(letter))


def _read_set(token: re.Match[str]) -> Ranges:
    """Return the characters of a bracket expression."""
    if not token["end"]:
        raise Unsupported("'[' without ']'")
    members = []
    for member in _MEMBER.finditer(token["members"]):
        if member["plain"] is None:
            is_backspace = member["letter"] == "b"
            members.append(_single(0x08) if is_backspace else _read_escape(member))
        else:
            members.append(_DASH if member[0] == "-" else _single(ord(member[0])))
    ranges = _join(members)
    return complement(ranges) if token["negated"] else ranges


def _join(members: list[Ranges]) -> Ranges:
    """Return the union of all members; unescaped dashes form ranges."""
    found: list[tuple[int, int]] = []
    while members:
        first = members.pop(0)
        if len(members) > 1 and members[0] is _DASH:
            last = members[1]
            if _is_single(first) and _is_single(last):
                del members[:2]
                if last[0][0] < first[0][0]:
                    raise Unsupported("a range in descending order")
                first = ((first[0][0], last[0][0]),)
        found += first
    return unite(*found)


def _single(code: int) -> Ranges:
    return ((code, code),)


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _written(ranges: Ranges) -> str:
    """Return a character set in Python's syntax."""
    if not ranges:
        return "(?!)"
    if _is_single(ranges):
        return re.escape(chr(ranges[0][0]))
    members = (rf"\U{low:08x}-\U{high:08x}" for low, high in ranges)
    return f"[{''.join(members)}]"


@functools.cache
def _category(name: str) -> Ranges:
    """Return the characters of a general category, or of a group of categories."""
    if name not in _LONG_NAMES.values() and len(name) != 2:
        return ()
    return select(lambda character: unicodedata.category(character).startswith(name))
