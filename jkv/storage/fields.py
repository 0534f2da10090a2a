"""A value as named leaves, and back: what files and a fresh cache are made of.

A leaf is an array, an int or a dtype, named by the fields that lead to it: `keys`,
`metadata.block_tables`, `metadata.free_blocks.ids`. The names are walked, not listed,
so that a field added to the state needs no change here.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp

Value = TypeVar("Value")

_type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def list_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Walk the fields of a value down to its leaves; what is None has none.

    Args:
      value: a dataclass, a dict or a leaf.
      name: of the value itself.
    """
    parts: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, dict):
        parts = value
    elif value is not None:
        yield name, value
    for field, part in parts.items():
        yield from list_leaves(part, _join(name, field))


def build(kind: type[Value], leaves: dict[str, Any], name: str = "") -> Value:
    """Make a value of its leaves.

    Args:
      kind: the dataclass to make.
      leaves: by the names that `list_leaves` gives them. They are taken out: what
        remains has no place in the value.
      name: of the value itself.

    Raises:
      ValueError: if a leaf is missing that cannot be None.
    """
    parts: dict[str, Any] = {}
    for field, hint in _type_hints(kind).items():
        path = _join(name, field)
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
        inner = next((each for each in options if dataclasses.is_dataclass(each)), None)
        within = [leaf for leaf in leaves if leaf.startswith(f"{path}.")]
        if isinstance(inner, type) and within:
            parts[field] = build(inner, leaves, path)
        elif typing.get_origin(hint) is dict:
            prefix = f"{path}."
            parts[field] = {
                each.removeprefix(prefix): leaves.pop(each) for each in within
            }
        elif path in leaves:
            leaf = leaves.pop(path)
            parts[field] = jnp.dtype(leaf) if isinstance(leaf, str) else leaf
        elif type(None) in options:
            parts[field] = None
        else:
            raise ValueError(f"it lacks {path!r}, which this jkv needs")
    return kind(**parts)


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
