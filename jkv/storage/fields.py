"""Conversion between a value and its named leaves, for files and fresh caches.

A leaf is an array, an int, a dtype or a tuple of these, named by the fields and tuple
indices on its path: `storage.0.key_pool`, `metadata.groups.0.free_blocks.ids`. Names
come from the dataclass fields, so that a new field of the state needs no change here.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp

Value = TypeVar("Value")
Kinds: TypeAlias = Mapping[str, tuple[type, ...]]  # by path

_type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def list_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value with their names, through tuples and dicts."""
    parts: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        parts = {str(number): part for number, part in enumerate(value)}
    elif value is not None:
        yield name, value
    for field, part in parts.items():
        yield from list_leaves(part, _join(name, field))


def build(
    kind: type[Value], leaves: dict[str, Any], kinds: Kinds, name: str = ""
) -> Value:
    """Build a value from its leaves, removing them from `leaves`.

    Names are as in `list_leaves`; dtypes and tuples may be JSON's strings and lists.
    `kinds` has the candidate classes of fields with an abstract type, or of the members
    of a tuple. Raises ValueError if a required leaf is missing.
    """
    parts = {
        field: _build_field(hint, leaves, kinds, _join(name, field))
        for field, hint in _type_hints(kind).items()
    }
    return kind(**parts)


def _build_field(hint: Any, leaves: dict[str, Any], kinds: Kinds, path: str) -> Any:
    """Build a field's value, choosing among several types by the leaves present."""
    if path in leaves:
        return _of_json(leaves.pop(path))
    inner, prefix = typing.get_args(hint), f"{path}."
    options = inner if isinstance(hint, types.UnionType) else (hint,)
    within = [leaf for leaf in leaves if leaf.startswith(prefix)]
    if typing.get_origin(hint) is not tuple:
        return _build_one(kinds.get(path, options), leaves, kinds, path)
    options = kinds.get(path, inner[:1])
    numbers = {leaf.removeprefix(prefix).split(".")[0] for leaf in within}
    paths = [f"{prefix}{number}" for number in range(len(numbers))]
    return tuple(_build_one(options, leaves, kinds, path) for path in paths)


def _build_one(
    options: tuple[Any, ...], leaves: dict[str, Any], kinds: Kinds, path: str
) -> Any:
    """Build the candidate whose first field is among the leaves."""
    prefix = f"{path}."
    within = [leaf for leaf in leaves if leaf.startswith(prefix)]
    # Without leaves, only a class without fields fits.
    fitting = [
        option
        for option in filter(_is_dataclass, options)
        if bool(dataclasses.fields(option)) == bool(within)
    ]
    for option in fitting:
        first = f"{prefix}{dataclasses.fields(option)[0].name}" if within else ""
        if len(fitting) == 1 or any(leaf.startswith(first) for leaf in within):
            return build(option, leaves, kinds, path)
    if any(typing.get_origin(option) is dict for option in options):
        return {leaf.removeprefix(prefix): leaves.pop(leaf) for leaf in within}
    if type(None) in options:
        return None
    raise ValueError(f"it lacks {path!r}, required by this version of jkv")


def _is_dataclass(hint: Any) -> typing.TypeGuard[type[Any]]:
    return dataclasses.is_dataclass(hint)


def _of_json(leaf: Any) -> Any:
    """Return a leaf with dtypes from strings and tuples from lists."""
    if isinstance(leaf, str):
        return jnp.dtype(leaf)
    return tuple(map(_of_json, leaf)) if isinstance(leaf, list) else leaf


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
