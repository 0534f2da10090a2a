"""References to other places of a schema, by JSON pointers (RFC 6901)."""

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any

from jkv.grammar.errors import Unsupported


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a `$ref` names.

    Attributes:
      pointer: as written, "#/$defs/name".
    """

    pointer: str


def resolve(root: Any, pointer: str) -> Any:
    """Return the schema that a pointer names.

    Raises:
      Unsupported: it points to another document, or to nothing.
    """
    if pointer != "#" and not pointer.startswith("#/"):
        raise Unsupported(f"$ref {pointer!r}: only places of this schema, '#/...'")
    found = root
    for part in pointer.split("/")[1:]:
        key = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, Mapping) and key in found:
            found = found[key]
        else:
            raise Unsupported(f"$ref {pointer!r} points to nothing")
    return found
