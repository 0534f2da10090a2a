"""What the texts of a request must be: JSON, JSON of a schema, a pattern, a choice.

A request names a language; its grammar is compiled when it is first named, and stays in
the engine's catalog while there is room. A grammar that a running request has is never
given up.
"""

import json
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from jkv.grammar import (
    Catalog,
    CatalogFull,
    Grammar,
    Vocabulary,
    from_choices,
    from_json_object,
    from_json_schema,
    from_regex,
)
from jkv.serving import Engine
from jkv.serving.request.limits import NOT_STEERED

from .mistakes import Refused

MOST_CHARACTERS = 2**16  # of what describes a language
MOST_BYTES = 2**25  # that its tables and its compiling take


class Language(NamedTuple):
    """A language that texts can be asked to be of."""

    kind: str  # a key of `_COMPILERS`
    text: str  # JSON of what describes it
    param: str  # the field that asks for it

    def compile(self, vocabulary: Vocabulary) -> Grammar:
        """Make its grammar.

        Raises:
            Refused: if there is none, or it takes too much.
        """
        make = _COMPILERS[self.kind]
        try:
            return make(json.loads(self.text), vocabulary, max_bytes=MOST_BYTES)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{self.param}: {error}", self.param) from error


_COMPILERS: dict[str, Any] = {
    "regex": from_regex,
    "choice": from_choices,
    "json": from_json_schema,
    "json_object": lambda _, *given, **bounds: from_json_object(*given, **bounds),
}


def read_language(body: Mapping[str, Any]) -> Language | None:
    """Return the language that a body asks for; None for any text.

    Raises:
        Refused: for what describes none, and for two.
    """
    found = [
        language
        for language in (
            _read_response_format(body.get("response_format")),
            _read_structured_outputs(body.get("structured_outputs")),
            *(_read_guided(body, kind) for kind in ("json", "regex", "choice")),
        )
        if language is not None
    ]
    if len(found) > 1:
        names = " and ".join(language.param for language in found)
        raise Refused(f"give one of {names}", found[1].param)
    return found[0] if found else None


def _read_response_format(given: Any) -> Language | None:
    name = "response_format"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise Refused(f"{name} must be an object with a type", name)
    kind = given.get("type")
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
    return _describe("json", described["schema"], name)


def _read_structured_outputs(given: Any) -> Language | None:
    name = "structured_outputs"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise Refused(f"{name} must be an object", name)
    asked = {key: value for key, value in given.items() if value not in (None, False)}
    if len(asked) != 1:
        raise Refused(f"{name} takes one of json, regex, choice, json_object", name)
    ((kind, value),) = asked.items()
    if kind not in _COMPILERS:
        raise Refused(
            f"{name}.{str(kind)[:60]} is not served; json, regex, choice and "
            f"json_object are",
            name,
            code="unsupported_parameter",
        )
    return _describe(kind, value, name)


def _read_guided(body: Mapping[str, Any], kind: str) -> Language | None:
    name = f"guided_{kind}"
    given = body.get(name)
    return None if given is None else _describe(kind, given, name)


def _describe(kind: str, value: Any, param: str) -> Language:
    """Return the language, if it is described by a value of the right type."""
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
    }
    if not is_right[kind]:
        words = {
            "regex": "a text",
            "choice": "a list of texts, one at least",
            "json": "a JSON schema, an object",
            "json_object": "true",
        }
        raise Refused(f"{param}: {kind} must be {words[kind]}", param)
    # The order of keys is that of the texts.
    text = json.dumps(value)
    if len(text) > MOST_CHARACTERS:
        raise Refused(
            f"{param} has {len(text)} characters, {MOST_CHARACTERS} are taken", param
        )
    return Language(kind, text, param)


class _Entry:
    """A language in the catalog."""

    def __init__(self, variant: int) -> None:
        self.variant, self.num_held = variant, 0


class Held:
    """A language that a request has, until it is released."""

    def __init__(self, languages: "Languages | None", entry: _Entry | None) -> None:
        self._languages, self._entry = languages, entry
        self.variant = NOT_STEERED if entry is None else entry.variant

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        entry, self._entry = self._entry, None
        if entry is not None and self._languages is not None:
            self._languages.give_back(entry)


class Languages:
    """The languages of an engine's catalog. All methods may be called by any thread."""

    def __init__(self, vocabulary: Vocabulary, max_grammars: int) -> None:
        """Make room for so many at one time."""
        self._vocabulary = vocabulary
        self._catalog = Catalog(vocabulary, max_grammars=max_grammars)
        self._entries: dict[Language, _Entry] = {}  # the one named last is last
        self._compiling, self._lock = threading.Lock(), threading.Lock()

    @property
    def grammar(self) -> Grammar:
        """All of them, for `Engine(steering=)`."""
        return self._catalog.grammar

    def hold(self, engine: Engine, language: Language) -> Held:
        """Compile a language if it is not there, and keep it until it is released.

        Raises:
            Refused: if there is no such language, or running requests have all room.
        """
        with self._compiling:
            found = self._find(language)
            if found is None:
                found = self._add(engine, language)
        return Held(self, found)

    def give_back(self, entry: _Entry) -> None:
        """Note that a request does not have it any more."""
        with self._lock:
            entry.num_held -= 1

    def _find(self, language: Language) -> _Entry | None:
        with self._lock:
            entry = self._entries.pop(language, None)
            if entry is not None:
                entry.num_held += 1
                self._entries[language] = entry
            return entry

    def _add(self, engine: Engine, language: Language) -> _Entry:
        grammar = language.compile(self._vocabulary)
        while True:
            try:
                entry = _Entry(self._catalog.add(grammar))
                break
            except CatalogFull as error:
                if not self._remove_oldest():
                    raise Refused(
                        "running requests have all room for grammars; try later",
                        language.param,
                        status=429,
                        headers={"Retry-After": "1"},
                    ) from error
            except ValueError as error:  # it is larger than the catalog
                raise Refused(f"{language.param}: {error}", language.param) from error
        try:
            engine.replace_steering(self._catalog.grammar)
        except BaseException:
            self._catalog.remove(entry.variant)
            raise
        entry.num_held = 1
        with self._lock:
            self._entries[language] = entry
        return entry

    def _remove_oldest(self) -> bool:
        """Give up the grammar that was named least recently, of those nobody has."""
        with self._lock:
            for language, entry in self._entries.items():
                if not entry.num_held:
                    del self._entries[language]
                    self._catalog.remove(entry.variant)
                    return True
        return False
