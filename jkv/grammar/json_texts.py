"""Grammars of JSON: of a schema, of any object, of calls of tools."""

from collections.abc import Mapping
from typing import Any

from jkv.grammar.bounds import Bounds
from jkv.grammar.grammar import Grammar
from jkv.grammar.kept_files import Folder, keep
from jkv.grammar.languages import MAX_BYTES, compile_expression
from jkv.grammar.schema.compilation import Reading, compile_schema
from jkv.grammar.vocabulary import Vocabulary

WHITESPACE = "[ ]?"
DEPTH, RECURSION = 3, 2


def from_json_schema(
    schema: Mapping[str, Any] | bool,
    vocabulary: Vocabulary,
    *,
    whitespace: str = WHITESPACE,
    depth: int = DEPTH,
    recursion: int = RECURSION,
    strict: bool = False,
    max_bytes: int = MAX_BYTES,
    timeout: float | None = None,
    folder: Folder = None,
) -> Grammar:
    """Make a grammar whose texts are the JSON values that a schema describes.

    Properties stand in the order in which the schema names them. What a schema leaves
    open is left out: an object has no properties and a tuple no items but those that
    the schema speaks of. The page on grammars lists the keywords that are served,
    ignored and refused.

    Args:
      schema: of JSON Schema, draft 2020-12, with what older drafts wrote otherwise.
      vocabulary: of the model.
      whitespace: pattern of what may stand around brackets, commas and colons; once at
        each place. None stands before the value or behind it.
      depth: levels of arrays and objects in a value of which the schema says nothing.
      recursion: how often a schema that refers to itself may stand in itself; less
        often where that takes more than some 16,000 states.
      strict: whether keywords and formats that JSON Schema does not define are errors;
        they are ignored otherwise, as the standard says.
      max_bytes: of the tables, and of the memory that compiling takes beside the
        vocabulary's own; steps are bounded in proportion.
      timeout: seconds that compiling may take; None for any time.
      folder: where compiled grammars are kept and found again; None for nowhere.

    Raises:
      Unsupported: a keyword that is not served, or has a value that it cannot have,
        with its place in the schema (a ValueError).
      NoText: no value is valid, or the vocabulary spells none (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded, or the schema is nested too deeply
        (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_json_schema
      >>> tokens = [bytes([byte]) for byte in range(128)]
      >>> vocabulary = Vocabulary([*tokens, None], end_tokens=[128])
      >>> schema = {"type": "array", "items": {"enum": ["yes", "no"]}, "maxItems": 2}
      >>> from_json_schema(schema, vocabulary, whitespace="").num_states
      16
    """

    def make() -> Grammar:
        bounds = Bounds(max_bytes, timeout)
        texts = compile_schema(schema, reading, bounds)
        return compile_expression(texts, vocabulary, bounds)

    reading = Reading(whitespace, depth, recursion, strict)
    return keep(folder, vocabulary, ["schema", schema, *reading], make)


def from_json_object(
    vocabulary: Vocabulary,
    *,
    whitespace: str = WHITESPACE,
    depth: int = DEPTH,
    max_bytes: int = MAX_BYTES,
    timeout: float | None = None,
    folder: Folder = None,
) -> Grammar:
    """Make a grammar whose texts are any JSON object.

    Args:
      vocabulary: of the model.
      whitespace: as `from_json_schema` has it.
      depth: levels of arrays and objects inside of the object.
      max_bytes: as `from_json_schema` has it.
      timeout: as `from_json_schema` has it.
      folder: as `from_json_schema` has it.

    Raises:
      NoText: the vocabulary spells no object (a ValueError).
      TooLarge: `max_bytes` is exceeded (a ValueError).
    """
    return from_json_schema(
        {"type": "object"},
        vocabulary,
        whitespace=whitespace,
        depth=depth,
        max_bytes=max_bytes,
        timeout=timeout,
        folder=folder,
    )
