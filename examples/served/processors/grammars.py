"""The grammars that are in an engine, as requests name their languages.

They stay in the engine's catalog while there is room. A grammar that a request has is
never given up.
"""

from jkv.grammar import Catalog, CatalogFull, Grammar, Vocabulary

from ..asking.languages import Compiled, Language
from ..mistakes import Refused


class Entry:
    """A language in the catalog."""

    def __init__(self, variant: int, told: tuple[str, ...]) -> None:
        self.variant, self.told, self.num_held = variant, told, 0


class Languages:
    """The languages of an engine's catalog. One thread may call the methods at a time.

    Attributes:
        most: languages at one time.
        grammar: all that are there.
    """

    def __init__(self, vocabulary: Vocabulary, max_grammars: int) -> None:
        """Make room for so many at one time."""
        self.vocabulary, self.most = vocabulary, max_grammars
        self._catalog = Catalog(vocabulary, max_grammars=max_grammars)
        self._entries: dict[Language, Entry] = {}  # the one named last is last
        self.grammar: Grammar = self._catalog.grammar

    def find(self, language: Language) -> Entry | None:
        """Return a language's entry; None where it is not there."""
        entry = self._entries.pop(language, None)
        if entry is not None:
            self._entries[language] = entry
        return entry

    def add(self, language: Language, compiled: Compiled) -> Entry | None:
        """Take a language in; None where requests have all the room.

        Raises:
            Refused: if it needs more room than there is.
        """
        while True:
            try:
                variant = self._catalog.add(compiled.grammar)
                entry = Entry(variant, compiled.told)
            except CatalogFull:
                if not self._remove_oldest():
                    return None
            except ValueError as error:  # it is larger than the catalog
                raise Refused(f"{language.param}: {error}", language.param) from error
            else:
                self._entries[language] = entry
                self.grammar = self._catalog.grammar
                return entry

    def remove(self, language: Language) -> None:
        """Give a language up."""
        self._catalog.remove(self._entries.pop(language).variant)

    def _remove_oldest(self) -> bool:
        """Remove the least recently used of the grammars that no request holds."""
        for language, entry in self._entries.items():
            if not entry.num_held:
                self.remove(language)
                return True
        return False
