"""Keywords of JSON Schema: supported, ignored, and the forms of their values."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Keywords that apply to one type.
OF_TYPE = {
    "string": {
        "minLength",
        "maxLength",
        "pattern",
        "format",
    },
    "number": {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    },
    "array": {
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
    },
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
    },
}
# Combinators, and keywords that list values.
JOINING = {
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "type",
    "enum",
    "const",
}
SERVED = JOINING.union(*OF_TYPE.values())
# Annotations, and definitions that `$ref` resolves.
IGNORED = {
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$id",
    "$recursiveAnchor",
    "$schema",
    "$vocabulary",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
}
TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}

# Keywords with a schema, a list of schemas, a mapping of schemas.
SCHEMA_WORDS = {
    "not",
    "if",
    "then",
    "else",
    "items",
    "additionalItems",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "contentSchema",
}
LIST_WORDS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
MAP_WORDS = {
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
    "$defs",
    "definitions",
}

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return True for a number that JSON can encode."""
    is_kind = isinstance(value, int | float) and not isinstance(value, bool)
    return is_kind and (isinstance(value, int) or math.isfinite(value))


def is_schema(value: Any) -> bool:
    """Return True for an object or a boolean."""
    return isinstance(value, Mapping | bool)


def is_text(value: Any) -> bool:
    """Return True for a string that UTF-8 can encode, without lone surrogates."""
    is_string = isinstance(value, str)
    return is_string and not any("\ud800" <= sign <= "\udfff" for sign in value)


def is_written(value: Any) -> bool:
    """Return True for a value that JSON can encode in UTF-8."""
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


class Form(NamedTuple):
    """The required form of a keyword's value."""

    check: Check
    text: str  # for error messages


_WRITTEN = "JSON with finite numbers and no lone surrogates"
_COUNT = Form(_is_count, "an integer >= 0")
_NUMBER = Form(is_number, "a finite number")
_BOUND = Form(_is_bound_or_flag, "a finite number (or a boolean, of draft 4)")
_FACTOR = Form(lambda v: is_number(v) and v > 0, "a number > 0")
_FLAG = Form(lambda v: isinstance(v, bool), "a boolean")
_TEXT = Form(is_text, "a string without lone surrogates")
_TYPE = Form(_is_type, f"one of {', '.join(sorted(TYPES))}, or a list of them")
_NAMES = Form(_is_strings, "a list of strings")
_VALUES = Form(lambda v: isinstance(v, list) and is_written(v), f"a list of {_WRITTEN}")
_VALUE = Form(is_written, _WRITTEN)
_SCHEMA = Form(is_schema, "a schema")
_SCHEMAS = Form(_is_schemas, "a list of schemas")
_CHOICES = Form(lambda v: _is_schemas(v) and bool(v), "a list of schemas, at least one")
_ITEMS = Form(lambda v: is_schema(v) or _is_schemas(v), "a schema or a list of them")
_SCHEMA_MAP = Form(_is_map_of(is_schema), "a mapping of schemas")
_NAMES_MAP = Form(_is_map_of(_is_strings), "a mapping of lists of names")
_SCHEMA_OR_NAMES_MAP = Form(
    _is_map_of(lambda v: is_schema(v) or _is_strings(v)),
    "a mapping of schemas or lists of names",
)
FORMS: dict[str, Form] = {
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "minContains": _COUNT,
    "maxContains": _COUNT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    "multipleOf": _FACTOR,
    "uniqueItems": _FLAG,
    "pattern": _TEXT,
    "format": _TEXT,
    "$ref": _TEXT,
    "$dynamicRef": _TEXT,
    "$recursiveRef": _TEXT,
    "type": _TYPE,
    "required": _NAMES,
    "enum": _VALUES,
    "const": _VALUE,
    "prefixItems": _SCHEMAS,
    "allOf": _CHOICES,
    "anyOf": _CHOICES,
    "oneOf": _CHOICES,
    "items": _ITEMS,
    "not": _SCHEMA,
    "if": _SCHEMA,
    "then": _SCHEMA,
    "else": _SCHEMA,
    "additionalItems": _SCHEMA,
    "contains": _SCHEMA,
    "unevaluatedItems": _SCHEMA,
    "additionalProperties": _SCHEMA,
    "propertyNames": _SCHEMA,
    "unevaluatedProperties": _SCHEMA,
    "properties": _SCHEMA_MAP,
    "patternProperties": _SCHEMA_MAP,
    "dependentSchemas": _SCHEMA_MAP,
    "dependentRequired": _NAMES_MAP,
    "dependencies": _SCHEMA_OR_NAMES_MAP,
}
