"""The values that fields of a body may have: flags, numbers, lists of tokens."""

from collections.abc import Mapping
from typing import Any

from .mistakes import Refused


def read_flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a field that is true or false.

    Raises:
        Refused: for anything else.
    """
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise Refused(f"{name} must be true or false", name)
    return value


def is_tokens(value: Any) -> bool:
    """True if this is a list of integers, one or more."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(token, int) and not isinstance(token, bool) for token in value
        )
    )


def refuse_unknown(given: Mapping[str, Any], known: set[str], name: str) -> None:
    """Refuse keys of an object that are not served, unless they are null.

    Raises:
        Refused: with the key's name.
    """
    for key, value in given.items():
        if key not in known and value is not None:
            key = f"{name}.{str(key)[:60]}"
            raise Refused(
                f"{key} is not served; leave it out", name, code="unknown_parameter"
            )


def read_number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    kind: type,
    low: float,
    high: float,
) -> Any:
    """Return a field that is a number.

    Args:
        body: the fields.
        name: of the field.
        default: where it is missing or null.
        kind: int or float.
        low: the smallest that may be.
        high: the largest.

    Raises:
        Refused: for anything else.
    """
    value = body.get(name)
    value = default if value is None else value
    kinds = (int, float) if kind is float else (int,)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON does not tell 1.0 from 1
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise Refused(f"{name} must be a number of type {kind.__name__}", name)
    if not low <= value <= high:
        raise Refused(f"{name} must be from {low} to {high}, got {value}", name)
    return kind(value)
