"""Loaded grammars of an engine, keyed by language.

A grammar stays in the catalog until its space is needed; grammars in use are never
evicted.
"""

from jkv.grammar import Catalog, CatalogFull, Grammar, Vocabulary

from ..asking.languages import Compiled, Language
from ..mistakes import Refused


class Entry:
    """A language in the catalog."""

    def __init__(self, variant: int, warnings: tuple[str, ...]) -> None:
        self.variant, self.warnings, self.num_held = variant, warnings, 0


class Languages:
    """Languages of an engine's catalog, evicted in LRU order. Not thread-safe.

    Attributes:
        most: maximum number of languages.
        grammar: the grammar of all loaded languages.
    """

    def __init__(self, vocabulary: Vocabulary, max_grammars: int) -> None:
        """Create an empty catalog."""
        self.vocabulary, self.most = vocabulary, max_grammars
        self._catalog = Catalog(vocabulary, max_grammars=max_grammars)
        self._entries: dict[Language, Entry] = {}  # in LRU order
        self.grammar: Grammar = self._catalog.grammar

    def find(self, language: Language) -> Entry | None:
        """Return a language's entry, or None; mark it as recently used."""
        entry = self._entries.pop(language, None)
        if entry is not None:
            self._entries[language] = entry
        return entry

    def add(self, language: Language, compiled: Compiled) -> Entry | None:
        """Add a language; return None if the catalog is full of grammars in use.

        Raises:
            Refused: if the grammar is larger than the catalog.
        """
        while True:
            try:
                variant = self._catalog.add(compiled.grammar)
                entry = Entry(variant, compiled.warnings)
            except CatalogFull:
                if not self._remove_oldest():
                    return None
            except ValueError as error:  # larger than the catalog
                raise Refused(f"{language.param}: {error}", language.param) from error
            else:
                self._entries[language] = entry
                self.grammar = self._catalog.grammar
                return entry

    def remove(self, language: Language) -> None:
        """Remove a language."""
        self._catalog.remove(self._entries.pop(language).variant)

    def _remove_oldest(self) -> bool:
        """Evict the least recently used grammar that no request holds."""
        for language, entry in self._entries.items():
            if not entry.num_held:
                self.remove(language)
                return True
        return False
