"""How the site reads docstrings: what stands under "Example:" is code to show."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Give the examples the title under which Griffe looks for code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Rename the section of one object's docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")
