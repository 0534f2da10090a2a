"""The grammars of an engine, compiled when a request first names their language.

They stay in the engine's catalog while there is room. A grammar that a running request
has is never given up.
"""

import threading
from collections.abc import Callable

from jkv.grammar import Catalog, CatalogFull, Grammar, Vocabulary
from jkv.serving.request.ask import NOT_STEERED

from .languages import Language
from .mistakes import Refused


class _Entry:
    """A language in the catalog."""

    def __init__(self, variant: int) -> None:
        self.variant, self.num_held = variant, 0


class Held:
    """What steers a request, until it is released; nothing at first."""

    def __init__(
        self,
        variant: int = NOT_STEERED,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep a variant, and what gives it back."""
        self.variant, self._releases = variant, [release]

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        while self._releases:
            self._releases.pop()()


class Languages:
    """The languages of an engine's catalog.

    One thread may hold a language, and any thread release one, at a time.
    """

    def __init__(self, vocabulary: Vocabulary, max_grammars: int) -> None:
        """Make room for so many at one time."""
        self._vocabulary, self.most = vocabulary, max_grammars
        self._catalog = Catalog(vocabulary, max_grammars=max_grammars)
        self._entries: dict[Language, _Entry] = {}  # the one named last is last
        self._lock = threading.Lock()
        self.grammar: Grammar = self._catalog.grammar  # all that are there

    def hold(self, language: Language, replace: Callable[[], None]) -> Held:
        """Compile a language if it is not there, and keep it until it is released.

        Args:
            language: it.
            replace: called when `grammar` is another.

        Raises:
            Refused: if there is no such language, or running requests have all room.
        """
        entry = self._find(language) or self._add(language, replace)

        def release() -> None:
            with self._lock:
                entry.num_held -= 1

        return Held(entry.variant, release)

    def _find(self, language: Language) -> _Entry | None:
        with self._lock:
            entry = self._entries.pop(language, None)
            if entry is not None:
                entry.num_held += 1
                self._entries[language] = entry
            return entry

    def _add(self, language: Language, replace: Callable[[], None]) -> _Entry:
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
        self.grammar = self._catalog.grammar
        try:
            replace()
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
