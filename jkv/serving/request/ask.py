"""What a request asks of an engine: a value, or its fields by name."""

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from typing import TypedDict

from jkv.decoding.sampling.options import GREEDY, Sampling
from jkv.metadata.requests import I32, Integers
from jkv.signatures import set_defaults
from jkv.status import UsageError

MOST_TEXTS = 2**16  # salts that are remembered; one that is forgotten is another

# Who asks; None is all who are not named.
Client = str | int | None

# The variant of a request that is not steered.
NOT_STEERED = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """What a request asks for.

    Attributes:
      tokens: i32[P] or a list, the prompt.
      n: sequences that continue it.
      max_new_tokens: most new tokens of each; None is the engine's most.
      sampling: how tokens are chosen, each field one number or n. Of one seed each
        sequence has its own (`jkv.decoding.spread_seeds`).
      stop_tokens: i32[E], that end a sequence, and are kept; None: the engine's.
      stop_sequences: i32[C] each, or lists of tokens, likewise.
      stop_strings: a sequence ends where its text has one, or the only one. It is not
        in the text; the tokens that it took are in the tokens. Looked for between
        windows.
      salt: domain of the prefix cache, an int of 32 bits, or a text, such as a client's
        secret: the same domain in every process that shares a store's folder. With
        texts, ints are 0 or more.
      priority: of those that have not begun, smaller ones go first.
      client: who asks. Of requests that wait with one priority, one of the client goes
        next that has had the least service for its share (`shares`); those of one
        client go in the order in which they came. Service is a request's tokens as they
        are computed: its prompt, whether or not it is found in the prefix cache, once
        for `max_samples` sequences, and new ones. A client that has nothing here saves
        nothing up. None is one client: all who are not named.
      variant: how its sequences are steered, one of `steering.num_variants` ways; -1 is
        not at all.
      timeout: seconds from now after which the request ends with what it has.
      keep: the class of what stays cached of it when it has ended, below the cache's
        `keep_classes` (`jkv.free`).
      keep_seconds: for how long, if nobody uses it; None is until it is handed out.

    Example:
      >>> from jkv.serving import Ask
      >>> Ask([5, 6], max_new_tokens=20, priority=-1).n
      1
    """

    tokens: Integers
    n: int = 1
    max_new_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop_tokens: Integers | None = None
    stop_sequences: Sequence[Integers] = ()
    stop_strings: Sequence[str] | str = ()
    salt: int | str = 0
    priority: int = 0
    client: Client = None
    variant: int = NOT_STEERED
    timeout: float | None = None
    keep: int = 0
    keep_seconds: float | None = None

    @classmethod
    def of(cls, tokens: "Ask | Integers", fields: "OfAsk") -> "Ask":
        """Return what is asked for, made of its fields unless it is there."""
        if not isinstance(tokens, Ask):
            return cls(tokens, **fields)
        if fields:
            raise UsageError(f"{', '.join(fields)} beside an Ask, which says it")
        return tokens


class OfAsk(TypedDict, total=False):
    """The fields of `Ask` behind the prompt, as arguments."""

    n: int
    max_new_tokens: int | None
    sampling: Sampling
    stop_tokens: Integers | None
    stop_sequences: Sequence[Integers]
    stop_strings: Sequence[str] | str
    salt: int | str
    priority: int
    client: Client
    variant: int
    timeout: float | None
    keep: int
    keep_seconds: float | None


set_defaults(OfAsk, Ask)


class Domains:
    """Numbers of the domains that texts name: below 0, in the order of first use.

    A cache knows a domain by a number of 32 bits; that of a text is of one process. A
    store, whose blocks outlive the process, names the domain by the text's hash.
    """

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
            has_texts = bool(self._numbers) or isinstance(salt, str)
            has_negative = self._has_negative or (isinstance(salt, int) and salt < 0)
            if has_negative and has_texts:
                raise ValueError(
                    "salt must be a text or an int from 0 to 2**31 - 1 where any "
                    f"request has a text, got {salt!r:.60}"
                )
            if isinstance(salt, int):
                self._has_negative = has_negative
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
