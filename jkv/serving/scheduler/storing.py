"""Cached blocks that leave the pool for a store, and come back for prompts that wait.

Both are done between two windows. Blocks leave before the pool would hand them out, so
that a share of it always holds nothing. A prompt that goes to the device is looked up
in the store first: what the cache has not, and what takes less time to copy than to
compute, is restored.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np

from jkv.blocks import contents
from jkv.prefixes.verbs import match
from jkv.serving.device.loop import Loop
from jkv.serving.device.processes import SharedLoop
from jkv.serving.request.request import Request, RequestState
from jkv.status import UsageError
from jkv.tiers.choosing import count
from jkv.tiers.held import put_together
from jkv.tiers.layout import Layout
from jkv.tiers.restoring import restore
from jkv.tiers.spilling import check_has_texts, take
from jkv.tiers.store import BlockStore

BLOCKS_PER_SPILL = 64  # at most, between two windows
# Shorter prompts tell little of how fast they are computed.
FEWEST_TIMED = 64


class StoreOptions(NamedTuple):
    """Where blocks go, and when; the fields are arguments of `Engine`."""

    store: BlockStore | None
    share: float


@dataclasses.dataclass
class _Pace:
    """Seconds that a token takes, the newest weighing most; 0 until one was timed."""

    seconds: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """Note how long some tokens took."""
        new = seconds / tokens
        self.seconds = new if not self.seconds else 0.7 * self.seconds + 0.3 * new


class Storing:
    """What goes between a cache and its store."""

    def __init__(self, loop: Loop, store: BlockStore, share: float):
        if not 0 < share <= 1:
            raise UsageError(f"store_share must be above 0 and at most 1, got {share}")
        store.belong(Layout.of(loop.cache))
        self._loop, self._store = loop, store
        sizes = [*loop.num_blocks]
        if num_places := loop.cache.metadata.index.num_places:
            sizes.append(num_places)
        self._reserve = [max(int(size * share), 1) for size in sizes]
        # Of the cache before the window under way, which has been computed.
        self._counts: jax.Array | None = None
        self._copying, self._computing = _Pace(), _Pace()
        # Blocks that were restored for prompts that have not begun.
        self._awaited: dict[Request, int] = {}
        self._read: float | None = None  # when the last window was
        self.num_spilled = self.num_restored = self.num_tokens = 0

    @classmethod
    def of(cls, loop: Loop, options: StoreOptions) -> "Storing | None":
        """Return what goes between a cache and a store, None without one.

        Raises:
          ValueError: for a cache whose blocks cannot be stored.
        """
        if options.store is None:
            return None
        if isinstance(loop, SharedLoop):
            raise UsageError(
                "a store is of one process: on a mesh of several, leave store= out"
            )
        check_has_texts(loop.cache)
        return cls(loop, options.store, options.share)

    def settle(self, dispatched: list[Request]) -> None:
        """Do what is to be done before the next window.

        Args:
          dispatched: requests that go to the device now.
        """
        if lacking := self._find_lacking():
            self._spill(lacking)
        for request in dict.fromkeys(dispatched):
            self._restore(request)
        self._counts = count(self._loop.cache.metadata)

    def note_window(self, prompt_tokens: int, now: float) -> None:
        """Note that a window was read in which so many tokens of prompts were computed.

        Args:
          prompt_tokens: how many.
          now: the time, in seconds.
        """
        if prompt_tokens >= FEWEST_TIMED and self._read is not None:
            self._computing.add(now - self._read, prompt_tokens)
        self._read = now

    def warm_up(self) -> None:
        """Compile what blocks are copied with, by copying some to where they are."""
        self._spill(0)
        layout = Layout.of(self._loop.cache)
        tokens = np.zeros((1, layout.block_size), np.int32)
        bare = put_together(tokens, np.full(1, -1, np.int32), 0, {}, layout)
        cache, _ = restore(self._loop.cache, bare, donate=True)
        for number in cache.metadata.block_numbers:
            group, size = cache.metadata.groups[number], 1
            while size <= min(2 * BLOCKS_PER_SPILL, group.num_blocks):
                blocks = np.arange(size, dtype=np.int32)
                held = contents.fetch(cache, number, blocks)
                cache = contents.put(cache, number, blocks, held, donate=True)
                size *= 2
        self._loop.cache = cache

    def leave(self) -> None:
        """Let all that is cached leave for the store."""
        while self._spill(BLOCKS_PER_SPILL):
            pass

    def forget(self) -> None:
        """Forget everything: it is of older weights."""
        self._store.clear()

    def read(self) -> dict[str, float]:
        """Return what was done, and what there is."""
        return {
            "spilled_blocks": self.num_spilled,
            "restored_blocks": self.num_restored,
            "restored_tokens": self.num_tokens,
            "store_bytes": self._store.nbytes,
            "store_folder_bytes": self._store.folder_bytes,
            "copy_seconds_per_token": self._copying.seconds,
            "compute_seconds_per_token": self._computing.seconds,
        }

    def _find_lacking(self) -> int:
        """Return how many cached blocks should leave.

        What was restored for a prompt that has not begun stays.
        """
        if self._counts is None:
            return 0
        self._awaited = {
            request: num
            for request, num in self._awaited.items()
            if request.state == RequestState.WAITING
        }
        awaited = sum(self._awaited.values())
        lacking = 0
        counts = np.asarray(self._counts).tolist()
        for (blank, cached), reserve in zip(counts, self._reserve, strict=True):
            lacking = max(lacking, min(reserve - blank, cached - awaited))
        return min(lacking, BLOCKS_PER_SPILL)

    def _spill(self, num_blocks: int) -> int:
        """Let cached blocks leave, and snapshots; return how many were there."""
        num_left = 0
        for start in range(0, max(num_blocks, 1), BLOCKS_PER_SPILL):
            num = min(num_blocks - start, BLOCKS_PER_SPILL)
            self._loop.cache, spilled = take(self._loop.cache, num, BLOCKS_PER_SPILL)
            self.num_spilled += spilled.num_blocks
            self._store.put(spilled)
            num_left += spilled.num_blocks + spilled.num_snapshots
        return num_left

    def _restore(self, request: Request) -> None:
        """Bring back what the store has of a prompt, and the cache has not."""
        held = self._store.count(request.tokens, request.salt)
        if not held:
            return
        known = self._match(request)
        if held <= known or not self._is_worth():
            return
        start = time.monotonic()
        found = self._store.find(request.tokens, request.salt, skip=known)
        if found is None:
            return
        lacking = found.num_blocks - self._count_blank()
        if lacking > 0:
            self._spill(lacking)
        self._loop.cache, num = restore(self._loop.cache, found, donate=True)
        brought = self._match(request) - known
        self.num_restored += num
        self._awaited[request] = num
        if brought > 0:
            self.num_tokens += brought
            self._copying.add(time.monotonic() - start, brought)

    def _match(self, request: Request) -> int:
        """Return how many tokens of a prompt the cache has."""
        padded = np.full((1, self._loop.cache.max_context_length), -1, np.int32)
        padded[0, : len(request.tokens)] = request.tokens
        return int(match(self._loop.cache, padded, request.salt)[0])

    def _count_blank(self) -> int:
        return int(np.min(count(self._loop.cache.metadata), axis=0)[0])

    def _is_worth(self) -> bool:
        """Whether copying is faster, or was not timed beside computing yet."""
        copying, computing = self._copying.seconds, self._computing.seconds
        return not computing or copying < computing
