"""Rules for elementwise operations, conversions, shapes, products and reductions."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel.triton.text import Rule, Type, Value, Writer, element_of

# Names of operations for signed integers, unsigned integers and floats.
_OPERATIONS = {
    "add": ("addi", "addi", "addf"),
    "sub": ("subi", "subi", "subf"),
    "mul": ("muli", "muli", "mulf"),
    "div": ("divsi", "divui", "divf"),
    "rem": ("remsi", "remui", "remf"),
    "max": ("maxsi", "maxui", "maxnumf"),
    "min": ("minsi", "minui", "minnumf"),
    "and": ("andi", "andi"),
    "or": ("ori", "ori"),
    "xor": ("xori", "xori"),
    "shift_left": ("shli", "shli"),
    "shift_right_arithmetic": ("shrsi", "shrsi"),
    "shift_right_logical": ("shrui", "shrui"),
    "eq": ("cmpi eq,", "cmpi eq,", "cmpf oeq,"),
    "ne": ("cmpi ne,", "cmpi ne,", "cmpf une,"),
    "lt": ("cmpi slt,", "cmpi ult,", "cmpf olt,"),
    "le": ("cmpi sle,", "cmpi ule,", "cmpf ole,"),
    "gt": ("cmpi sgt,", "cmpi ugt,", "cmpf ogt,"),
    "ge": ("cmpi sge,", "cmpi uge,", "cmpf oge,"),
}
_REDUCTIONS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}
# Functions of float32 in the device libraries.
_FUNCTIONS = {"abs": "fabs", "exp2": "exp2", "log": "log", "log2": "log2"}
_SYMBOLS = {"cuda": "__nv_{}f", "rocm": "__ocml_{}_f32"}
_PRECISIONS = {
    (lax.Precision.HIGHEST, lax.Precision.HIGHEST): "",
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3: ", inputPrecision = tf32x3",
}


def compute(w: Writer, name: str, x: Value, y: Value, *, signed: bool = True) -> Value:
    """Emit an operation on two values of one type."""
    assert x.type == y.type, (name, x, y)
    operation = _OPERATIONS[name][2 if x.type.is_float else 0 if signed else 1]
    made = x.type._replace(element="i1") if operation.startswith("cmp") else x.type
    return w.emit(f"arith.{operation} {x.name}, {y.name} : {x.type}", made)


def _is_signed(equation: Any) -> bool:
    return bool(jnp.issubdtype(equation.invars[0].aval.dtype, jnp.signedinteger))


def _compute(w: Writer, equation: Any, *given: Value, name: str) -> Value:
    shape = equation.outvars[0].aval.shape
    x, y = (w.broadcast(each, shape) for each in given)
    return compute(w, name, x, y, signed=_is_signed(equation))


def _call(w: Writer, equation: Any, x: Value, *, name: str) -> Value:
    if x.type.element != "f32":
        raise ValueError(f"only of float32: {equation}")
    symbol = _SYMBOLS[w.platform].format(_FUNCTIONS[name])
    attributes = f'libname = "", libpath = "", pure = true, symbol = "{symbol}"'
    text = f"tt.extern_elementwise {x.name} {{{attributes}}}"
    return w.emit(f"{text} : ({x.type}) -> {x.type}", x.type)


def convert(w: Writer, x: Value, element: str, *, signed: bool) -> Value:
    """Emit a conversion; `signed` applies to integers."""
    before, after = x.type, x.type._replace(element=element)
    if before == after:
        return x
    if before.is_float and not after.is_float:
        raise ValueError(f"no conversion from {before.element} to {element}")
    if before.is_float and "f32" not in (before.element, element):
        return convert(w, convert(w, x, "f32", signed=signed), element, signed=signed)
    has_sign, is_wider = signed and before.width > 1, before.width < after.width
    if before.is_float:
        operation = "extf" if is_wider else "truncf"
    elif after.is_float:
        operation = "sitofp" if has_sign else "uitofp"
    else:
        operation = ("extsi" if has_sign else "extui") if is_wider else "trunci"
    return w.emit(f"arith.{operation} {x.name} : {before} to {after}", after)


def _convert(w: Writer, equation: Any, x: Value) -> Value:
    element = element_of(equation.params["new_dtype"])
    return convert(w, x, element, signed=_is_signed(equation))


def _take_bits(w: Writer, equation: Any, x: Value) -> Value:
    made = x.type._replace(element=element_of(equation.params["new_dtype"]))
    return w.emit(f"tt.bitcast {x.name} : {x.type} -> {made}", made)


def _negate(w: Writer, _: Any, x: Value) -> Value:
    return compute(w, "sub", w.full(0, x.type), x)


def _find_sign(w: Writer, equation: Any, x: Value) -> Value:
    """Emit the sign of integers."""
    if x.type.is_float:
        raise ValueError(f"only of integers: {equation}")
    signs = []
    for name in ("gt", "lt"):
        zeros = w.full(0, x.type)
        is_so = compute(w, name, x, zeros, signed=_is_signed(equation))
        signs.append(convert(w, is_so, x.type.element, signed=False))
    return compute(w, "sub", *signs)


def _select(w: Writer, equation: Any, which: Value, x: Any, y: Any) -> Value:
    shape = equation.outvars[0].aval.shape
    of_x = w.value(x)
    which, of_x = (w.broadcast(each, shape) for each in (which, of_x))
    of_y = w.broadcast(w.value(y), shape)
    types = f"{which.type}, {of_x.type}" if shape else of_x.type
    text = f"arith.select {which.name}, {of_y.name}, {of_x.name} : {types}"
    return w.emit(text, of_x.type)


def _broadcast(w: Writer, equation: Any, x: Value) -> Value:
    shape = equation.params["shape"]
    axes = equation.params.get("broadcast_dimensions")  # default: trailing axes
    if x.type.shape and axes is not None:
        for axis in {*range(len(shape))} - {*axes}:
            x = w.expand(x, axis)
    return w.broadcast(x, shape)


def _count_up(w: Writer, equation: Any) -> Value:
    shape, axis = equation.params["shape"], equation.params["dimension"]
    made = Type("i32", (shape[axis],))
    text = f"tt.make_range {{end = {shape[axis]} : i32, start = 0 : i32}} : {made}"
    value = w.emit(text, made)
    value = convert(w, value, element_of(equation.params["dtype"]), signed=True)
    for other in {*range(len(shape))} - {axis}:
        value = w.expand(value, other)
    return w.broadcast(value, shape)


def _reshape(w: Writer, equation: Any, x: Value) -> Value:
    shape = equation.outvars[0].aval.shape
    if shape:
        return _shape(w, x, shape)
    (_,) = x.type.shape  # a scalar is the reduction of a tile of one element
    return _reduce(w, x, 0, "or" if x.type.element == "i1" else "add")


def _shape(w: Writer, x: Value, shape: tuple[int, ...]) -> Value:
    made = x.type._replace(shape=shape)
    return w.emit(f"tt.reshape {x.name} : {x.type} -> {made}", made)


def _join(w: Writer, equation: Any, *columns: Value) -> Value:
    """Emit a concatenation of two columns of one element."""
    shape = equation.outvars[0].aval.shape
    x, y = (_shape(w, each, shape[:-1]) for each in columns)
    made = x.type._replace(shape=shape)
    return w.emit(f"tt.join {x.name}, {y.name} : {x.type} -> {made}", made)


def _transpose(w: Writer, x: Value) -> Value:
    made = x.type._replace(shape=x.type.shape[::-1])
    text = f"tt.trans {x.name} {{order = array<i32: 1, 0>}} : {x.type} -> {made}"
    return w.emit(text, made)


def _multiply(w: Writer, equation: Any, x: Value, y: Value) -> Value:
    """Emit a matrix product accumulated in float32."""
    ((x_axis,), (y_axis,)), _ = equation.params["dimension_numbers"]
    precision = _PRECISIONS[equation.params["precision"]]
    x = _transpose(w, x) if x_axis == 0 else x
    y = _transpose(w, y) if y_axis == 1 else y
    sums = w.full(0, Type("f32", equation.outvars[0].aval.shape))
    text = f"tt.dot {x.name}, {y.name}, {sums.name}{precision}"
    return w.emit(f"{text} : {x.type} * {y.type} -> {sums.type}", sums.type)


def _reduce(w: Writer, x: Value, axis: int, name: str) -> Value:
    sizes, number = x.type.shape, Type(x.type.element)
    made = x.type._replace(shape=sizes[:axis] + sizes[axis + 1 :])
    (value,) = w.open(f'"tt.reduce"({x.name}) <{{axis = {axis} : i32}}> ({{', [made])
    one, other = w.name(number), w.name(number)
    w.lines.append(f"^bb0({one.name}: {number}, {other.name}: {number}):")
    joined = compute(w, name, one, other)
    w.lines.append(f"tt.reduce.return {joined.name} : {number}")
    w.lines.append(f"}}) : ({x.type}) -> {made}")
    return value


def _reduce_axis(w: Writer, equation: Any, x: Value, *, name: str) -> Value:
    (axis,) = equation.params["axes"]
    return _reduce(w, x, axis, _REDUCTIONS[name])


def _name_each(rule: Rule, names: Any) -> dict[str, Rule]:
    return {name: functools.partial(rule, name=name) for name in names}


RULES: dict[str, Rule] = {
    **_name_each(_compute, _OPERATIONS),
    **_name_each(_call, _FUNCTIONS),
    **_name_each(_reduce_axis, _REDUCTIONS),
    "bitcast_convert_type": _take_bits,
    "broadcast_in_dim": _broadcast,
    "broadcast_to": _broadcast,
    "concatenate": _join,
    "convert_element_type": _convert,
    "dot_general": _multiply,
    "iota": _count_up,
    "neg": _negate,
    "reshape": _reshape,
    "select_n": _select,
    "sign": _find_sign,
    "squeeze": _reshape,
}
