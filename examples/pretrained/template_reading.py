"""Static analysis of a chat template: the accepted form of a message's content.

Most templates write the content as a string, multimodal ones iterate over its parts,
and some test its type. Some test for null; others would write "None".
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

CONTENT = "content"
# Tests that distinguish a string from parts.
KIND_TESTS = ("string", "iterable", "sequence", "mapping")
# Filters over the parts of a message, and filters that accept null.
PART_FILTERS = ("selectattr", "rejectattr", "map", "groupby")
NULL_FILTERS = ("tojson", "default", "d")


class Form(NamedTuple):
    """The form of message content that a template accepts."""

    takes_parts: bool  # only a list of parts, no string
    takes_null: bool  # null instead of an empty string


@functools.lru_cache(maxsize=16)
def read_form(source: str, environment: Any) -> Form:
    """Return the form of message content that a template accepts."""
    from jinja2 import nodes

    tree = environment.parse(source)
    names = _find_names(tree, nodes)

    def is_content(node: Any) -> bool:
        return _is_content(node, names, nodes)

    tests = [each for each in tree.find_all(nodes.Test) if is_content(each.node)]
    compared = [
        {type(operand.expr), getattr(operand.expr, "value", "")}
        for each in tree.find_all(nodes.Compare)
        if is_content(each.expr)
        for operand in each.ops
    ]
    tests_null = any(test.name == "none" for test in tests)
    tests_null |= any({nodes.Const, None} == each for each in compared)
    distinguishes_kinds = any(test.name in KIND_TESTS for test in tests)
    goes_through = any(map(is_content, _find_parted(tree, nodes)))
    writes = any(map(is_content, _find_written(tree, nodes)))
    return Form(
        takes_parts=goes_through and not distinguishes_kinds,
        takes_null=tests_null or not (writes or goes_through),
    )


def _is_content(node: Any, names: set[str], nodes: Any) -> bool:
    """True if an expression is a message's content or a variable with it."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == CONTENT)
    is_item = isinstance(node, nodes.Getitem)
    return is_item and getattr(node.arg, "value", None) == CONTENT


def _find_names(tree: Any, nodes: Any) -> set[str]:
    """Return the variables that hold a message's content."""
    names = {CONTENT}
    for _ in range(3):  # follow chains of assignments
        for each in tree.find_all(nodes.Assign):
            if _is_content(each.node, names, nodes):
                names |= {name.name for name in _find_targets(each.target, nodes)}
        macros = {each.name: each.args for each in tree.find_all(nodes.Macro)}
        for call in tree.find_all(nodes.Call):
            arguments = macros.get(getattr(call.node, "name", ""), ())
            for given, taken in zip(call.args, arguments, strict=False):
                if _is_content(given, names, nodes):
                    names.add(taken.name)
    return names


def _find_targets(target: Any, nodes: Any) -> Iterator[Any]:
    if isinstance(target, nodes.Name):
        yield target
    yield from target.find_all(nodes.Name)


def _find_parted(tree: Any, nodes: Any) -> Iterator[Any]:
    """Yield the expressions that a template iterates over or indexes."""
    for loop in tree.find_all(nodes.For):
        node = loop.iter
        while isinstance(node, nodes.Filter):
            node = node.node
        yield node
    for each in tree.find_all(nodes.Filter):
        if each.name in PART_FILTERS:
            yield each.node
    # Access to the first part, as in content[0].text.
    for each in tree.find_all((nodes.Getattr, nodes.Getitem)):
        inner = each.node
        name = getattr(each, "attr", None) or getattr(
            getattr(each, "arg", None), "value", None
        )
        if isinstance(inner, nodes.Getitem) and name in ("text", "type"):
            yield inner.node


def _find_written(tree: Any, nodes: Any) -> Iterator[Any]:
    """Yield the expressions that a template writes or uses as strings."""
    for each in tree.find_all(nodes.Output):
        yield from each.nodes
    for each in tree.find_all(nodes.Filter):
        if each.name not in NULL_FILTERS:
            yield each.node
    for each in tree.find_all(nodes.BinExpr):
        if not isinstance(each, nodes.And | nodes.Or):
            yield from (each.left, each.right)
    for each in tree.find_all(nodes.Concat):
        yield from each.nodes
    for each in tree.find_all((nodes.Getattr, nodes.Getitem)):
        yield each.node
    for each in tree.find_all(nodes.Compare):
        yield from (each.ops[0].expr, *(operand.expr for operand in each.ops[1:]))
