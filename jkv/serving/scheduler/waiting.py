"""Prompts that wait: by priority, then by what their clients have had, then by age.

Among prompts of one priority the client goes next that has had least service for its
share. Service is counted in tokens while they are computed, as the virtual token
counter of Sheng et al. does it ("Fairness in serving large language models", 2024,
https://arxiv.org/abs/2401.00588), since nobody knows before how long a text will be. A
client that begins to wait starts from the least service of those that wait already, so
nothing is saved up while it is idle: this is the virtual time of start-time fair
queueing (Goyal, Vin and Cheng 1996, https://doi.org/10.1145/248156.248171).
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping

import numpy as np

from jkv.serving.request.ask import Client

# A number of a request, and the first of the samples that share the prompt.
Prompt = tuple[int, int]


class Waiting:
    """Prompts of all priorities, those on the device too, until they end."""

    def __init__(self, shares: Mapping[Client, float]):
        for client, share in shares.items():
            is_number = isinstance(share, int | float | np.number)
            if not is_number or isinstance(share, bool) or not 0 < share < math.inf:
                raise ValueError(
                    f"shares: a share must be a number above 0, got {share!r} of "
                    f"{client!r}"
                )
        self.num_waiting = 0
        self._shares = dict(shares)
        self._levels: dict[int, FairQueue] = {}
        # The levels where a prompt waits or waited, each once, the smallest first.
        self._order: list[int] = []
        self._ordered: set[int] = set()

    def add(self, priority: int, client: Client, prompt: Prompt) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = FairQueue(self._shares)
        level.add(client, prompt)
        self.num_waiting += 1
        if priority not in self._ordered:
            heapq.heappush(self._order, priority)
            self._ordered.add(priority)

    def pop(self) -> Prompt | None:
        while self._order:
            level = self._levels.get(self._order[0])
            if level is not None and level.num_waiting:
                self.num_waiting -= 1
                return level.pop()
            self._ordered.remove(heapq.heappop(self._order))
        return None

    def charge(self, priority: int, client: Client, num_tokens: int) -> None:
        self._levels[priority].charge(client, num_tokens)

    def end(self, priority: int, client: Client, prompt: Prompt) -> None:
        level = self._levels[priority]
        before = level.num_waiting
        level.end(client, prompt)
        self.num_waiting += level.num_waiting - before
        if not level.num_open:
            # A busy period is over, and the next one begins with equals.
            del self._levels[priority]


@dataclasses.dataclass(slots=True, eq=False)
class _Line:
    """A client's prompts of one priority."""

    client: Client
    share: float
    service: float = 0.0  # tokens computed for it, over its share
    # Prompts in the order in which they came, and their numbers in it.
    waiting: dict[Prompt, int] = dataclasses.field(default_factory=dict)
    num_open: int = 0  # prompts that wait or are being computed
    number: int = 0  # of the first that waits, or of the last one that did
    is_ordered: bool = False  # whether the order has an entry of it

    def find_place(self) -> tuple[float, int]:
        """Return where the line belongs among others: service, then age."""
        self.number = next(iter(self.waiting.values()), self.number)
        return self.service, self.number


class FairQueue:
    """Prompts of one priority, a line for each client."""

    def __init__(self, shares: Mapping[Client, float]):
        self.num_waiting = self.num_open = 0  # open ones have not ended
        self._shares = shares
        self._lines: dict[Client, _Line] = {}
        # An entry for each line where something waits, and for each idle one that is
        # still ahead of the others: service, number, client. Service only grows, so an
        # entry that is out of date stands too early, and is set right when it comes up.
        self._order: list[tuple[float, int, Client]] = []
        self._newest: _Line | None = None  # the last one that a prompt was taken of
        self._next_number = 0

    def add(self, client: Client, prompt: Prompt) -> None:
        """Let a prompt wait behind the others of its client."""
        floor = self._find_floor()  # may forget this client
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(client, self._shares.get(client, 1.0))
        if not line.waiting:
            line.service = max(line.service, floor)
        line.waiting[prompt] = self._next_number
        self._next_number += 1
        line.num_open += 1
        self.num_open += 1
        self.num_waiting += 1
        if not line.is_ordered:
            self._put(line)

    def pop(self) -> Prompt:
        """Take the prompt that goes next; at least one waits."""
        line = self._find_first()
        assert line is not None
        self._take_entry()
        prompt = next(iter(line.waiting))
        del line.waiting[prompt]
        self.num_waiting -= 1
        self._newest = line
        if line.waiting:
            self._put(line)
        return prompt

    def charge(self, client: Client, num_tokens: int) -> None:
        """Note tokens that were computed for a client; it has a prompt here."""
        line = self._lines[client]
        line.service += num_tokens / line.share

    def end(self, client: Client, prompt: Prompt) -> None:
        """Forget a prompt that has ended, whether or not it waited."""
        line = self._lines[client]
        if line.waiting.pop(prompt, None) is not None:
            self.num_waiting -= 1
        line.num_open -= 1
        self.num_open -= 1
        if not line.num_open and not line.is_ordered:
            self._put(line)

    def _find_first(self) -> _Line | None:
        """Return the line that goes next, whose entry is the first then, if any is."""
        while self.num_waiting:
            service, number, client = self._order[0]
            line = self._lines[client]
            if line.waiting and (service, number) == line.find_place():
                return line
            self._take_entry()
            if line.waiting or (not line.num_open and line.service > service):
                self._put(line)
            elif not line.num_open:
                # Clients that wait have all had as much service as this one, so that
                # a new line would begin at the same place.
                del self._lines[client]
        return None

    def _find_floor(self) -> float:
        """Return the service from which a client starts that begins to wait.

        It is the virtual time and never decreases: every client that waits has had at
        least the service of the line from which a prompt was taken last.
        """
        line = self._find_first() or self._newest
        return 0.0 if line is None else line.service

    def _put(self, line: _Line) -> None:
        heapq.heappush(self._order, (*line.find_place(), line.client))
        line.is_ordered = True

    def _take_entry(self) -> None:
        _, _, client = heapq.heappop(self._order)
        self._lines[client].is_ordered = False
