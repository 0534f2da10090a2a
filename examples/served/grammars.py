"""The grammars of an engine, compiled when a request first names their language.

They stay in the engine's catalog while there is room. A grammar that a running request
has is never given up.
"""

import threading

from jkv.grammar import Catalog, CatalogFull, Grammar, Vocabulary
from jkv.serving import Engine
from jkv.serving.request.limits import NOT_STEERED

from .languages import Language
from .mistakes import Refused


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
