"""`^` and `$` at the ends of a pattern, which say where a text must begin and end.

The compiler looks at whole texts, so that anchors are taken off before. Those at the
ends of each branch are all that patterns of schemas use; others are refused.
"""

import dataclasses
import re

from jkv.grammar.errors import Unsupported

# A piece of a pattern: something escaped, a class of characters, or one character.
PIECE = re.compile(
    r"\\(?:[pPxu]\{[^}]*\}|.)|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL
)
_ANCHORS = {"^", "$", r"\A", r"\z", r"\Z"}


@dataclasses.dataclass(frozen=True)
class Branch:
    """What stands between two `|`, without its anchors.

    Attributes:
      text: the pattern.
      begins: whether it began with `^`.
      ends: whether it ended with `$`.
    """

    text: str
    begins: bool
    ends: bool


def split_branches(pattern: str) -> list[Branch]:
    """Split a pattern at the `|` outside of groups and take off the anchors.

    Raises:
      Unsupported: an anchor stands elsewhere.
    """
    branches: list[list[str]] = [[]]
    depth = 0
    for piece in PIECE.findall(pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(piece)
    found = []
    for branch in branches:
        inner = _find_inside(branch)
        if inner is None:
            found.append(_strip(branch, pattern))
        else:
            found += split_branches(inner)
    return found


def _find_inside(pieces: list[str]) -> str | None:
    """Return what a branch that is one group has inside, where that has anchors."""
    if pieces[:1] != ["("] or pieces[-1:] != [")"]:
        return None
    depth = 0
    for place, piece in enumerate(pieces[:-1]):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if depth == 0:
            return None
        if piece == "?" and pieces[place - 1] == "(" and pieces[place + 1] != ":":
            return None  # flags, names and the like
    inner = pieces[3:-1] if pieces[1:3] == ["?", ":"] else pieces[1:-1]
    return "".join(inner) if _ANCHORS & set(inner) else None


def _strip(pieces: list[str], pattern: str) -> Branch:
    begins = pieces[:1] in (["^"], [r"\A"])
    inner = pieces[1:] if begins else pieces
    ends = inner[-1:] in (["$"], [r"\z"], [r"\Z"])
    inner = inner[:-1] if ends else inner
    if _ANCHORS & set(inner):
        raise Unsupported(f"an anchor inside the pattern {pattern!r}")
    return Branch("".join(inner), begins, ends)
