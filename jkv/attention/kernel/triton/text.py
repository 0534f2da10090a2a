"""Triton's IR as text: typed values, and a writer of functions.

Text needs no bindings, which differ between versions of JAX's lowering, and omits
default attributes, which differ between revisions of Triton.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

Rule = Callable[..., Any]
# Primitives that emit their literals themselves; for others they are emitted before.
_LATE = {"get", "jit", "masked_load", "masked_swap", "reshard", "select_n", "swap"}
_FLOATS = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}


class Type(NamedTuple):
    """The type of a number or, with a shape, of a tile."""

    element: str  # "f32", "i1", "!tt.ptr<f32>"; integers are signless
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"tensor<{sizes}x{self.element}>" if sizes else self.element

    @property
    def is_float(self) -> bool:
        return self.element in _FLOATS

    @property
    def width(self) -> int:
        """Bits per number."""
        return int(re.sub(r"\D", "", self.element))


class Value(NamedTuple):
    """A result of an operation, or an argument of a block."""

    name: str  # "%12"
    type: Type


class Ref(NamedTuple):
    """An array in memory."""

    pointer: Value
    shape: tuple[int, ...]
    num_bytes: int
    starts: tuple[Value, ...]  # of the program's part; zeros, as it has the whole array


def element_of(dtype: Any) -> str:
    """Return Triton's name of a dtype, if kernels support it."""
    dtype = jnp.dtype(dtype)
    names = {jnp.dtype(each): name for name, each in _FLOATS.items()}
    if dtype.kind not in "biu" and dtype not in names:
        raise NotImplementedError(f"kernels do not compute with {dtype}")
    width = 1 if dtype == jnp.bool_ else 8 * dtype.itemsize
    return names.get(dtype, f"i{width}")


class Writer:
    """Writer of a function for one platform, by rules for the primitives of jaxprs."""

    def __init__(self, platform: str, rules: Mapping[str, Rule]) -> None:
        self.platform = platform  # "rocm" or "cuda"
        self.lines: list[str] = []
        self.programs: list[Value] = []  # program ids on the axes of the grid
        self._rules = rules
        self._count = itertools.count()

    def name(self, made: Type) -> Value:
        """Return a value with a new name."""
        return Value(f"%{next(self._count)}", made)

    def emit(self, text: str, made: Type) -> Value:
        """Emit an operation with one result."""
        value = self.name(made)
        self.lines.append(f"{value.name} = {text}")
        return value

    def open(self, text: str, types: Sequence[Type]) -> list[Value]:
        """Emit the first line of an operation with blocks; return its results."""
        name = f"%{next(self._count)}"
        self.lines.append(f"{name}:{len(types)} = {text}" if types else text)
        return [Value(f"{name}#{number}", each) for number, each in enumerate(types)]

    def constant(self, number: Any, element: str) -> Value:
        """Emit a constant; floats are exact."""
        if element in _FLOATS:
            bits = np.asarray(number, _FLOATS[element]).tobytes()[::-1]
            text = f"0x{bits.hex()} : {element}"
        elif element == "i1":
            text = "true" if number else "false"
        else:
            half = 1 << (Type(element).width - 1)
            text = f"{(int(number) + half) % (2 * half) - half} : {element}"
        return self.emit(f"arith.constant {text}", Type(element))

    def value(self, operand: Any) -> Any:
        """Return an operand, emitted as a constant if it is a literal."""
        if not isinstance(operand, Literal):
            return operand
        aval: Any = operand.aval
        return self.constant(operand.val, element_of(aval.dtype))

    def full(self, number: Any, made: Type) -> Value:
        """Emit a constant or, with a shape, a tile of it."""
        return self.broadcast(self.constant(number, made.element), made.shape)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Broadcast a value to a shape, with missing axes first."""
        if value.type.shape == shape:
            return value
        while 0 < len(value.type.shape) < len(shape):
            value = self.expand(value, 0)
        made = value.type._replace(shape=shape)
        operation = "broadcast" if value.type.shape else "splat"
        return self.emit(f"tt.{operation} {value.name} : {value.type} -> {made}", made)

    def expand(self, value: Value, axis: int) -> Value:
        """Insert an axis of size one into a tile."""
        sizes = value.type.shape
        made = value.type._replace(shape=(*sizes[:axis], 1, *sizes[axis:]))
        text = f"tt.expand_dims {value.name} {{axis = {axis} : i32}}"
        return self.emit(f"{text} : {value.type} -> {made}", made)

    def walk(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Emit the operations of a jaxpr; return its results.

        Raises:
          NotImplementedError: a primitive without a rule.
        """
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # may be closed before JAX 0.12
        known = dict(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            given = list(map(read, equation.invars))
            if equation.primitive.name not in _LATE:
                given = list(map(self.value, given))
            made = self._apply(equation, given)
            known.update(zip(equation.outvars, made, strict=True))
        return list(map(read, jaxpr.outvars))

    def _apply(self, equation: Any, given: list[Any]) -> list[Any]:
        """Emit an equation by its rule, and check the types of its results."""
        message = f"no rule brings {equation.primitive.name} to Triton"
        try:
            made = self._rules[equation.primitive.name](self, equation, *given)
        except (KeyError, TypeError, ValueError) as error:
            raise NotImplementedError(f"{message} ({error}): {equation}") from error
        made = made if equation.primitive.multiple_results else [made]
        for value, atom in zip(made, equation.outvars, strict=True):
            aval = atom.aval
            promised = Type(element_of(aval.dtype), aval.shape)
            if isinstance(value, Value) and value.type != promised:
                raise NotImplementedError(f"{message} (not {value.type}): {equation}")
        return made
