"""Several schemas that must hold at once, as one: `allOf`, and what stands beside a
reference."""

from collections.abc import Callable, Mapping
from typing import Any

from jkv.grammar.errors import Unsupported
from jkv.grammar.schema.keywords import types_of

_TIGHTER: dict[str, Callable[[Any, Any], Any]] = {
    "minLength": max,
    "minItems": max,
    "minProperties": max,
    "minimum": max,
    "exclusiveMinimum": max,
    "maxLength": min,
    "maxItems": min,
    "maxProperties": min,
    "maximum": min,
    "exclusiveMaximum": min,
}


def merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that asks for both.

    Properties stand in the order of the first, then of the second.

    Args:
      one: keywords of a schema, references in it resolved.
      other: as well.

    Raises:
      Unsupported: a keyword of both that cannot be put together.
    """
    _check_closed(one, other)
    merged = dict(one)
    for name, value in other.items():
        if name not in merged or merged[name] == value:
            merged[name] = value
        elif name in _TIGHTER and not isinstance(value, bool):
            merged[name] = _TIGHTER[name](merged[name], value)
        elif name == "type":
            merged[name] = _common_types(one, other)
        elif name == "required":
            merged[name] = list(dict.fromkeys([*merged[name], *value]))
        elif name == "enum":
            merged[name] = [v for v in merged[name] if v in value]
        elif name == "properties":
            merged[name] = {**merged[name]}
            for key, schema in value.items():
                both = [merged[name][key], schema] if key in merged[name] else [schema]
                merged[name][key] = {"allOf": both} if len(both) > 1 else schema
        else:
            raise Unsupported(f"keyword {name!r} in several schemas of 'allOf'")
    return merged


def _common_types(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    left, right = types_of(one), types_of(other)
    common = [name for name in left if name in right]
    if {"integer", "number"} <= {*left, *right} and "integer" not in common:
        common = [name for name in common if name != "number"] + ["integer"]
    return common


def _check_closed(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse to add properties to an object that says what others may be."""
    for closed, open_ in ((one, other), (other, one)):
        said = closed.get("additionalProperties", True)
        theirs = open_.get("properties", {}).keys() | open_.get("patternProperties", {})
        if said is not True and not theirs <= closed.get("properties", {}).keys():
            raise Unsupported("'additionalProperties' beside another schema in 'allOf'")
