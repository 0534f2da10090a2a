"""Compilation of a kernel to a Triton module, for XLA's custom call.

Uses from Pallas the result of `pallas_call`, which traces a kernel, and the jaxpr among
its parameters; `memory.py` lists the parts of Pallas' core in the jaxpr.
"""

from collections.abc import Callable
from typing import Any

import jax

from jkv.attention.kernel.triton import arithmetic, loops, memory
from jkv.attention.kernel.triton.text import Rule, Type, Value, Writer, element_of

TARGET = "__gpu$xla.gpu.triton"


def write_module(
    name: str,
    traced: Callable[..., Any],  # the result of `pallas_call`
    operands: list[jax.Array],
    platform: str,
    grid: tuple[int, int],
) -> str:
    """Return the Triton IR of a kernel for "rocm" or "cuda"."""
    (equation,) = jax.make_jaxpr(traced)(*operands).eqns
    jaxpr = equation.params["jaxpr"]
    types = [Type(f"!tt.ptr<{element_of(atom.aval.dtype)}>") for atom in jaxpr.invars]
    w = Writer(platform, _RULES)
    pointers = [w.name(each) for each in types]
    # On an axis with one program the id is a constant.
    w.programs = [
        w.constant(0, "i32")
        if size == 1
        else w.emit(f"tt.get_program_id {axis} : i32", Type("i32"))
        for axis, size in zip("xy", grid, strict=True)
    ]
    atoms = zip(pointers, jaxpr.invars, strict=True)
    w.walk(jaxpr, [memory.make_ref(w, pointer, atom.aval) for pointer, atom in atoms])
    parameters = ", ".join(
        f"{each.name}: {each.type} {{tt.divisibility = 32 : i32}}" for each in pointers
    )
    head = f"module @{name} {{\ntt.func public @{name}({parameters}) {{"
    return "\n".join([head, *w.lines, "tt.return\n}\n}"])


def _find_program(w: Writer, equation: Any) -> Value:
    return w.programs[equation.params["axis"]]


_RULES: dict[str, Rule] = {
    **arithmetic.RULES,
    **loops.RULES,
    **memory.RULES,
    "program_id": _find_program,
}
