"""Limits of one compilation: memory, steps and time."""

import time
from collections.abc import Callable
from typing import TypeAlias

from jkv.grammar.errors import TooLarge
from jkv.status import UsageError

# A step is one visited edge. Steps are bounded by max_bytes / _BYTES_OF_STEP;
# vectorized work counts one step per _ENTRIES_OF_STEP array entries.
_BYTES_OF_STEP, _ENTRIES_OF_STEP = 32, 256
_LEAST_STEPS = 2**18
_STEPS_BETWEEN_LOOKS = 2**12  # between two reads of the clock

# Seconds from now, or a function that returns True to cancel; None for no limit.
Timeout: TypeAlias = float | Callable[[], bool] | None


class Bounds:
    """Limits of one compilation, with its step counter.

    `max_bytes` limits the tables and the peak memory of compiling; the number of steps
    is limited in proportion. Exceeding a limit raises `TooLarge`. Two instances with
    equal `max_bytes` compare equal, since both lead to the same compiled language.
    """

    def __init__(self, max_bytes: int, timeout: Timeout = None) -> None:
        if not max_bytes >= 0:  # also NaN, which no size exceeds
            raise UsageError(f"max_bytes must be >= 0, got {max_bytes}")
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
        """Return True if both limits lead to the same compiled language."""
        return isinstance(other, Bounds) and self.max_bytes == other.max_bytes

    def __hash__(self) -> int:
        """Return a hash consistent with equality."""
        return hash(self.max_bytes)

    def share(self, parts: int) -> "Bounds":
        """Return 1/parts of `max_bytes`, with the same deadline."""
        found = Bounds(self.max_bytes // parts)
        found._is_over, found._timeout = self._is_over, self._timeout
        return found

    def hold(self, num_bytes: int, what: str) -> None:
        """Raise `TooLarge` if `num_bytes` exceeds `max_bytes`."""
        if num_bytes > self.max_bytes:
            raise TooLarge(
                f"max_bytes {self.max_bytes:,} exceeded: {what} needs {num_bytes:,}"
            )

    def spend(self, steps: int, *, entries: int = 0) -> None:
        """Count `steps` and visited array `entries`; raise `TooLarge` past a limit."""
        self._steps += steps + entries // _ENTRIES_OF_STEP
        if self._steps < self._next_look:
            return
        self._next_look = self._steps + _STEPS_BETWEEN_LOOKS
        if self._steps > self._most_steps:
            raise TooLarge(
                f"max_bytes {self.max_bytes:,} allows {self._most_steps:,} compilation "
                "steps, the language needs more; raise max_bytes or simplify it"
            )
        if self._is_over():
            if callable(self._timeout):
                raise TooLarge("timeout() returned True and cancelled the compilation")
            raise TooLarge(f"timeout of {self._timeout} s exceeded by the compilation")


# For the package's own constant languages, such as character classes.
UNBOUNDED = Bounds(2**40)
