"""Rules for loops, nested jaxprs, and operations without effect in a kernel."""

from types import SimpleNamespace
from typing import Any

from jax.extend.core import Literal

from jkv.attention.kernel.triton.text import Ref, Rule, Value, Writer


def _loop(w: Writer, equation: Any, *given: Any) -> list[Value]:
    body, num_consts = _find_counted(equation.params), equation.params["body_nconsts"]
    if body is None:
        return _write_while(w, equation.params, given)
    (first, end, *carried), consts = given[num_consts:], given[:num_consts]
    step, count = w.constant(1, end.type.element), w.name(end.type)
    inside, types = _enter(w, carried)
    text = f"scf.for {count.name} = {first.name} to {end.name} step {step.name}"
    if carried:
        text += f" iter_args({_pair(inside, carried)}) -> ({types})"
    made = w.open(f"{text} : {end.type} {{", [each.type for each in carried])
    found = [w.value(each) for each in w.walk(body, [*consts, count, *inside])]
    w.lines += [f"scf.yield {_list(found)}" if found else "scf.yield", "}"]
    return [end, end, *made]


def _find_counted(params: dict[str, Any]) -> SimpleNamespace | None:
    """Return the body of a counting loop without its counter, or None.

    The first two carried numbers are the counter and its end.
    """
    test, body = (params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
    num_consts = params["body_nconsts"]
    consts, (count, *carried) = body.invars[:num_consts], body.invars[num_consts:]
    if params["cond_nconsts"] or [e.primitive.name for e in test.eqns] != ["lt"]:
        return None
    if count.aval.dtype.kind != "i":
        return None
    if [*test.eqns[0].invars] != test.invars[:2] or carried[0] is not body.outvars[1]:
        return None
    for number, each in enumerate(body.eqns):
        if each.primitive.name == "add" and each.outvars[0] is body.outvars[0]:
            first, second = each.invars
            if first is count and isinstance(second, Literal) and second.val == 1:
                return SimpleNamespace(
                    invars=[*consts, count, *carried[1:]],
                    eqns=[*body.eqns[:number], *body.eqns[number + 1 :]],
                    outvars=body.outvars[2:],
                )
    return None


def _write_while(w: Writer, params: dict[str, Any], given: Any) -> list[Value]:
    """Emit a while loop that also carries its constants, refs as pointers."""
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    num_consts = of_test + of_body
    values = [each.pointer if isinstance(each, Ref) else each for each in given]

    def abstract_values(values: list[Value]) -> list[Any]:
        pairs = zip(given, values, strict=True)
        return [
            each._replace(pointer=value) if isinstance(each, Ref) else value
            for each, value in pairs
        ]

    inside, types = _enter(w, values)
    made = w.open(
        f"scf.while ({_pair(inside, values)}) : ({types}) -> ({types}) {{",
        [each.type for each in values],
    )
    abstract = abstract_values(inside)
    (goes_on,) = w.walk(
        params["cond_jaxpr"], abstract[:of_test] + abstract[num_consts:]
    )
    w.lines.append(f"scf.condition({goes_on.name}) {_list(inside)}")
    inside, _ = _enter(w, values)
    parameters = ", ".join(f"{each.name}: {each.type}" for each in inside)
    w.lines += ["} do {", f"^bb0({parameters}):"]
    found = map(
        w.value, w.walk(params["body_jaxpr"], abstract_values(inside)[of_test:])
    )
    w.lines += [f"scf.yield {_list([*inside[:num_consts], *found])}", "}"]
    return made[num_consts:]


def _enter(w: Writer, values: list[Value]) -> tuple[list[Value], str]:
    """Return names for a block's values, and their types as text."""
    names = [w.name(value.type) for value in values]
    return names, ", ".join(str(value.type) for value in values)


def _pair(names: list[Value], values: list[Value]) -> str:
    pairs = zip(names, values, strict=True)
    return ", ".join(f"{one.name} = {other.name}" for one, other in pairs)


def _list(values: list[Value]) -> str:
    names = ", ".join(value.name for value in values)
    return f"{names} : {', '.join(str(value.type) for value in values)}"


def _call(w: Writer, equation: Any, *operands: Any) -> list[Any]:
    return w.walk(equation.params["jaxpr"], operands)


def _pass(_: Writer, __: Any, x: Any) -> Any:
    """Return a value unchanged, as resharding has no effect inside a kernel."""
    return x


RULES: dict[str, Rule] = {"jit": _call, "reshard": _pass, "while": _loop}
