"""Griffe extension: format example sections and attribute comments for the site."""

import re
import textwrap
from typing import Any

import griffe

RETURNS = re.compile(r"^Returns:\n((?: +.*\n?|\n)+)", re.MULTILINE)


class Sources(griffe.Extension):
    """Adapt jkv's docstring conventions to Griffe."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename example sections; reduce double colons before code to single ones."""
        if obj.docstring is not None:
            text = obj.docstring.value
            text = text.replace("\nExample:\n", "\nExamples:\n").replace("::\n", ":\n")
            obj.docstring.value = RETURNS.sub(write_returns, text)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Document a class attribute by its trailing comment, or the comments above."""
        if attr.docstring is not None or not attr.parent or not attr.parent.is_class:
            return
        lines = attr.lines_collection[attr.filepath]
        assert attr.lineno is not None
        words = [lines[attr.lineno - 1].partition("  # ")[2]]
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.strip().startswith("# "):
                break
            words.insert(0, line.strip().removeprefix("# "))
        if said := " ".join(words).strip():
            attr.docstring = griffe.Docstring(said, parent=attr)


def write_returns(found: re.Match[str]) -> str:
    """Format a returns section as prose; Griffe would parse its colons as types."""
    text = textwrap.dedent(found[1]).strip()
    listed = re.sub(r"^(\w+): ", r"* `\1`: ", text, flags=re.MULTILINE)
    return f"**Returns:**\n\n{listed}\n\n"
