"""How the site reads the sources: examples are code, a field's comment describes it."""

import re
import textwrap
from typing import Any

import griffe

RETURNS = re.compile(r"^Returns:\n((?: +.*\n?|\n)+)", re.MULTILINE)


class Sources(griffe.Extension):
    """Put what the sources say into the words that Griffe looks for."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of examples; a paragraph before code ends in one colon."""
        if obj.docstring is not None:
            text = obj.docstring.value
            text = text.replace("\nExample:\n", "\nExamples:\n").replace("::\n", ":\n")
            obj.docstring.value = RETURNS.sub(write_returns, text)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Describe a field of a class by the comment beside it, or those above."""
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
    """Write what is returned as prose; Griffe would take its colons for types."""
    text = textwrap.dedent(found[1]).strip()
    listed = re.sub(r"^(\w+): ", r"* `\1`: ", text, flags=re.MULTILINE)
    return f"**Returns:**\n\n{listed}\n\n"
