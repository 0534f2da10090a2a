"""What steers the texts of an engine: languages, and rules of single requests.

A variant is a grammar alone, or a row of rules, perhaps with a grammar. Both come and
go while the engine runs.
"""

import threading

import numpy as np

from jkv.serving import Engine
from jkv.steering import Steering, chain, renumber

from .grammars import Held, Languages
from .languages import Language
from .mistakes import Refused
from .rule_table import Rules, RuleTable


class Steered:
    """What steers the texts of an engine. Any thread may call the methods."""

    def __init__(
        self, languages: Languages | None, num_rules: int, num_stop_tokens: int
    ) -> None:
        """Make room.

        Args:
            languages: that texts may be of; None for no room.
            num_rules: requests that have rules at one time.
            num_stop_tokens: that a request can have.
        """
        self._languages, self._num_rules = languages, num_rules
        self._num_grammars = 0 if languages is None else languages.most
        self._table = RuleTable(num_rules, num_stop_tokens)
        self._free = list(range(num_rules))
        grammars, rows = range(self._num_grammars), range(num_rules)
        # Variants are the grammars, each alone, and the rows behind them.
        self._grammar_of = np.array([*grammars, *(-1 for _ in rows)], np.int32)
        self._row_of = np.array([*(-1 for _ in grammars), *rows], np.int32)
        self._changing, self._lock = threading.Lock(), threading.Lock()

    @property
    def steering(self) -> Steering | None:
        """It as it is now, for `Engine(steering=)`; None if there is no room at all."""
        if not len(self._row_of):
            return None
        if self._languages is None:
            return self._table.steering
        if not self._num_rules:
            return self._languages.grammar
        return chain(
            renumber(self._languages.grammar, self._grammar_of.copy()),
            renumber(self._table.steering, self._row_of),
        )

    def hold(
        self, engine: Engine, language: Language | None, rules: Rules | None
    ) -> Held:
        """Return what steers a request, kept until it is released.

        Raises:
            Refused: if there is no such language, or running requests have all room.
        """
        if language is None and rules is None:
            return Held()
        with self._changing:
            held = Held()
            if language is not None:
                assert self._languages is not None, "refused before"
                held = self._languages.hold(language, lambda: self._replace(engine))
            if rules is not None:
                try:
                    held = self._hold_row(engine, rules, held)
                except BaseException:
                    held.release()
                    raise
            return held

    def _hold_row(self, engine: Engine, rules: Rules, language: Held) -> Held:
        """Write rules into a free row, with a language that is released with it."""
        with self._lock:
            if not self._free:
                raise Refused(
                    "running requests have all room for rules; try later",
                    status=429,
                    headers={"Retry-After": "1"},
                )
            row = self._free.pop()
        variant = self._num_grammars + row

        def release() -> None:
            language.release()
            with self._lock:
                self._free.append(row)

        try:
            self._table.put(row, rules)
            self._grammar_of[variant] = language.variant
            self._replace(engine)
        except BaseException:
            release()
            raise
        return Held(variant, release)

    def _replace(self, engine: Engine) -> None:
        steering = self.steering
        assert steering is not None, "there is room"
        engine.replace_steering(steering)
