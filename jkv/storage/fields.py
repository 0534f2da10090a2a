"""A value as named leaves, and back: what files and a fresh cache are made of.

A leaf is an array, an int, a dtype or a tuple of such, named by the fields and the
numbers in tuples that lead to it: `storage.0.key_pool`,
`metadata.groups.0.free_blocks.ids`. The names are walked, not listed, so that a field
added to the state needs no change here.
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
    """Walk the fields of a value, members of tuples and dicts, down to leaves."""
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
    """Make a value of its leaves. They are taken out: what remains is not its own.

    They have the names that `list_leaves` gives them, dtypes and tuples as JSON has
    them too. `kinds` are the classes of which one stands where a field's type is a
    face, or that of the members of a tuple. ValueError if a leaf is missing that cannot
    be None.
    """
    parts = {
        field: _build_field(hint, leaves, kinds, _join(name, field))
        for field, hint in _type_hints(kind).items()
    }
    return kind(**parts)


def _build_field(hint: Any, leaves: dict[str, Any], kinds: Kinds, path: str) -> Any:
    """Make what a field of that type holds; of several, what the leaves belong to."""
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
    """Make one of several things: that whose first field is among the leaves."""
    prefix = f"{path}."
    within = [leaf for leaf in leaves if leaf.startswith(prefix)]
    # One without fields is what stands there where there are no leaves.
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
    raise ValueError(f"it lacks {path!r}, which this jkv needs")


def _is_dataclass(hint: Any) -> typing.TypeGuard[type[Any]]:
    return dataclasses.is_dataclass(hint)


def _of_json(leaf: Any) -> Any:
    """Return a leaf whose dtype may be a name, and its tuples lists."""
    if isinstance(leaf, str):
        return jnp.dtype(leaf)
    return tuple(map(_of_json, leaf)) if isinstance(leaf, list) else leaf


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
