"""What public functions say of an argument that is of another kind than they ask for.

A call that is as it should be pays nothing: annotations are read when one has failed.
"""

import collections.abc
import dis
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.guards import explicit_transfers, refused_transfer
from jkv.signatures import with_signature
from jkv.status import CacheError, UsageError

Params = ParamSpec("Params")
Result = TypeVar("Result")
Class = TypeVar("Class")

NUMBERS: dict[Any, tuple[type, ...]] = {
    int: (int, np.integer),
    float: (int, float, np.integer, np.floating),
}
WORDS: dict[Any, str] = {
    int: "an int",
    float: "a number",
    bool: "a bool",
    str: "a str",
    type(None): "None",
    jax.Array: "an array",
    np.ndarray: "an array",
}
# Kinds of numbers in the notation of arrays.
KINDS: dict[Any, str] = {
    jnp.bool_: "bool",
    jnp.integer: "int32",
    jnp.floating: "float",
    jnp.number: "float32",
}
# What no protocol of ours is.
PLAIN = (str, bytes, complex, float, int, list, tuple, dict, set, type(None))
_RAISE = dis.opmap["RAISE_VARARGS"]
# Raised on purpose, with words of their own.
OWN_ERRORS = (UsageError, CacheError, NotImplementedError)


def expect(
    name: str,
    value: Any,
    axes: str,  # letters or numbers, "R H D"; "M E | E" for either, "N ..." for more
    sizes: Mapping[str, int] | None = None,  # of letters, as far as they are known
    kind: Any = None,  # of its numbers, one of `KINDS` or a dtype; None for any
    *,
    why: str = "",  # where the sizes come from, or what to do
) -> dict[str, int]:
    """Return the sizes of all letters of an array that has these axes.

    Raises:
      UsageError: for anything else, saying what it must be and what it is.
    """
    known = {} if sizes is None else dict(sizes)
    forms = [form.split() for form in axes.split("|")]
    found = find_kind(value)
    if found is not None and (kind is None or jnp.issubdtype(found[0], kind)):
        for form in forms:
            if (matched := _match(form, found[1], known)) is not None:
                return matched
    word = "" if kind is None else KINDS.get(kind) or jnp.dtype(kind).name
    expected = " or ".join(f"{word}[{', '.join(form)}]" for form in forms)
    named = [f"{each} = {known[each]}" for each in forms[0] if each in known]
    if named:
        expected += f" with {', '.join(named)}"
    if found is None:
        expected = f"an array, {expected}"
    why = f", {why}" if why else ""
    raise UsageError(f"{name} must be {expected}{why}, got {name_kind(value)}")


def _match(
    form: list[str], shape: tuple[int, ...], known: dict[str, int]
) -> dict[str, int] | None:
    """Return the sizes of letters, None where a shape does not have the form."""
    if form[-1:] == ["..."]:
        form = form[:-1]
        shape = shape[: len(form)]
    if len(shape) != len(form):
        return None
    sizes = dict(known)
    for axis, size in zip(form, shape, strict=True):
        wanted = int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
        if wanted != size:
            return None
    return sizes


def find_kind(value: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the dtype and shape of an array, None of anything else."""
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return value.dtype, value.shape
    return None


def name_kind(value: Any) -> str:
    """Return the dtype and shape of an array, else the name of a type."""
    kind = find_kind(value)
    return type(value).__name__ if kind is None else f"{kind[0]}{list(kind[1])}"


def explains_arguments(
    function: Callable[Params, Result],
) -> Callable[Params, Result]:
    """Make a public function name the argument that its annotations do not allow."""

    @functools.wraps(function)
    def explained(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            again = for_second_call(args, kwargs, error)
            if again is None:
                explain(function, args, kwargs, error)
                raise
        with explicit_transfers():
            return function(*again[0], **again[1])

    return with_signature(explained, function)


def explains_class(cls: type[Class]) -> type[Class]:
    """Make a class's constructor and methods do so; those that yield cannot."""
    for name, value in [*vars(cls).items()]:
        is_public = name == "__init__" or not name.startswith("_")
        if not is_public or not inspect.isfunction(value):
            continue
        if not inspect.isgeneratorfunction(value) and not inspect.isasyncgenfunction(
            value
        ):
            setattr(cls, name, explains_arguments(value))
    return cls


def for_second_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,  # of the first call
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments for a call where transfers are explicit, None for no call."""
    return (args, kwargs) if refused_transfer(error) else as_arrays(args, kwargs)


def as_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with what wraps an array (`nnx.Param`) as arrays, or None."""
    named = {name: as_array(value) for name, value in kwargs.items()}
    placed = tuple(map(as_array, args))
    pairs = zip([*placed, *named.values()], [*args, *kwargs.values()], strict=True)
    return (placed, named) if any(new is not old for new, old in pairs) else None


def as_array(value: Any) -> Any:
    """Return the array in what wraps one, anything else as it is."""
    wraps = hasattr(type(value), "__jax_array__") and not isinstance(value, jax.Array)
    return value.__jax_array__() if wraps else value


def explain(
    function: Callable[..., Any],  # that was called with these
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,  # that it raised
) -> None:
    """Raise a UsageError that names an argument which is not of its annotation's kind.

    What the package raised on purpose is left as it is.
    """
    if isinstance(error, OWN_ERRORS) or _is_on_purpose(error):
        return
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # the error is Python's own, about missing arguments
        return
    hints = typing.get_type_hints(function)
    for name in ("fields", "limits"):  # keyword arguments that a TypedDict names
        if typing.get_origin(hints.get(name)) is typing.Unpack:
            hints |= typing.get_type_hints(typing.get_args(hints.pop(name))[0])
            bound |= bound.pop(name, {})
    for name, value in bound.items():
        if name in hints and not fits(value, hints[name]):
            raise UsageError(
                f"{_name_of(function)}: {name} must be {_describe(hints[name])}, "
                f"got {_name(value)}"
            ) from error


def _name_of(function: Callable[..., Any]) -> str:
    """Return a function's name, of a constructor that of its class."""
    return function.__qualname__.removesuffix(".__init__")


def _is_on_purpose(error: Exception) -> bool:
    """Return True if a line of this package raised a ValueError, or its own error."""
    if type(error).__module__.startswith("jkv."):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or type(error) is not ValueError:
        return False
    module = str(trace.tb_frame.f_globals.get("__name__"))
    # Python's own functions, such as int(), have no frame: the line that called one
    # raised nothing itself.
    code = trace.tb_frame.f_code.co_code
    return module.startswith("jkv.") and code[trace.tb_lasti] == _RAISE


def fits(value: Any, hint: Any) -> bool:
    """Return whether an annotation allows a value; a protocol allows all."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is tuple:
        return _fits_tuple(value, inner)
    if origin is not None and issubclass(origin, collections.abc.Sequence):
        is_sequence = isinstance(value, origin) and not isinstance(value, str | bytes)
        return is_sequence and all(fits(item, inner[0]) for item in value)
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    kind = origin or hint
    if kind in (jax.Array, np.ndarray):
        return _is_array(value)
    is_checked = getattr(kind, "_is_runtime_protocol", False)
    if getattr(kind, "_is_protocol", False) and not is_checked:
        return not isinstance(value, PLAIN)
    return not isinstance(kind, type) or isinstance(value, kind)


def _fits_tuple(value: Any, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple | list):
        return False
    if len(inner) == 2 and inner[1] is Ellipsis:
        return all(fits(item, inner[0]) for item in value)
    return len(value) == len(inner) and all(map(fits, value, inner))


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numbers."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return is_array and not (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSU"
    )


def _describe(hint: Any) -> str:
    """Say what an annotation allows."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_describe, inner)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return "a tuple"
    if origin is not None and issubclass(origin, collections.abc.Sequence):
        return "a list"
    if (origin or hint) in WORDS:
        return WORDS[origin or hint]
    if isinstance(origin or hint, type) and issubclass(origin or hint, np.generic):
        return WORDS[int if issubclass(origin or hint, np.integer) else float]
    return str(getattr(hint, "__name__", hint))


def _name(value: Any) -> str:
    """Say what a value is."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{[*value.shape]}"
    return f"{type(value).__name__} {value!r}"[:80]
