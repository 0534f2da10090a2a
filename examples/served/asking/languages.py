"""Structured output: JSON, JSON schemas, regular expressions and choices."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jkv.grammar import (
    Grammar,
    Malformed,
    TooLarge,
    Unsupported,
    Vocabulary,
    find_refused_tools,
    from_choices,
    from_json_object,
    from_json_schema,
    from_regex,
    from_tools,
)

from ..mistakes import Refused
from ..values import refuse_unknown

# Fields that request structured output.
FIELDS = {"response_format", "structured_outputs", "tools"}
FIELDS |= {"guided_json", "guided_regex", "guided_choice"}

MOST_CHARACTERS = 2**16  # of a schema or pattern
MOST_BYTES = 2**26  # of a grammar's tables and their compilation
# Fractions of MOST_BYTES per tool, tried if all tools together need too much.
SHARES = (1, 4, 16, 64)


class Compiled(NamedTuple):
    """A compiled language."""

    grammar: Grammar
    warnings: tuple[str, ...] = ()  # for the client


class Language(NamedTuple):
    """Language for constrained decoding."""

    kind: str  # key of `_COMPILERS`
    text: str  # schema, pattern or choices as JSON
    param: str  # name of the requesting field

    def compile(self, vocabulary: Vocabulary) -> Compiled:
        """Compile the grammar.

        Raises:
            Refused: if the description is invalid or the grammar is too large.
        """
        make = _COMPILERS[self.kind]
        try:
            found = make(json.loads(self.text), vocabulary, max_bytes=MOST_BYTES)
            return found if isinstance(found, Compiled) else Compiled(found)
        except Exception as error:  # schemas fail in many ways
            words = str(error)
            if not isinstance(error, ValueError):
                words = f"it cannot be read ({type(error).__name__}: {words})"
            raise Refused(f"{self.param}: {words}", self.param) from error


def _compile_tools(
    described: Mapping[str, Any], vocabulary: Vocabulary, *, max_bytes: int
) -> Compiled:
    """Compile the grammar of tool calls.

    If no call is required, tools with unsupported or too large schemas accept any JSON
    object as arguments, unless they are strict.
    """
    options = {"vocabulary": vocabulary, "max_bytes": max_bytes, **described}
    try:
        return Compiled(from_tools(**options))
    except (Unsupported, TooLarge):
        if described["choice"] != "auto":
            raise
        for refused in _list_refused(described["tools"], max_bytes):
            warnings = tuple(
                f"the arguments of the tool {name} are any JSON object: {why}"
                for name, why in refused.items()
            )
            with contextlib.suppress(ValueError):
                return Compiled(
                    from_tools(**options, free_arguments=[*refused]), warnings
                )
        raise


def _list_refused(
    tools: Sequence[Mapping[str, Any]], max_bytes: int
) -> Iterator[Mapping[str, ValueError]]:
    """Yield sets of tools to exempt from their schemas, smallest sets first.

    The first set has the tools with unsupported schemas; later ones add the largest.
    """
    strict = {each["name"] for each in tools if each.get("strict")}
    known = frozenset[str]()
    for share in SHARES:
        refused = find_refused_tools(tools, max_bytes=max_bytes // share)
        if any(isinstance(each, Malformed) for each in refused.values()):
            return
        if {*refused} & strict:
            return
        if {*refused} != known:
            known = frozenset(refused)
            yield refused


_KINDS: dict[str, Any] = {  # by names of the API
    "regex": from_regex,
    "choice": from_choices,
    "json": from_json_schema,
    "json_object": lambda _, *given, **bounds: from_json_object(*given, **bounds),
}
_COMPILERS = _KINDS | {"tools": _compile_tools}


def read_language(
    body: Mapping[str, Any], calls: Language | None = None
) -> Language | None:
    """Return the language that a body requests; None for unconstrained output.

    Args:
        body: the fields.
        calls: the language of tool calls, if tools are enabled.

    Raises:
        Refused: for an invalid description, or more than one language.
    """
    answer = _read_response_format(body.get("response_format"))
    if calls is not None and answer is not None:
        calls, answer = _join(calls, answer), None
    found = [
        language
        for language in (
            calls,
            answer,
            _read_structured_outputs(body.get("structured_outputs")),
            *(_read_guided(body, kind) for kind in ("json", "regex", "choice")),
        )
        if language is not None
    ]
    if len(found) > 1:
        names = " and ".join(language.param for language in found)
        raise Refused(f"{names} exclude each other; send one of them", found[1].param)
    return found[0] if found else None


def _join(calls: Language, answer: Language) -> Language:
    """Return the language of completions that call tools or follow a schema.

    If a call is required, the schema is ignored.
    """
    described = json.loads(calls.text)
    is_schema = answer.kind == "json"
    schema = json.loads(answer.text) if is_schema else {"type": "object"}
    if described["choice"] != "auto":
        return calls
    return describe(calls.kind, {**described, "answer": schema}, calls.param)


def _read_response_format(given: Any) -> Language | None:
    name = "response_format"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise Refused(f"{name} must be an object with a type", name)
    kind = given.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    refuse_unknown(given, known, name)
    if kind == "text":
        return None
    if kind == "json_object":
        return Language("json_object", "{}", name)
    if kind != "json_schema":
        raise Refused(
            f"{name}.type must be text, json_object or json_schema, got "
            f"{str(kind)[:60]!r}",
            name,
        )
    described = given.get("json_schema")
    if not isinstance(described, Mapping) or "schema" not in described:
        raise Refused(f"{name}.json_schema must be an object with a schema", name)
    of_schema = {"name", "description", "schema", "strict"}
    refuse_unknown(described, of_schema, f"{name}.json_schema")
    return describe("json", described["schema"], name)


def _read_structured_outputs(given: Any) -> Language | None:
    name = "structured_outputs"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise Refused(f"{name} must be an object", name)
    options = {key: value for key, value in given.items() if value not in (None, False)}
    unknown = [key for key in options if key not in _KINDS]
    if unknown:
        raise Refused(
            f"{name}.{str(unknown[0])[:60]} is not supported; use json, regex, choice "
            f"or json_object",
            name,
            code="unsupported_parameter",
        )
    if len(options) != 1:
        raise Refused(
            f"{name} must have exactly one of json, regex, choice, json_object", name
        )
    ((kind, value),) = options.items()
    return describe(kind, value, name)


def _read_guided(body: Mapping[str, Any], kind: str) -> Language | None:
    name = f"guided_{kind}"
    given = body.get(name)
    return None if given is None else describe(kind, given, name)


def describe(kind: str, value: Any, param: str) -> Language:
    """Return a language.

    Args:
        kind: a key of `_COMPILERS`.
        value: the schema, pattern, choices or tools.
        param: the name of the requesting field.

    Raises:
        Refused: for a value of the wrong type, or one that is too long.
    """
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{param} is not JSON: {error}", param) from error
    is_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    is_right = {
        "regex": isinstance(value, str),
        "choice": is_texts and bool(value),
        "json": isinstance(value, Mapping | bool),
        "json_object": value is True,
        "tools": isinstance(value, Mapping),
    }
    if not is_right[kind]:
        words = {
            "regex": "a string",
            "choice": "a list of at least one string",
            "json": "a JSON schema, an object",
            "json_object": "true",
            "tools": "an object",
        }
        raise Refused(f"{param}: {kind} must be {words[kind]}", param)
    # Keys keep their order: generated objects have the same.
    text = json.dumps(value)
    if len(text) > MOST_CHARACTERS:
        raise Refused(
            f"{param} has {len(text)} characters, above the limit of {MOST_CHARACTERS}",
            param,
        )
    return Language(kind, text, param)
