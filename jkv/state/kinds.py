"""Caches and batches of derived kinds: what they have of the kind they derive from."""

import dataclasses
from typing import Any


def fields_of(kind: type[Any], value: Any) -> dict[str, Any]:
    """Return the fields that a value has as one of this class, by their names."""
    return {
        field.name: getattr(value, field.name) for field in dataclasses.fields(kind)
    }


def as_plain(kind: type[Any], value: Any) -> Any:
    """Return a value as one of the class that it is derived from."""
    return kind(**fields_of(kind, value))
