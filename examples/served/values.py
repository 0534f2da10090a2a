"""Readers of field values: flags, numbers and lists of tokens."""

from collections.abc import Mapping
from typing import Any

from .mistakes import Refused


def read_flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean field.

    Raises:
        Refused: if the value is not a boolean.
    """
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise Refused(f"{name} must be true or false", name)
    return value


def is_tokens(value: Any) -> bool:
    """True if `value` is a non-empty list of integers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(token, int) and not isinstance(token, bool) for token in value
        )
    )


def refuse_unknown(given: Mapping[str, Any], known: set[str], name: str) -> None:
    """Refuse unsupported keys of an object, unless they are null.

    Raises:
        Refused: for an unsupported key.
    """
    for key, value in given.items():
        if key not in known and value is not None:
            key = f"{name}.{str(key)[:60]}"
            raise Refused(
                f"{key} is not supported; omit it", name, code="unknown_parameter"
            )


def read_number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    kind: type,
    low: float,
    high: float,
) -> Any:
    """Return a numeric field.

    Args:
        body: the fields.
        name: name of the field.
        default: for a missing or null field.
        kind: int or float.
        low: the minimum.
        high: the maximum.

    Raises:
        Refused: if the value is not a number of that kind and range.
    """
    value = body.get(name)
    value = default if value is None else value
    kinds = (int, float) if kind is float else (int,)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON does not distinguish 1.0 and 1
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise Refused(f"{name} must be a number of type {kind.__name__}", name)
    if not low <= value <= high:
        raise Refused(f"{name} must be from {low} to {high}, got {value}", name)
    return kind(value)
