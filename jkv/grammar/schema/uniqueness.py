"""Arrays of distinct items.

An automaton's memory is finite, so it tracks only which listed values occurred, or the
first character of the items.
"""

import itertools
from collections.abc import Sequence

from jkv.grammar.automaton import (
    Choice,
    Expression,
    Leaf,
    Literal,
    begin_at,
    concat,
    intersect,
    minimize,
    subtract,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Unsupported
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.numbers import PLAIN, ZEROS
from jkv.grammar.schema.strings import Punctuation, any_string

_MAX_ORDERED = 4  # values that may stand in any order
_MAX_STATES = 2**12  # of all parts by first character


def listed_once(
    texts: Sequence[Expression], least: int, most: int | None, marks: Punctuation
) -> Expression:
    """Return distinct choices of `texts`, in any order if there are few."""
    if most is not None and most >= len(texts):
        most = None  # the bound is implied; counting items would take many states
    if len(texts) > _MAX_ORDERED:
        return marks.separated([(text, False) for text in texts], None, least, most)
    chosen = (
        each
        for count in range(max(1, least), (most or len(texts)) + 1)
        for each in itertools.permutations(texts, count)
    )
    found = [marks.separated([(text, True) for text in each]) for each in chosen]
    return Choice([*found, *([] if least else [Literal(b"")])])


def by_first_sign(
    item: Expression, least: int, most: int | None, bounds: Bounds
) -> list[Expression]:
    """Return disjoint sets of strings and numbers, by first character.

    Numbers have no exponent, and zero no sign, so different first characters imply
    different numbers.
    """
    numbers = Leaf(compile_regex(PLAIN, bounds))
    shown = determinize(Choice([any_string(bounds), numbers]), bounds)
    minus_zero = compile_regex(f"-0{ZEROS}", bounds)
    found = intersect(determinize(item, bounds), shown, bounds)
    found = subtract(found, minus_zero, bounds)
    quoted = int(found.transitions[0, ord('"')])
    firsts = [(b'"', byte, quoted) for byte in range(256) if quoted >= 0]
    firsts += [(b"", byte, 0) for byte in b"-0123456789"]
    signs = [
        (before + bytes([byte]), target)
        for before, byte, state in firsts
        if (target := int(found.transitions[state, byte])) >= 0
    ]
    copies = max(1, least, most or 0)
    room = max(1, _MAX_STATES // (copies * len(found.transitions)))
    share = -(-len(signs) // room)  # first characters per set
    groups = [signs[place : place + share] for place in range(0, len(signs), share)]
    if least > len(groups):
        raise Unsupported(f"'uniqueItems' of {least} strings or numbers")

    def behind(state: int) -> Expression:
        return Leaf(minimize(begin_at(found, state), bounds))

    return [
        Choice([concat(sign, behind(state)) for sign, state in group])
        for group in groups
    ]
