"""`^` and `$` at the ends of a pattern, which say where a text must begin and end.

The compiler looks at whole texts, so that anchors are taken off before. Those at the
ends of each branch are all that patterns of schemas use; others are refused.
"""

import dataclasses
import re

from jkv.grammar.errors import Unsupported

# A piece of a pattern: something escaped, a class of characters, or one character.
_PIECE = re.compile(
    r"\\(?:[pPxu]\{[^}]*\}|.)|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL
)


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
    for piece in _PIECE.findall(pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(piece)
    return [_strip(branch, pattern) for branch in branches]


def _strip(pieces: list[str], pattern: str) -> Branch:
    begins = pieces[:1] in (["^"], [r"\A"])
    inner = pieces[1:] if begins else pieces
    ends = inner[-1:] in (["$"], [r"\z"], [r"\Z"])
    inner = inner[:-1] if ends else inner
    if any(piece in ("^", "$", r"\A", r"\z", r"\Z") for piece in inner):
        raise Unsupported(f"an anchor inside the pattern {pattern!r}")
    return Branch("".join(inner), begins, ends)
