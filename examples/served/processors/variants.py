"""Assignment of logits processors to requests.

A variant is a grammar, or a row of rules with an optional grammar. Variants change
while the engine runs; a request waits if there is no capacity for its variant.
"""

import threading
import time
from collections.abc import Callable

import numpy as np

from jkv.logits_processors import LogitsProcessor, chain, renumber
from jkv.serving import Engine, Request

from ..asking.languages import Compiled, Language
from ..mistakes import Refused
from .compiling import Compilers
from .grammars import Entry, Languages
from .rule_table import Rules, RuleTable


class Held:
    """A request's variant, held until released; no variant by default."""

    def __init__(
        self,
        variant: int = Request.variant,
        release: Callable[[], None] = lambda: None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """Store a variant, its release function, and warnings for the client."""
        self.variant, self._releases, self.warnings = variant, [release], warnings

    def release(self) -> None:
        """Release the variant; further calls do nothing."""
        while self._releases:
            self._releases.pop()()


class Processors:
    """Logits processors of an engine. The methods are thread-safe."""

    def __init__(self, languages: Languages | None, table: RuleTable) -> None:
        """Create free variants.

        Args:
            languages: the loaded grammars; None disables grammars.
            table: the rules.
        """
        self._languages, self._table = languages, table
        self._compilers = None if languages is None else Compilers(languages.vocabulary)
        self._num_grammars = 0 if languages is None else languages.most
        self._free = list(range(table.num_rows))
        grammars, rows = range(self._num_grammars), range(table.num_rows)
        # Variants are the grammars, followed by the rows of rules.
        self._grammar_of = np.array([*grammars, *(-1 for _ in rows)], np.int32)
        self._row_of = np.array([*(-1 for _ in grammars), *rows], np.int32)
        # Held while the engine's processor is replaced, which takes one window.
        self._changing = threading.Lock()
        # Held briefly to read or change the held entries.
        self._room = threading.Condition()
        self._num_released = 0
        self._num_closed = 0

    def start(self) -> None:
        """Start a process that compiles grammars."""
        if self._compilers is not None:
            self._compilers.start()

    def close(self) -> None:
        """Stop the processes, and refuse the waiting requests."""
        if self._compilers is not None:
            self._compilers.close()
        with self._room:
            self._num_closed += 1
            self._room.notify_all()

    @property
    def logits_processor(self) -> LogitsProcessor | None:
        """Current logits processor of the engine; None if disabled."""
        if not len(self._row_of):
            return None
        if self._languages is None:
            return self._table.logits_processor
        if not self._table.num_rows:
            return self._languages.grammar
        return chain(
            renumber(self._languages.grammar, self._grammar_of.copy()),
            renumber(self._table.logits_processor, self._row_of),
        )

    def hold(
        self,
        engine: Engine,
        language: Language | None,
        rules: Rules | None,
        deadline: float,
    ) -> Held:
        """Return a request's variant, held until it is released.

        Args:
            engine: owner of the logits processor.
            language: the language of the completions.
            rules: the rules of the request.
            deadline: on the monotonic clock, in seconds.

        Raises:
            Refused: if the language is invalid, or there is no capacity before
                the deadline.
        """
        if language is None and rules is None:
            return Held()
        while True:
            compiled = self._compile(language, deadline)
            held = self._wait_for_room(engine, language, compiled, rules, deadline)
            if held is not None:
                return held

    def _compile(self, language: Language | None, deadline: float) -> Compiled | None:
        """Return the grammar of a language that is not loaded, else None."""
        if language is None or self._find(language) is not None:
            return None
        assert self._compilers is not None, "refused before"
        return self._compilers.compile(language, deadline)

    def _find(self, language: Language) -> Entry | None:
        assert self._languages is not None, "refused before"
        with self._room:
            return self._languages.find(language)

    def _wait_for_room(
        self,
        engine: Engine,
        language: Language | None,
        compiled: Compiled | None,
        rules: Rules | None,
        deadline: float,
    ) -> Held | None:
        """Hold a variant; return None if its loaded grammar was evicted meanwhile."""
        while True:
            with self._changing:
                seen = self._num_released
                is_lost = language is not None and compiled is None
                if is_lost and self._find(language) is None:
                    return None
                held = self._try_to_hold(engine, language, compiled, rules)
            if held is not None:
                return held
            self._wait_for_release(seen, deadline, rules)

    def _wait_for_release(
        self, seen: int, deadline: float, rules: Rules | None
    ) -> None:
        """Wait until `_num_released` differs from `seen`."""

        closed = self._num_closed

        def has_changed() -> bool:
            return (self._num_released, self._num_closed) != (seen, closed)

        with self._room:
            is_time = not self._room.wait_for(
                has_changed, max(0.0, deadline - time.monotonic())
            )
            if self._num_closed != closed:
                raise Refused("the server is shutting down", status=503)
            if is_time:
                what = "grammars" if rules is None else "rules"
                raise Refused(
                    f"running requests use all room for {what}; try again later",
                    status=429,
                    headers={"Retry-After": "1"},
                )

    def _try_to_hold(
        self,
        engine: Engine,
        language: Language | None,
        compiled: Compiled | None,
        rules: Rules | None,
    ) -> Held | None:
        """Hold a variant; return None if there is no capacity."""
        with self._room:
            if rules is not None and not self._free:
                return None
            entry, is_new = None, False
            if language is not None:
                assert self._languages is not None, "refused before"
                entry = self._languages.find(language)
                if entry is None:
                    assert compiled is not None, "it was looked for"
                    entry, is_new = self._languages.add(language, compiled), True
                if entry is None:
                    return None
                entry.num_held += 1
            row = None if rules is None else self._free.pop()
        held = self._note(entry, row)
        try:
            if row is not None and rules is not None:
                self._table.put(row, rules)
                self._grammar_of[held.variant] = (
                    Request.variant if entry is None else entry.variant
                )
            if is_new or row is not None:
                logits_processor = self.logits_processor
                assert logits_processor is not None, "there is room"
                engine.replace_logits_processor(logits_processor)
        except BaseException:
            held.release()
            if is_new and language is not None and self._languages is not None:
                with self._room:
                    self._languages.remove(language)
            raise
        return held

    def _note(self, entry: Entry | None, row: int | None) -> Held:
        """Return a record that releases a grammar and a row of rules."""

        def release() -> None:
            with self._room:
                if entry is not None:
                    entry.num_held -= 1
                if row is not None:
                    self._free.append(row)
                self._num_released += 1
                self._room.notify_all()

        warnings = () if entry is None else entry.warnings
        if row is not None:
            return Held(self._num_grammars + row, release, warnings)
        assert entry is not None, "something is held"
        return Held(entry.variant, release, warnings)
