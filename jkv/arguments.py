"""Arguments of public functions: checks against annotations and axes; integers.

Valid calls have no overhead: annotations are only read after an exception.

`jax.transfer_guard("disallow")` detects implicit transfers. Functions of this package
transfer numbers, lists and numpy arrays intentionally, so they do it explicitly, as
`jax.device_put` does (`explicit_transfers`). The guard "disallow_explicit" is
respected.
"""

import collections.abc
import contextlib
import dis
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.signatures import Integer, Integers, with_signature
from jkv.status import CacheError, UsageError

Params = ParamSpec("Params")
Result = TypeVar("Result")
Class = TypeVar("Class")

GUARDS = {
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
}

I32 = np.iinfo(np.int32)

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


def refused_transfer(error: Exception) -> bool:
    """Return True if a guard against implicit transfers raised the error."""
    is_guard = "Disallowed" in str(error) and "transfer" in str(error)
    return is_guard and any(_level(name) == "disallow" for name in GUARDS)


@contextlib.contextmanager
def explicit_transfers() -> Iterator[None]:
    """Allow transfers in this thread unless a guard disallows explicit ones."""
    with contextlib.ExitStack() as allowed:
        for name, guard in GUARDS.items():
            if _level(name) == "disallow":
                allowed.enter_context(guard("allow"))
        yield


def _level(name: str) -> str | None:
    """Return the level of a guard in this thread."""
    level: str | None = getattr(jax.config, name)
    return level


def as_index(value: Integer) -> jax.Array:
    """Return an index or count as i32[], saturated; ints stay on the host."""
    if isinstance(value, jax.Array):
        return value if value.dtype == jnp.int32 else saturated("a number", value)
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"expected an integer, got {value!r}") from None
    return np.int32(max(I32.min, min(number, I32.max)))  # type: ignore[return-value]


def saturated(name: str, value: Integers) -> jax.Array:
    """Return an i32 array of zero or one axis; concrete host values stay in numpy."""
    if hasattr(value, "seq_ids"):
        raise UsageError(
            f"{name} must be integers, got a whole {type(value).__name__}; pass one of "
            f"its fields, such as its seq_ids"
        )
    on_host = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    array: Any = np.asarray(value) if on_host else jnp.asarray(value)
    xp = namespace_of(array)
    if array.shape == (0,):
        array = xp.zeros((0,), np.int32)  # an empty list has no integer dtype
    check_fixed(name, array)
    if array.ndim > 1 or not xp.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be an int or a one-dimensional integer array, got "
            f"{array.dtype}{list(array.shape)}"
        )
    if array.dtype != np.int32:
        if np.iinfo(array.dtype).max > I32.max:
            low = max(I32.min, np.iinfo(array.dtype).min)
            bounds = (array.dtype.type(bound) for bound in (low, I32.max))
            array = xp.clip(array, *bounds)
        array = xp.asarray(array, np.int32)
    return array


def check_fixed(name: str, array: Any) -> None:
    """Refuse a symbolic size of `jax.export`."""
    if not all(isinstance(size, int) for size in array.shape):
        raise UsageError(
            f"{name} must have a fixed number of requests, got the "
            f"symbolic shape {array.shape}; export for the largest number, and pad "
            f"with -1"
        )


def namespace_of(array: Any) -> Any:
    """Return jnp for JAX arrays, else numpy."""
    return jnp if isinstance(array, jax.Array) else np
