"""Strings: their characters, patterns and lengths, in quotes."""

from jkv.grammar.automaton import Automaton
from jkv.grammar.bounds import UNBOUNDED, Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import TooLarge
from jkv.grammar.expressions import Choice, Expression, Leaf, Literal, Repeat, concat
from jkv.grammar.products import BYTES_OF_PAIR, intersect, subtract
from jkv.grammar.regexes import compile_regex
from jkv.grammar.schema.expansion import Way
from jkv.grammar.schema.formats import COUNTED, FORMATS
from jkv.grammar.schema.judging import Judge
from jkv.grammar.schema.negation import NOT_PATTERN, NOT_VALUES
from jkv.grammar.schema.quoting import quote

ANYTHING = "(?s:.*)"
# States that a character takes, and those that the signs of a pattern that are counted
# may take: a longer `maxLength` is taken for a shorter one.
_STATES_OF_CHARACTER, _MAX_COUNTED = 15, 2**12


def string_expression(
    way: Way, judge: Judge, bounds: Bounds, max_counted: int
) -> Expression:
    """Return the strings that atoms describe, with their quotes.

    Args:
      way: the atoms.
      judge: of their schemas.
      bounds: of the compilation.
      max_counted: states that counted characters may take.
    """
    found = string_automaton(way, judge, bounds)
    if isinstance(found, Automaton):
        return in_quotes(Leaf(quote(found)))
    least, most = found
    if most is not None:
        most = max(least, min(most, max_counted // _STATES_OF_CHARACTER))
    character = quote(compile_regex("(?s:.)", bounds))
    return in_quotes(Repeat(Leaf(character), least, most))


def string_automaton(
    way: Way, judge: Judge, bounds: Bounds
) -> Automaton | tuple[int, int | None]:
    """Return the strings without their quotes; lengths if nothing else is said."""
    words = [atom.words for atom in way]
    least = int(max((one.get("minLength", 0) for one in words), default=0))
    longest = [one["maxLength"] for one in words if "maxLength" in one]
    most = int(min(longest)) if longest else None
    described, others = list[Automaton](), list[Automaton]()
    for one in words:
        for word in ("pattern", "format"):
            if word in one and (word == "pattern" or one[word] in FORMATS):
                is_short = most is not None and one[word] in COUNTED
                kind = "short format" if is_short and word == "format" else word
                described.append(judge.strings(kind, one[word]))
        if NOT_PATTERN in one:
            others.append(judge.strings("pattern", one[NOT_PATTERN]))
        taken = [v for v in one.get(NOT_VALUES, ()) if isinstance(v, str)]
        if taken:
            literals = Choice([Literal(text.encode()) for text in taken])
            others.append(determinize(literals, bounds))
    if most is not None and least > most:
        return determinize(Choice([]), bounds)
    if not described and not others:
        return least, most
    texts = described.pop() if described else compile_regex(ANYTHING, bounds)
    for other in described:
        texts = intersect(texts, other, bounds)
    for other in others:
        texts = subtract(texts, other, bounds)
    return _counted(texts, least, most, bounds)


def _counted(
    texts: Automaton, least: int, most: int | None, bounds: Bounds
) -> Automaton:
    """Return the texts of so many characters."""
    longest = _longest(texts)
    if longest is not None and most is not None and longest <= most:
        most = None  # texts are as short as this anyhow
    if not least and most is None:
        return texts
    if most is not None:
        most = max(least, min(most, _MAX_COUNTED // _STATES_OF_CHARACTER))
    while True:
        counted = counted_characters(least, most, bounds)
        if most is None or most <= least:
            return intersect(texts, counted, bounds)
        try:
            return intersect(texts, counted, Bounds(_MAX_COUNTED * BYTES_OF_PAIR))
        except TooLarge:
            most = max(least, most // 2)


def counted_characters(least: int, most: int | None, bounds: Bounds) -> Automaton:
    """Return all texts of so many characters."""
    character = Leaf(compile_regex("(?s:.)", bounds))
    return determinize(Repeat(character, least, most), bounds)


def _longest(texts: Automaton) -> int | None:
    """Return the most bytes of a text; None if there is no most."""
    level, newest, seen = 0, {0}, 0
    while newest:
        newest = {to for state in newest for _, _, to in texts.runs[state]}
        level, seen = level + 1, seen + len(newest)
        if level > len(texts.transitions) or seen > 2**16:
            return None
    return level - 1


def any_string(bounds: Bounds) -> Expression:
    """Return every string."""
    return in_quotes(Repeat(Leaf(quote(compile_regex("(?s:.)", bounds)))))


def literal_string(text: str) -> Expression:
    """Return a given string, in every way that its characters may be escaped."""
    automaton = determinize(Literal(text.encode()), UNBOUNDED)
    return in_quotes(Leaf(quote(automaton)))


def in_quotes(inner: Expression) -> Expression:
    """Put quotes around what stands between them."""
    return concat(b'"', inner, b'"')
