"""Domains of the prefix cache by text: numbers for the device, names for a store.

A cache knows a domain by a number of 32 bits. A text, such as a client's secret, gets a
number of its own here, which no other process knows; a store of blocks that outlive the
process names the domain by the text's hash.
"""

import collections
import hashlib
import threading

from jkv.metadata.requests import I32

MOST_TEXTS = 2**16  # remembered; one that is forgotten gets a new number


class Domains:
    """The numbers of texts: below 0, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = -1
        # Hashes by number, and numbers by hash, the longest unused first.
        self._names: dict[int, str] = {}
        self._numbers: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._has_negative = False

    def number(self, salt: int | str) -> int:
        """Return the number of a domain, i32; that of a number is itself.

        Raises:
          ValueError: for numbers below 0, as 32 bits, beside texts.
        """
        with self._lock:
            if isinstance(salt, int):
                self._has_negative |= salt < 0
            if self._has_negative and (self._numbers or isinstance(salt, str)):
                raise ValueError(
                    "salt must be a text or an int from 0 to 2**31 - 1 where any "
                    f"request has a text, got {salt!r:.60}"
                )
            if isinstance(salt, int):
                return salt
            name = hashlib.blake2b(
                salt.encode(errors="surrogatepass"), digest_size=24
            ).hexdigest()
            if name not in self._numbers:
                if self._next < I32.min:
                    raise ValueError(f"salt {salt!r:.60} is one text too many")
                self._numbers[name], self._names[self._next] = self._next, name
                self._next -= 1
                if len(self._numbers) > MOST_TEXTS:
                    _, oldest = self._numbers.popitem(last=False)
                    del self._names[oldest]
            self._numbers.move_to_end(name)
            return self._numbers[name]

    def name(self, number: int) -> int | str | None:
        """Return what a domain is called in all processes; None if it was forgotten."""
        with self._lock:
            if number >= 0 or self._next == -1:
                return number
            return self._names.get(number)
