"""The keywords of JSON Schema: which are served or ignored, and their forms."""

import math
from collections.abc import Callable, Mapping
from typing import Any

# Keywords that say something of values of a type.
OF_TYPE = {
    name: {*words.split()}
    for name, words in {
        "string": "minLength maxLength pattern format",
        "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
        "array": "items prefixItems additionalItems minItems maxItems uniqueItems "
        "contains minContains maxContains unevaluatedItems",
        "object": "properties required additionalProperties patternProperties "
        "propertyNames minProperties maxProperties dependentRequired dependentSchemas "
        "dependencies unevaluatedProperties",
    }.items()
}
# Keywords that join schemas, or list values.
JOINING = {
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not"),
    *("if", "then", "else", "type", "enum", "const"),
}
SERVED = JOINING.union(*OF_TYPE.values())
# They say nothing of what a text may be, or are looked up by `$ref`.
IGNORED = {
    *("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor"),
    *("$schema", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema"),
    *("default", "definitions", "deprecated", "description", "discriminator"),
    *("example", "examples", "id", "readOnly", "title", "writeOnly"),
}
TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}

# Where schemas stand inside of a schema: as the value, in a list, in a mapping.
SCHEMA_WORDS = {
    *("not", "if", "then", "else", "items", "additionalItems", "contains"),
    *("unevaluatedItems", "additionalProperties", "propertyNames"),
    *("unevaluatedProperties", "contentSchema"),
}
LIST_WORDS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
MAP_WORDS = {
    *("properties", "patternProperties", "dependentSchemas", "dependencies"),
    *("$defs", "definitions"),
}

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Whether a value is a number that JSON can write."""
    is_kind = isinstance(value, int | float) and not isinstance(value, bool)
    return is_kind and (isinstance(value, int) or math.isfinite(value))


def is_schema(value: Any) -> bool:
    """Whether a value is an object or a boolean."""
    return isinstance(value, Mapping | bool)


def is_text(value: Any) -> bool:
    """Whether a value is a string that UTF-8 can write: no surrogate stands alone."""
    is_string = isinstance(value, str)
    return is_string and not any("\ud800" <= sign <= "\udfff" for sign in value)


def is_written(value: Any) -> bool:
    """Whether JSON can write a value, in UTF-8."""
    if isinstance(value, list):
        return all(map(is_written, value))
    if isinstance(value, Mapping):
        return all(map(is_written, (*value, *value.values())))
    return (
        value is None or isinstance(value, bool) or is_number(value) or is_text(value)
    )


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and int(value) == value


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_bound_or_flag(value: Any) -> bool:
    return isinstance(value, bool) or is_number(value)


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _is_strings(names) and bool(names) and TYPES.issuperset(names)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _is_map_of(check: Check) -> Check:
    def is_map(value: Any) -> bool:
        is_kind = isinstance(value, Mapping) and all(map(is_text, value))
        return is_kind and all(map(check, value.values()))

    return is_map


def _of(check: Check, text: str, *names: str) -> dict[str, tuple[Check, str]]:
    return dict.fromkeys(names, (check, text))


_WRITTEN = "what JSON can write in UTF-8: finite numbers, no lone surrogates"
# What the value of each keyword must be.
FORMS: dict[str, tuple[Check, str]] = {
    **_of(_is_count, "a whole number from 0 on", "minLength", "maxLength"),
    **_of(_is_count, "a whole number from 0 on", "minItems", "maxItems"),
    **_of(_is_count, "a whole number from 0 on", "minProperties", "maxProperties"),
    **_of(_is_count, "a whole number from 0 on", "minContains", "maxContains"),
    **_of(is_number, "a finite number", "minimum", "maximum"),
    **_of(
        _is_bound_or_flag,
        "a finite number (or a boolean, of draft 4)",
        *("exclusiveMinimum", "exclusiveMaximum"),
    ),
    **_of(lambda v: is_number(v) and v > 0, "a number above 0", "multipleOf"),
    **_of(lambda v: isinstance(v, bool), "a boolean", "uniqueItems"),
    **_of(
        is_text,
        "a string without lone surrogates",
        *("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"),
    ),
    **_of(_is_type, f"one of {', '.join(sorted(TYPES))}, or a list of them", "type"),
    **_of(_is_strings, "a list of strings", "required"),
    **_of(
        lambda v: isinstance(v, list) and is_written(v), f"a list of {_WRITTEN}", "enum"
    ),
    **_of(is_written, f"of {_WRITTEN}", "const"),
    **_of(_is_schemas, "a list of schemas", "prefixItems"),
    **_of(
        lambda v: _is_schemas(v) and bool(v),
        "a list of schemas, at least one",
        *("allOf", "anyOf", "oneOf"),
    ),
    **_of(
        lambda v: is_schema(v) or _is_schemas(v), "a schema or a list of them", "items"
    ),
    **_of(is_schema, "a schema", *(SCHEMA_WORDS - {"items", "contentSchema"})),
    **_of(
        _is_map_of(is_schema),
        "a mapping of schemas",
        *("properties", "patternProperties", "dependentSchemas"),
    ),
    **_of(_is_map_of(_is_strings), "a mapping of lists of names", "dependentRequired"),
    **_of(
        _is_map_of(lambda v: is_schema(v) or _is_strings(v)),
        "a mapping of schemas or lists of names",
        "dependencies",
    ),
}
