"""Readable signatures for `help` and `jax.jit`, with all arguments by name.

Loops accept fields of options such as `GenerationConfig` by name, as
`**fields: Unpack[Fields]` of a `TypedDict`. Their signatures list these fields with
their defaults. Unions of arrays are shown by the names given here;
`typing.get_type_hints` returns the actual types.
"""

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

# Arrays of any integer type; JAX's arrays have no static dtype.
IntegerArray: TypeAlias = jax.Array | np.ndarray[Any, np.dtype[np.integer[Any]]]
# One number, unlike `jax.typing.ArrayLike` not a float.
Integer: TypeAlias = IntegerArray | np.integer[Any] | int
# An array, a number, or a list, tuple or range of numbers.
Integers: TypeAlias = Integer | Sequence[int] | Sequence[np.integer[Any]]
# Rows of integers, such as a row of token ids for each prompt: an array or lists.
IntegerRows: TypeAlias = IntegerArray | Sequence[Integers]

# Unions shown by name, larger ones first.
_NAMED: dict[str, Any] = {
    "DTypeLike": jax.typing.DTypeLike,
    "ArrayLike": jax.typing.ArrayLike,
    "Integers": Integers,
    "IntegerRows": IntegerRows,
    "Integer": Integer,
    "IntegerArray": IntegerArray,
}
_WORDS = {
    jax.Array: "jax.Array",
    np.ndarray: "np.ndarray",
    np.integer: "np.integer",
    types.NoneType: "None",
    Ellipsis: "...",
}
# The defaults of the fields of each `TypedDict`.
_DEFAULTS: dict[Any, dict[str, Any]] = {}


class _Shown:
    """A type that is shown as the given text in a signature."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shown) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def set_defaults(kind: Any, *sources: Callable[..., Any], **own: Any) -> None:
    """Set the defaults of a `TypedDict` from the parameters of functions."""
    found: dict[str, Any] = {}
    for source in sources:
        for name, parameter in inspect.signature(source).parameters.items():
            found[name] = parameter.default
    _DEFAULTS[kind] = {name: (found | own)[name] for name in kind.__annotations__}


def lists_arguments(function: Function) -> Function:
    """Set a function's signature with all fields listed."""
    return with_signature(function, function)


def with_signature(wrapper: Function, function: Callable[..., Any]) -> Function:
    """Set a wrapper's signature to the function's, with all fields listed."""
    wrapper.__signature__ = _show(inspect.signature(function))  # type: ignore[attr-defined]
    return wrapper


def _show(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with fields listed and unions named."""
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        hint = parameter.annotation
        if typing.get_origin(hint) is typing.Unpack:
            parameters += _list_fields(typing.get_args(hint)[0])
        else:
            parameters.append(parameter.replace(annotation=_shorten(hint)))
    result = _shorten(signature.return_annotation)
    return signature.replace(parameters=parameters, return_annotation=result)


def _list_fields(kind: Any) -> list[inspect.Parameter]:
    hints, defaults = kind.__annotations__, _DEFAULTS[kind]
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=_shorten(hint),
        )
        for name, hint in hints.items()
    ]


def _shorten(hint: Any) -> Any:
    """Return a displayed annotation; missing ones are unchanged."""
    if hint is None or hint is inspect.Parameter.empty:
        return hint
    return _Shown(_write(hint))


def _write(hint: Any) -> str:
    """Format a type with short names."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_list_members(inner))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if isinstance(hint, list):  # the arguments of a Callable
        return f"[{', '.join(map(_write, hint))}]"
    if hint in _WORDS:
        return _WORDS[hint]
    name = str(getattr(origin or hint, "__name__", hint))
    return f"{name}[{', '.join(map(_write, inner))}]" if inner else name


def _list_members(members: tuple[Any, ...]) -> list[str]:
    """Format the members of a union, with known unions by name."""
    left, found = list(members), []
    for name, union in _NAMED.items():
        named = typing.get_args(union)
        if all(member in left for member in named):
            left = [member for member in left if member not in named]
            found.append(name)
    return [*found, *map(_write, left)]
