"""Commands from the first process of a mesh to the others, one small array a window.

A command consists of i32 words, so that followers receive numbers only. The command of
a window has the used rows of `Arrivals`, cut to the longest prompt, and the indices of
cancelled sequences.
"""

import enum
from collections.abc import Sequence

import jax
import numpy as np

from jkv.serving.device.programs import Arrivals, Change, EngineSizes
from jkv.sharding.processes import Broadcast

# Words of a message. XLA's CPU runtime executes smaller programs in the calling thread,
# which would block until all processes have joined.
NUM_WORDS = 1024
# Words of each further message of a longer command.
NUM_FURTHER_WORDS = 16 * NUM_WORDS

_NUM_HEAD_WORDS = 2


class Order(enum.IntEnum):
    """Command to the followers."""

    WINDOW = enum.auto()  # apply changes and start a window
    WARM_UP = enum.auto()
    REPLACE_PARAMS = enum.auto()
    REPLACE_LOGITS_PROCESSOR = enum.auto()
    FORGET_CACHED = enum.auto()
    PREEMPT_ALL = enum.auto()
    CLOSE = enum.auto()  # return: the engine is closed
    FAIL = enum.auto()  # raise: the first process failed


class Orders:
    """Channel for commands from the first process of a mesh to the others."""

    def __init__(self, broadcast: Broadcast):
        self._broadcast = broadcast

    def send(self, order: Order, words: np.ndarray | None = None) -> None:
        words = np.zeros(0, np.int32) if words is None else words
        message = np.zeros(NUM_WORDS, np.int32)
        message[:_NUM_HEAD_WORDS] = order, len(words)
        sent = NUM_WORDS - _NUM_HEAD_WORDS
        message[_NUM_HEAD_WORDS:][: len(words)] = words[:sent]
        self._broadcast.start(message)
        for start in range(sent, len(words), NUM_FURTHER_WORDS):
            part = words[start : start + NUM_FURTHER_WORDS]
            self._broadcast.start(np.resize(part, NUM_FURTHER_WORDS))

    def receive(self) -> tuple[Order, np.ndarray]:
        """Wait for a command; return it with its words, i32[...]."""
        message = self._take(NUM_WORDS)
        order, count = message[:_NUM_HEAD_WORDS].tolist()
        parts = [message[_NUM_HEAD_WORDS:]]
        for _ in range(NUM_WORDS - _NUM_HEAD_WORDS, count, NUM_FURTHER_WORDS):
            parts.append(self._take(NUM_FURTHER_WORDS))
        return Order(order), np.concatenate(parts)[:count]

    def share(self, array: np.ndarray) -> np.ndarray:
        """Return the first process's array; others pass one of its shape and dtype."""
        # As bytes: the broadcast is a sum over processes, which is exact for integers
        # only.
        own = np.frombuffer(array.tobytes(), np.uint8)
        found = np.asarray(self._broadcast.start(own))
        return found.view(array.dtype).reshape(array.shape)

    def warm_up(self) -> None:
        """Compile the broadcasts; all processes call this."""
        for count in (NUM_WORDS, NUM_FURTHER_WORDS):
            self._take(count)

    def _take(self, count: int) -> np.ndarray:
        return np.asarray(self._broadcast.start(np.zeros(count, np.int32)))


def pack_window(changes: Sequence[Change], num_steps: int) -> np.ndarray:
    parts = [np.array([num_steps, len(changes)], np.int32)]
    for arrivals, cancelled, _ in changes:
        count = int(np.count_nonzero(arrivals.indices >= 0))  # the first lanes
        longest = int(np.count_nonzero(arrivals.tokens >= 0, axis=1).max(initial=0))
        (ended,) = np.nonzero(cancelled)
        parts.append(np.array([count, longest, len(ended)], np.int32))
        parts.append(ended.astype(np.int32))
        for used in _find_used(arrivals, count, longest):
            parts.append(np.ascontiguousarray(used).reshape(-1).view(np.int32))
    return np.concatenate(parts)


def unpack_window(sizes: EngineSizes, words: np.ndarray) -> tuple[list[Change], int]:
    """Return the changes and the number of steps passed to `pack_window`."""
    rest = words

    def take(count: int) -> np.ndarray:
        nonlocal rest
        taken, rest = rest[:count], rest[count:]
        return taken

    changes = []
    num_steps, num_changes = take(2).tolist()
    for _ in range(num_changes):
        count, longest, num_ended = take(3).tolist()
        cancelled = np.zeros(sizes.num_sequences, bool)
        cancelled[take(num_ended)] = True
        arrivals = Arrivals.of(sizes, [])
        for used in _find_used(arrivals, count, longest):
            used[...] = take(used.size).view(used.dtype).reshape(used.shape)
        changes.append(Change(arrivals, cancelled))
    return changes, num_steps


def _find_used(arrivals: Arrivals, count: int, longest: int) -> list[np.ndarray]:
    """Return views of the parts filled by prompts, in arrays of 4-byte words."""
    fields = arrivals._asdict()
    tokens = fields.pop("tokens")[:count, :longest]
    return [tokens, *(each[:count] for each in jax.tree.leaves(fields))]
