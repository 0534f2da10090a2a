"""Logits processors of an engine: languages, and rules of single requests.

A variant is a grammar alone, or a row of rules, perhaps with a grammar. Both come and
go while the engine runs. A request for which there is no room waits until another ends.
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
    """The logits processor of a request, until released; none at first."""

    def __init__(
        self,
        variant: int = Request.variant,
        release: Callable[[], None] = lambda: None,
        told: tuple[str, ...] = (),
    ) -> None:
        """Keep a variant, the function that releases it, and warnings for clients."""
        self.variant, self._releases, self.told = variant, [release], told

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        while self._releases:
            self._releases.pop()()


class Processors:
    """The logits processors of an engine. Any thread may call the methods."""

    def __init__(self, languages: Languages | None, table: RuleTable) -> None:
        """Make room.

        Args:
            languages: that texts may be of; None for no room.
            table: of the rules that requests have at one time.
        """
        self._languages, self._table = languages, table
        self._compilers = None if languages is None else Compilers(languages.vocabulary)
        self._num_grammars = 0 if languages is None else languages.most
        self._free = list(range(table.num_rows))
        grammars, rows = range(self._num_grammars), range(table.num_rows)
        # Variants are the grammars, each alone, and the rows behind them.
        self._grammar_of = np.array([*grammars, *(-1 for _ in rows)], np.int32)
        self._row_of = np.array([*(-1 for _ in grammars), *rows], np.int32)
        # Held while the engine is given something else, which takes a window.
        self._changing = threading.Lock()
        # Held for a moment, to look at the held entries, or to change them.
        self._room = threading.Condition()
        self._num_released = 0
        self._num_closed = 0

    def start(self) -> None:
        """Start the processes that compile grammars."""
        if self._compilers is not None:
            self._compilers.start()

    def close(self) -> None:
        """Close it, and refuse the requests that wait for room."""
        if self._compilers is not None:
            self._compilers.close()
        with self._room:
            self._num_closed += 1
            self._room.notify_all()

    @property
    def logits_processor(self) -> LogitsProcessor | None:
        """The current logits processor of the engine; None without any room."""
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
        """Return the logits processor of a request, kept until it is released.

        Args:
            engine: owner of the logits processor.
            language: of the texts.
            rules: of the request.
            deadline: of the monotonic clock.

        Raises:
            Refused: if there is no such language, or no room in time.
        """
        if language is None and rules is None:
            return Held()
        while True:
            compiled = self._compile(language, deadline)
            held = self._wait_for_room(engine, language, compiled, rules, deadline)
            if held is not None:
                return held

    def _compile(self, language: Language | None, deadline: float) -> Compiled | None:
        """Return the grammar of a language that is not there."""
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
        """Hold a request's processor; None if its grammar was removed meanwhile."""
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
        """Wait until more requests have released their processors than `seen`."""

        closed = self._num_closed

        def has_changed() -> bool:
            return (self._num_released, self._num_closed) != (seen, closed)

        with self._room:
            is_time = not self._room.wait_for(
                has_changed, max(0.0, deadline - time.monotonic())
            )
            if self._num_closed != closed:
                raise Refused("the server is going down", status=503)
            if is_time:
                what = "grammars" if rules is None else "rules"
                raise Refused(
                    f"running requests have all room for {what}; try later",
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
        """Hold a request's processor; None if there is no room."""
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
        """Return a record that releases a grammar and a row."""

        def release() -> None:
            with self._room:
                if entry is not None:
                    entry.num_held -= 1
                if row is not None:
                    self._free.append(row)
                self._num_released += 1
                self._room.notify_all()

        told = () if entry is None else entry.told
        if row is not None:
            return Held(self._num_grammars + row, release, told)
        assert entry is not None, "something is held"
        return Held(entry.variant, release, told)
