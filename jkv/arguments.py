"""Checks of the arguments of public functions against their annotations.

Valid calls have no overhead: annotations are only read after an exception.
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
# Notation of dtypes in messages.
KINDS: dict[Any, str] = {
    jnp.bool_: "bool",
    jnp.integer: "int32",
    jnp.floating: "float",
    jnp.number: "float32",
}
# Types that implement none of our protocols.
PLAIN = (str, bytes, complex, float, int, list, tuple, dict, set, type(None))
_RAISE = dis.opmap["RAISE_VARARGS"]
# Errors with their own explanation, which are passed on.
OWN_ERRORS = (UsageError, CacheError, NotImplementedError)


def expect(
    name: str,
    value: Any,
    axes: str,  # letters or numbers, "R H D"; "M E | E" for alternatives, "N ..."
    sizes: Mapping[str, int] | None = None,  # known sizes of letters
    kind: Any = None,  # dtype or abstract dtype (`KINDS`); None for any
    *,
    why: str = "",  # origin of the sizes, or advice
) -> dict[str, int]:
    """Check the axes of an array and return the sizes of all letters.

    Raises:
      UsageError: not an array, or one of other axes or dtype.
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
    """Return the sizes of all letters, None if the shape does not match the form."""
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
    """Return the dtype and shape of an array, None for other values."""
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return value.dtype, value.shape
    return None


def name_kind(value: Any) -> str:
    """Return the dtype and shape of an array, or the name of a value's type."""
    kind = find_kind(value)
    return type(value).__name__ if kind is None else f"{kind[0]}{list(kind[1])}"


def explains_arguments(
    function: Callable[Params, Result],
) -> Callable[Params, Result]:
    """Decorate a public function to report arguments of wrong types by name."""

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
    """Apply `explains_arguments` to a class's public methods except generators."""
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
    """Return arguments to retry a call with explicit transfers, or None."""
    return (args, kwargs) if refused_transfer(error) else as_arrays(args, kwargs)


def as_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Unwrap array wrappers (`nnx.Param`) in arguments; None if there are none."""
    named = {name: as_array(value) for name, value in kwargs.items()}
    placed = tuple(map(as_array, args))
    pairs = zip([*placed, *named.values()], [*args, *kwargs.values()], strict=True)
    return (placed, named) if any(new is not old for new, old in pairs) else None


def as_array(value: Any) -> Any:
    """Return the array in an array wrapper, other values unchanged."""
    wraps = hasattr(type(value), "__jax_array__") and not isinstance(value, jax.Array)
    return value.__jax_array__() if wraps else value


def explain(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,  # raised by `function(*args, **kwargs)`
) -> None:
    """Raise a UsageError for an argument that does not match its annotation.

    Returns without one for errors that the package raised on purpose.
    """
    if isinstance(error, OWN_ERRORS) or _is_on_purpose(error):
        return
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # missing arguments, which Python reports
        return
    hints = typing.get_type_hints(function)
    for name in ("fields", "limits"):  # keyword arguments of a TypedDict
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
    """Return the name of a function, or of a constructor's class."""
    return function.__qualname__.removesuffix(".__init__")


def _is_on_purpose(error: Exception) -> bool:
    """Return True for our own errors, and for a ValueError raised in this package."""
    if type(error).__module__.startswith("jkv."):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or type(error) is not ValueError:
        return False
    module = str(trace.tb_frame.f_globals.get("__name__"))
    # Builtins such as int() have no frame, so check that the line itself raises.
    code = trace.tb_frame.f_code.co_code
    return module.startswith("jkv.") and code[trace.tb_lasti] == _RAISE


def fits(value: Any, hint: Any) -> bool:
    """Return True if an annotation allows a value; unchecked protocols allow all."""
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
    """Return True for numeric arrays."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return is_array and not (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSU"
    )


def _describe(hint: Any) -> str:
    """Describe an annotation in words."""
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
    """Describe a value: dtype and shape of an array, else type and contents."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{[*value.shape]}"
    return f"{type(value).__name__} {value!r}"[:80]
