"""What compiling may take: memory, steps and time."""

import time
from collections.abc import Callable
from typing import TypeAlias

from jkv.grammar.errors import TooLarge

# Steps are edges that are looked at; so many bytes stand for one of them, and an
# entry of an array takes a part of one.
_BYTES_OF_STEP, _ENTRIES_OF_STEP = 32, 256
_LEAST_STEPS = 2**18
_STEPS_BETWEEN_LOOKS = 2**12  # at the clock

# Seconds from now, or what is asked now and then whether to stop; None for any time.
Timeout: TypeAlias = float | Callable[[], bool] | None


class Bounds:
    """Bounds of one compilation, which counts its steps.

    `max_bytes` bound the tables, and what compiling holds at one time; steps are
    bounded in proportion. Past a bound `TooLarge` is raised. Two with the same
    `max_bytes` are equal: what was compiled within them is the same.
    """

    def __init__(self, max_bytes: int, timeout: Timeout = None) -> None:
        self.max_bytes = max_bytes
        self._timeout, self._is_over = timeout, lambda: False
        if callable(timeout):
            self._is_over = timeout
        elif timeout is not None:
            deadline = time.monotonic() + timeout
            self._is_over = lambda: time.monotonic() > deadline
        self._most_steps = max(_LEAST_STEPS, max_bytes // _BYTES_OF_STEP)
        self._steps = self._next_look = 0

    def __eq__(self, other: object) -> bool:
        """Whether what is compiled does not depend on which of the two is given."""
        return isinstance(other, Bounds) and self.max_bytes == other.max_bytes

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash(self.max_bytes)

    def share(self, parts: int) -> "Bounds":
        """Return a part of these bounds, until the same time."""
        found = Bounds(self.max_bytes // parts)
        found._is_over, found._timeout = self._is_over, self._timeout
        return found

    def hold(self, num_bytes: int, what: str) -> None:
        """Check what is held at one time."""
        if num_bytes > self.max_bytes:
            raise TooLarge(
                f"{what} takes {num_bytes:,} bytes, max_bytes is {self.max_bytes:,}"
            )

    def spend(self, steps: int, *, entries: int = 0) -> None:
        """Count steps, and entries of arrays looked at at once; mind the time."""
        self._steps += steps + entries // _ENTRIES_OF_STEP
        if self._steps < self._next_look:
            return
        self._next_look = self._steps + _STEPS_BETWEEN_LOOKS
        if self._steps > self._most_steps:
            raise TooLarge(
                f"compiling takes more than {self._most_steps:,} steps, which max_bytes"
                f", {self.max_bytes:,}, bounds"
            )
        if self._is_over():
            if callable(self._timeout):
                raise TooLarge("compiling was stopped by what timeout= asks")
            raise TooLarge(f"compiling takes more than timeout, {self._timeout} s")


# Of what the project itself writes down, such as the characters of a class.
UNBOUNDED = Bounds(2**40)
