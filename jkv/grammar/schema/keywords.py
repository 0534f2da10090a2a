"""The keywords of JSON Schema: served, ignored on purpose, refused by name."""

from collections.abc import Mapping
from typing import Any

from jkv.grammar.errors import Unsupported

# Keywords that say something of values of a type.
OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    },
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    },
}
# Keywords that join schemas, or list values.
JOINING = {"$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const"}
SERVED = JOINING.union(*OF_TYPE.values())
# They say nothing of what a text may be, or are looked up by `$ref`.
IGNORED = {
    "$anchor",
    "$comment",
    "$defs",
    "$id",
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
# A value that asks for nothing, of keywords that are refused otherwise.
HARMLESS = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}


def constraints_of(schema: Any) -> dict[str, Any]:
    """Return a schema's keywords without those that are ignored.

    Raises:
      Unsupported: a keyword that is not served, or no schema.
    """
    if schema is True:
        return {}
    if schema is False:
        return {"enum": []}
    if not isinstance(schema, Mapping):
        raise Unsupported(f"a schema is an object or a boolean, this is {schema!r}")
    found = {}
    for name, value in schema.items():
        is_extension = name.startswith("x-")
        is_harmless = name in HARMLESS and value == HARMLESS[name]
        if name in IGNORED or is_extension or is_harmless:
            continue
        if name not in SERVED:
            raise Unsupported(f"keyword {name!r}")
        found[name] = value
    return found


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows.

    Where none is named they are those that its keywords are about; all of them where
    nothing is said.
    """
    named = schema.get("type")
    if named is not None:
        types = [named] if isinstance(named, str) else list(named)
    else:
        types = [name for name, words in OF_TYPE.items() if words & schema.keys()]
        types = types or ["null", "boolean", "number", "string", "array", "object"]
    unknown = set(types) - {"null", "boolean", "integer", *OF_TYPE}
    if unknown:
        raise Unsupported(f"type {sorted(unknown)}")
    if "number" in types:
        types = [name for name in types if name != "integer"]
    return types
