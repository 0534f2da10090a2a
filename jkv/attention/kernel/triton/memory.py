"""Rules for loads and stores, with addresses from the indices of refs.

Relies on Pallas' core for the primitives `get`, `swap`, `masked_load` and
`masked_swap`, the trees of their operands, and the shapes of their indices.
"""

import itertools
import math
import operator
from typing import Any

from jax.extend.core import Literal

from jkv.attention.kernel.triton.arithmetic import compute, convert
from jkv.attention.kernel.triton.text import Ref, Rule, Type, Value, Writer


def make_ref(w: Writer, pointer: Value, aval: Any) -> Ref:
    """Return a ref to a whole array, with starts of zero."""
    if aval.dtype == bool:  # a byte in memory, but a bit in registers
        raise NotImplementedError("kernels support no boolean operands")
    zeros = [w.constant(0, "i32") for _ in aval.shape]
    starts = tuple(
        compute(w, "mul", zero, w.constant(size, "i32"))
        for zero, size in zip(zeros, aval.shape, strict=True)
    )
    return Ref(pointer, aval.shape, aval.size * aval.dtype.itemsize, starts)


def _point(w: Writer, ref: Ref, index: Any) -> Value:
    """Emit the addresses of elements."""
    shape: tuple[int, ...] = index.get_indexer_shape_static()
    if shape != index.int_indexer_shape:
        raise ValueError("refs must be indexed by numbers and arrays, got a slice")
    if (size := math.prod(shape)) & (size - 1):
        raise ValueError(f"the size of a tile must be a power of two, got {shape}")
    made = Type("i64" if ref.num_bytes > 2**32 else "i32", shape)
    offsets = w.full(0, made)
    strides = itertools.accumulate(ref.shape[:0:-1], operator.mul, initial=1)
    axes = zip(index.indices, ref.starts, reversed([*strides]), strict=True)
    for number, start, stride in axes:
        if isinstance(number, Literal):
            number = w.constant(number.val, made.element)
        place, start = (
            w.broadcast(convert(w, each, made.element, signed=False), shape)
            for each in (number, start)
        )
        place = compute(w, "add", place, start)
        place = compute(w, "mul", place, w.full(stride, made))
        offsets = compute(w, "add", offsets, place)
    base = w.broadcast(ref.pointer, shape)
    text = f"tt.addptr {base.name}, {offsets.name} : {base.type}, {made}"
    return w.emit(text, base.type)


def _find(w: Writer, equation: Any, operands: Any) -> tuple[Value, list[Value]]:
    """Emit addresses; return them and the broadcast further operands."""
    params = equation.params
    if "args_tree" in params:  # value to store, mask, default of a load
        ref, (index,), *beside = params["args_tree"].unflatten(operands)
    else:
        count = 1 + (equation.primitive.name == "swap")
        (ref, *beside), rest = operands[:count], operands[count:]
        (index,) = params["tree"].unflatten(rest)
    pointers = _point(w, ref, index)
    shape = pointers.type.shape
    beside = [w.broadcast(w.value(x), shape) for x in beside if x is not None]
    return pointers, beside


def _read(w: Writer, pointers: Value, masks: list[Value], others: list[Value]) -> Value:
    element = pointers.type.element.removeprefix("!tt.ptr<").removesuffix(">")
    others = [convert(w, each, element, signed=False) for each in others]
    names = ", ".join(each.name for each in (pointers, *masks, *others))
    made = pointers.type._replace(element=element)
    return w.emit(f"tt.load {names} : {pointers.type}", made)


def _load(w: Writer, equation: Any, *operands: Any) -> Value:
    pointers, beside = _find(w, equation, operands)
    return _read(w, pointers, beside[:1], beside[1:])


def _store(w: Writer, equation: Any, *operands: Any) -> Value:
    """Emit a store, preceded by a load of the old contents, which is usually dead."""
    pointers, (value, *mask) = _find(w, equation, operands)
    before = _read(w, pointers, mask, [value] * len(mask))
    names = ", ".join(each.name for each in (pointers, value, *mask))
    w.lines.append(f"tt.store {names} : {pointers.type}")
    return before


RULES: dict[str, Rule] = {
    "get": _load,
    "masked_load": _load,
    "masked_swap": _store,
    "swap": _store,
}
