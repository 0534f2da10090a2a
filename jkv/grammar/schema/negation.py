"""Negate keywords of a schema."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Kinds of values; a number with a zero fraction is an integer.
KINDS = "null", "boolean", "integer", "fraction", "string", "array", "object"
NUMBERS = ("integer", "fraction")

# Kind of value counted by "minLength" and so on.
COUNTS = {"Length": "string", "Items": "array", "Properties": "object"}

# Internal keywords, used by no schema.
KIND = " kinds"  # allowed kinds
ABSENT = " absent"  # forbidden keys
NOT_VALUES = " not values"
NOT_PATTERN = " not pattern"
NOT_MULTIPLE = " not a multiple"
SOME_PROPERTY = " some property"  # an `Others`, of a property for which a schema fails

Words = Mapping[str, Any]


class Others(NamedTuple):
    """A set of properties: all outside names and patterns, or those of a pattern."""

    named: frozenset[str]  # keys
    patterns: tuple[str, ...]  # of keys
    # the properties outside names and patterns, else the matching ones
    is_outside: bool
    schema: Any  # fails for one of the properties

    def mean(self, key: str, finds: Callable[[str, str], bool]) -> bool:
        """Return True if the set has a key; `finds` matches a pattern in a string."""
        is_found = any(finds(pattern, key) for pattern in self.patterns)
        return key not in self.named and not is_found if self.is_outside else is_found


def contraries(
    word: str, words: Words, negate: Callable[[Any], Any]
) -> list[dict[str, Any]] | None:
    """Return keyword sets, one of which holds if `word` fails; None if unknown.

    `negate` returns the negation of a schema.
    """
    value = words[word]
    match word:
        case "type":
            return [{KIND: [kind for kind in KINDS if kind not in kinds_of(value)]}]
        case "enum" | "const":
            return [{NOT_VALUES: value if word == "enum" else [value]}]
        case "required":
            return [{"type": "object", ABSENT: [key]} for key in value]
        case "pattern":
            return [{"type": "string", NOT_PATTERN: value}]
        case "multipleOf":
            return [{"type": "number", NOT_MULTIPLE: value}]
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return _other_side(word, words)
        case "properties" | "patternProperties" | "additionalProperties":
            return _some_property(word, words, negate)
        case "items" | "prefixItems" | "additionalItems":
            return _some_item(word, words, negate)
        case "contains" if words.get("minContains", 1) == 1:
            return [{"type": "array", "items": negate(value)}]
        case "minContains" | "maxContains" if "contains" not in words:
            return []
        case "uniqueItems" if not value:
            return []
    return _other_count(word, value)


def kinds_of(named: str | list[str]) -> set[str]:
    """Return the kinds of values of a type, or of several."""
    names = {named} if isinstance(named, str) else {*named}
    return names - {"number"} | ({*NUMBERS} if "number" in names else set())


def items_of(words: Words) -> tuple[list[Any], Any]:
    """Return the schemas of the leading items and of the others; None for none."""
    items = words.get("items")
    if isinstance(items, list):  # before draft 2020-12
        return items, words.get("additionalItems")
    return words.get("prefixItems", []), items


def _other_side(word: str, words: Words) -> list[dict[str, Any]]:
    value, is_least = words[word], word.lower().endswith("minimum")
    if isinstance(value, bool):
        return []  # draft 4: a flag that makes the other bound exclusive
    exclusive = "exclusiveMinimum" if is_least else "exclusiveMaximum"
    is_exclusive = word == exclusive or words.get(exclusive) is True
    other = "Maximum" if is_least else "Minimum"
    contrary = other.lower() if is_exclusive else f"exclusive{other}"
    return [{"type": "number", contrary: value}]


def _other_count(word: str, value: Any) -> list[dict[str, Any]] | None:
    kind = COUNTS.get(word[3:])
    if kind is None:
        return None
    if word[:3] == "max":
        return [{"type": kind, f"min{word[3:]}": value + 1}]
    return [{"type": kind, f"max{word[3:]}": value - 1}] if value else []


def _some_property(
    word: str, words: Words, negate: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    if word == "properties":
        return [
            {"type": "object", "required": [key], "properties": {key: negate(schema)}}
            for key, schema in words[word].items()
            if schema is not True
        ]
    if word == "patternProperties":
        meant = [
            Others(frozenset(), (pattern,), False, schema)
            for pattern, schema in words[word].items()
        ]
    else:
        named = frozenset(words.get("properties", ()))
        patterns = tuple(words.get("patternProperties", ()))
        meant = [Others(named, patterns, True, words[word])]
    return [
        {"type": "object", SOME_PROPERTY: others}
        for others in meant
        if others.schema is not True
    ]


def _some_item(
    word: str, words: Words, negate: Callable[[Any], Any]
) -> list[dict[str, Any]] | None:
    first, more = items_of(words)
    if words[word] is first:
        return [
            {
                "type": "array",
                "prefixItems": [*([True] * index), negate(schema)],
                "items": True,
                "minItems": index + 1,
            }
            for index, schema in enumerate(first)
            if schema is not True
        ]
    if words[word] is not more or more is True:
        return []
    if more is False:
        return [{"type": "array", "minItems": len(first) + 1}]
    return None if first else [{"type": "array", "contains": negate(more)}]
